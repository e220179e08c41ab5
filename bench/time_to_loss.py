"""Time to a loss in each synchronisation mode: real gradients of real text, beside a simulated clock.

One process trains a small model with every gradient of every replica. When updates happen, and what is in them, the simulated
clock of ``adaptra modes`` says. Each update is checked: each microbatch once, ages as said and at most R, weights that add up
to one. Modes have the same rates, and each its own best one of a grid. Intervals are Student's t over seeds, 95 %.
STAR's code divides a sum by all replicas, which lowers its rate (``--divide all``). ``present`` divides by the replicas that
are in it.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from statistics import fmean

from _mode_choices import choice_rows
from _mode_runs import GRID, Contender, Runs, Setting, interval
from _real_clock import real_rows
from _table import Row, parser, print_rows
from rich.console import Console
from rich.progress import Progress

from adaptra.planning.synchrony.case import SynchronyCase
from adaptra.planning.synchrony.modes import Deadline, Local, Synchronous, XOrder

REPLICAS = 8
EXACT = Contender("exact", Synchronous())
STEALING = Contender("stealing", Synchronous(stealing=True))
DEADLINE = Contender("deadline 0.9", Deadline(0.9))
SYNC = Contender("sync", XOrder(x=REPLICAS))
"""Each update waits for all replicas, and none helps another one: what the others stand beside."""


def star_modes(x: int, given: Namespace, *, groups: bool) -> list[Contender]:
    """Return STAR's modes, for each of the divisors asked for."""
    limit = given.staleness
    modes = [("static", XOrder(x=x, staleness=limit)), ("asynchronous", XOrder(x=1, staleness=limit))]
    if groups:
        modes.insert(1, ("dynamic", XOrder(groups="auto", staleness=limit)))
    return [
        Contender(f"STAR {name}{f' x={mode.x}' if name == 'static' else ''}, {divide}", mode, divide == "all")
        for name, mode in modes
        for divide in given.divide
    ]


def slow_rows(given: Namespace, runs: Runs) -> Iterator[Row]:
    """Yield the rows of one slow pipeline of eight."""
    for factor in given.slow:
        case = SynchronyCase(REPLICAS, 1000, {0: factor}, microbatches=16)
        setting = Setting(f"1 of {REPLICAS} at {factor:g}×", case, rows=2, target=given.target)
        contenders = [EXACT, *star_modes(REPLICAS - 1, given, groups=True), DEADLINE]
        bars = {2.0: 0.58, 4.0: 0.30}
        yield from mode_rows(setting, contenders, runs, {EXACT.name: bars.get(factor)}, beats=True)


def jitter_rows(given: Namespace, runs: Runs) -> Iterator[Row]:
    """Yield the rows of jitter and pauses, and of none."""
    case = SynchronyCase(REPLICAS, 1000, {}, jitter=0.3, pauses=0.05, microbatches=8)
    setting = Setting("jitter and pauses", case, rows=4, target=given.target)
    contenders = [EXACT, STEALING, *star_modes(REPLICAS - 1, given, groups=False), DEADLINE]
    yield from mode_rows(setting, contenders, runs, {STEALING.name: 0.60})
    healthy = Setting("nothing wrong", SynchronyCase(REPLICAS, 1000, {}, microbatches=8), rows=4, target=given.target)
    yield from mode_rows(healthy, [STEALING], runs, {STEALING.name: 1.01})


def link_rows(given: Namespace, runs: Runs) -> Iterator[Row]:
    """Yield the rows of two sites whose exchange takes ten times a step's computation."""
    case = SynchronyCase(2, 1000, {}, exchange=10.0, microbatches=8)
    setting = Setting("two sites", case, rows=16, target=given.target)
    local = Contender(f"local {given.every}", Local(given.every), fragments=2)
    torchft = Contender(f"torchft's DiLoCo, {given.torchft}", Local(given.torchft))
    whole = Contender(f"local {given.every}, no fragments", Local(given.every))
    times = runs.times(setting, [EXACT, local, whole, torchft])
    best = times.best_rates()
    for one in (local, whole, torchft):
        most, loss = (0.15, 1.02) if one is local else (None, None)
        for what, rate, of_exact, is_fair in (
            ("exact's best rate", best[EXACT], best[EXACT], False),
            ("own best rate", best[one], best[EXACT], True),
            ("exact at this one's best rate, too,", best[one], best[one], True),
        ):
            name = f"two sites: {one.name}, {what} {rate:.3g}"
            exact = times.at(EXACT, of_exact)
            yield interval(f"{name}, ÷ exact", times.at(one, rate), exact, most if is_fair else None)
            ours, theirs = (times.losses_at(each, at, EXACT, of_exact) for each, at in ((one, rate), (EXACT, of_exact)))
            yield interval(f"{name}, loss at equal tokens ÷ exact's", ours, theirs, loss if is_fair else None)


def mode_rows(
    setting: Setting, contenders: Sequence[Contender], runs: Runs, bars: dict[str, float | None], *, beats: bool = False
) -> Iterator[Row]:
    """Yield times to the loss over that of sync, at exact's rate and at each mode's best."""
    times = runs.times(setting, [SYNC, EXACT, *(one for one in contenders if one != EXACT)])
    best = times.best_rates()
    sync = times.at(SYNC, best[SYNC])
    found: dict[str, float] = {}
    for one in contenders:
        for what, rate in (("matched rate", best[SYNC]), ("own best rate", best[one])):
            bar = bars.get(one.name)
            yield interval(f"{setting.name}: {one.name}, {what} {rate:.3g}, ÷ sync", times.at(one, rate), sync, bar)
        found[one.name] = fmean(times.at(one, best[one]))
    yield interval(f"{setting.name}: all busy ÷ sync, seconds of an update", times.capacities(), times.seconds(SYNC), None)
    if beats:
        star = min((name for name in found if name.startswith("STAR")), key=lambda name: found[name])
        yield Row(f"{setting.name}: exact ÷ {star}, each at its best rate", found["exact"] / found[star], 1.10, "", runs.seeds)
    yield Row(f"{setting.name}: oldest gradient; {times.updates} updates checked", times.oldest, None, "updates", 1)


def main() -> int:
    """Train, and print."""
    arguments = parser(__doc__)
    arguments.add_argument("--slow", type=float, nargs="+", default=[], metavar="FACTOR", help="one of 8 pipelines is slow")
    arguments.add_argument("--jitter", action="store_true", help="lognormal 0.3, and pauses in 5 %% of steps")
    arguments.add_argument("--link", action="store_true", help="two sites, an exchange of 10 steps")
    arguments.add_argument("--choice", action="store_true", help="our choice and STAR's rules, in 24 settings")
    arguments.add_argument("--own-rates", action="store_true", help="of --choice: each mode at its own best rate")
    arguments.add_argument("--real", action="store_true", help="the clock against processes, in 6 settings")
    arguments.add_argument("--quick", action="store_true", help="one seed, and a loss that is soon reached: no bar counts")
    arguments.add_argument("--seeds", type=int, default=5, choices=range(1, 11))
    arguments.add_argument("--target", type=float, default=2.4, help="the loss, in nats per byte")
    arguments.add_argument("--momentum", type=float, default=0.0, help="of SGD")
    arguments.add_argument("--adam", action="store_true", help="Adam in place of SGD")
    arguments.add_argument("--staleness", type=int, default=32, metavar="R", help="the most updates by which a gradient is old")
    arguments.add_argument(
        "--divide", nargs="+", choices=("all", "present"), default=["all"], help="what STAR's sums are divided by"
    )
    arguments.add_argument("--every", type=int, default=32, help="of --link: steps between exchanges")
    arguments.add_argument("--torchft", type=int, default=20, help="of --link: steps between exchanges in torchft's example")
    arguments.add_argument("--rates", type=float, nargs="+", default=[*GRID], help="the grid of learning rates")
    given = arguments.parse_args()
    if given.quick:
        given.seeds, given.target, given.slow, given.jitter, given.link, given.choice = (
            1,
            2.9,
            given.slow or [2.0],
            True,
            True,
            True,
        )
    if not (given.slow or given.jitter or given.link or given.choice or given.real):
        given.slow, given.jitter, given.link, given.choice = [2.0, 4.0], True, True, True
    rows: list[Row] = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        runs = Runs(given.seeds, tuple(given.rates), given.momentum, given.adam, progress)
        rows += slow_rows(given, runs)
        if given.jitter:
            rows += jitter_rows(given, runs)
        if given.link:
            rows += link_rows(given, runs)
        if given.choice:
            rows += choice_rows(runs, given.staleness, at_own_rates=given.own_rates, is_quick=given.quick)
        if given.real:
            rows += real_rows(progress)
    for line in runs.grids:
        print(line, file=sys.stderr)
    title = f"time to a loss of {given.target:g}, {given.seeds} seeds"
    print_rows(title, rows, baseline="bar", as_json=given.json)
    if given.quick:  # so few updates show that all of it runs, and no more
        return 0
    return int(any(row.baseline is not None and not row.ours <= row.baseline for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
