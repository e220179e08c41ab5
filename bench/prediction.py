"""Share or wait: what decisions about a slow worker cost when the end of its slowness is foretold in different ways.

A change costs its price once, and ends what slowness costs. The price is in steps of slowness, there and back: 4, 16 and 64.
Costs are those of foresight, which knows when each spell ends, times a figure, with each price as important as another.

- As last time: what is slow stays slow, so the change is made at once.
- Ours: the hazard from the spells before, and what the kernel says, where that did better in this job.
- LSTM: a network with processor and network as inputs, trained on the same spells.
- Rent or buy: the change is made once slowness has cost as much as it.
- The hazard known: the best decisions of whom the hazard is told, but not when a spell ends. Nobody is better without a look
  into the future.

A false alarm is a change after which slowness went on for less than its price. "As last time" misses no spell that was worth a
change. Half of the spells are known beforehand, and the rest is judged. Samples of processor and network are drawn: a slow
worker has half of the processor. ``mixed`` has short spells of the processor and long ones of the network, and samples show
which.

With ``--burners`` slowness is real: processes burn the processor of this one, and its steps are timed. The detector says when
they are slow, and the kernel's own figures are the samples.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import groupby
from statistics import fmean

from _burners import burned_steps
from _lstm import predicted
from _table import Row, half_interval, parser, print_rows
from rich.console import Console
from rich.progress import track

from adaptra.planning.synchrony.hazard import Hazard
from adaptra.planning.synchrony.persistence import Persistence

PRICES = (4.0, 16.0, 64.0)
LEAST = 8
"""Spells of a series, half of which are judged."""
AHEAD = 10
"""Steps for which chances are scored."""
BAR, ALARMS = 1.2, 0.5
"""Of foresight's cost, and of the false alarms of "as last time"."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A step of the worker: whether it is slow, and what its machine says."""

    is_slow: bool
    figures: tuple[float, ...]


Series = Sequence[Sample]
Cause = tuple[int, int]
"""The steps of a spell, and which resource is short: 0 the processor, 1 the network."""


def exponential(chance: random.Random, mean: float) -> int:
    """A whole number of steps, at least 1."""
    return max(1, math.ceil(chance.expovariate(1 / mean)))


def mixed(chance: random.Random) -> Cause:
    """A short spell, or, once in four, a long one."""
    return (exponential(chance, 80), 1) if chance.random() < 0.25 else (exponential(chance, 3), 0)


HAZARDS: dict[str, Callable[[random.Random], Cause]] = {
    "exponential": lambda chance: (exponential(chance, 12), 0),
    "heavy-tailed": lambda chance: (min(math.ceil(3 * chance.paretovariate(1.1)), 2000), 0),
    "periodic": lambda chance: (20, 0),
    "mixed": mixed,
}
MEAN_GAP = 20


def drawn(hazard: str, spells: int, seed: int) -> Series:
    """A series with this number of spells."""
    chance = random.Random(f"{hazard} {seed}")
    samples: list[Sample] = []

    def add(steps: int, cause: int | None) -> None:
        for _ in range(steps):
            figures = tuple((0.5 if cause == which else 1.0) + chance.gauss(0, 0.1) for which in range(2))
            samples.append(Sample(cause is not None, figures))

    for _ in range(spells):
        add(MEAN_GAP if hazard == "periodic" else exponential(chance, MEAN_GAP), None)
        add(*HAZARDS[hazard](chance))
    add(1, None)
    return samples


def burned(spells: int, seed: int) -> Series:
    """A series with as many burners: half of them short, half of them long."""
    chance = random.Random(seed)
    steps = burned_steps(
        spells,
        lambda: 8 if chance.random() < 0.5 else 8 + exponential(chance, 30),
        lambda: 10 + exponential(chance, 10),
    )
    return [*(Sample(step.is_slow, step.figures) for step in steps), Sample(False, ())]


@cache
def true_hazard(name: str, cause: int | None) -> Hazard:
    """The hazard by 200,000 spells of one cause, or of any."""
    chance = random.Random(0)
    draws = (HAZARDS[name](chance) for _ in range(200_000))
    lengths = [steps for steps, why in draws if cause is None or why == cause]
    ended = [0] * (max(lengths) + 2)
    for length in lengths:
        ended[length] += 1
    left, chances = len(lengths), list[float]()
    for count in ended:
        chances.append(count / left if left >= 50 else chances[-1])
        left -= count
    return lambda age, _figures: chances[min(age, len(chances) - 1)]


@dataclass(frozen=True, slots=True)
class Decided:
    """What decisions cost in the judged spells at one price, and their alarms; ``worth`` is how many were worth a change."""

    cost: float
    foresight: float
    false_alarms: int
    hits: int
    worth: int


def judged(lengths: Sequence[int], waits: Sequence[int | None], price: float) -> Decided:
    """Judge by when the change was made in each spell: after this many steps, the first being 0. None if never."""
    rests = [length - 1 for length in lengths]
    cost = foresight = false_alarms = hits = worth = 0.0
    for rest, wait in zip(rests, waits, strict=True):
        cost += rest if wait is None else wait + price
        foresight += min(rest, price)
        false_alarms += wait is not None and rest - wait < price
        worth += rest >= price
        hits += wait is not None and rest >= price
    return Decided(cost, foresight, int(false_alarms), int(hits), int(worth))


def spells_of(series: Series) -> list[int]:
    """The lengths of the spells."""
    return [len([*steps]) for is_slow, steps in groupby(series, lambda sample: sample.is_slow) if is_slow]


def ours(known: Series, asked: Series) -> tuple[dict[float, list[int | None]], list[float]]:
    """Waits by price, and squared errors of the chance to be slow in some steps."""
    persistence, waits, errors = Persistence(), {price: list[int | None]() for price in PRICES}, list[float]()
    was_slow = False
    for number, sample in enumerate([*known, *asked]):
        here = number - len(known)
        if sample.is_slow:
            persistence.slow(0, sample.figures)
        elif was_slow:
            persistence.ended(0)
        if sample.is_slow and here >= 0:
            for price, decided in waits.items():
                if not was_slow:
                    decided.append(None)
                if decided[-1] is None and persistence.advise(0, price).wait == 0:
                    decided[-1] = persistence.age(0) - 1
            if (lasts := _lasts(asked, here)) is not None:
                errors.append((persistence.still_slow(0, AHEAD).chance - lasts) ** 2)
        was_slow = sample.is_slow
    return waits, errors


def _lasts(asked: Series, here: int) -> bool | None:
    """Whether a spell goes on for the steps of a score; None where the series ends before."""
    ahead = asked[here : here + AHEAD + 1]
    return False if not all(sample.is_slow for sample in ahead) else None if len(ahead) <= AHEAD else True


def by_network(known: Series, asked: Series, seed: int, rounds: int) -> tuple[dict[float, list[int | None]], list[float]]:
    """The same by the network. Beyond its steps the chances fall on as they did, and it waits no longer than the price."""
    width = max(len(sample.figures) for sample in known)
    rows, asked_rows = ([sample.figures or (0.0,) * width for sample in series] for series in (known, asked))
    chances = predicted(rows, [sample.is_slow for sample in known], asked_rows, rounds=rounds, seed=seed)
    waits, errors, age = {price: list[int | None]() for price in PRICES}, list[float](), 0
    for here, sample in enumerate(asked):
        age = age + 1 if sample.is_slow else 0
        if not age:
            continue
        ahead = chances[here]
        falls = min((ahead[-1] / max(ahead[0], 1e-9)) ** (1 / (len(ahead) - 1)), 0.999)
        rest = sum(ahead) + ahead[-1] * falls / (1 - falls)
        for price, decided in waits.items():
            if age == 1:
                decided.append(None)
            if decided[-1] is None and (rest > price or age > price):
                decided[-1] = age - 1
        if (lasts := _lasts(asked, here)) is not None:
            errors.append((ahead[AHEAD - 1] - lasts) ** 2)
    return waits, errors


def told(name: str, asked: Series, lengths: Sequence[int], price: float) -> list[int | None]:
    """Waits of whom the hazard is told, and the cause where samples show it."""
    starts = [here for here, sample in enumerate(asked) if sample.is_slow and (here == 0 or not asked[here - 1].is_slow)]
    waits: list[int | None] = []
    for start, length in zip(starts, lengths, strict=True):
        cause = None
        if name == "mixed":
            means = [fmean(sample.figures[which] for sample in asked[start : start + length]) for which in range(2)]
            cause = int(means[1] < means[0])
        hazard = true_hazard(name, cause)
        waits.append(next((age - 1 for age in range(1, length + 1) if _cheapest(hazard, age, price) == 0), None))
    return waits


def _cheapest(hazard: Hazard, age: int, price: float) -> int:
    """The wait that costs least on average. With the hazard known there is no need of a limit."""
    best, wait, until, lasts = price, 0, 0.0, 1.0
    for steps in range(1, 400):
        lasts *= 1 - hazard(age + steps - 1, ())
        until += lasts
        if until + price * lasts < best:
            best, wait = until + price * lasts, steps
        if lasts < 1e-6 or until > price:
            break
    return wait


PREDICTORS = ("ours", "as last time", "LSTM", "rent or buy", "the hazard known")


@dataclass(frozen=True, slots=True)
class Verdict:
    """Of one seed: each price's judgement of each predictor, and squared errors of chances."""

    decided: dict[str, list[Decided]]
    errors: dict[str, float]

    def cost(self, predictor: str) -> float:
        """The cost over that of foresight, each price as important as another."""
        return fmean(one.cost / one.foresight for one in self.decided[predictor])

    def false_alarms(self, predictor: str) -> int:
        """The false alarms at all prices."""
        return sum(one.false_alarms for one in self.decided[predictor])

    def recall(self, predictor: str) -> float:
        """The share of the spells that were worth a change in which it was made."""
        return sum(one.hits for one in self.decided[predictor]) / max(sum(one.worth for one in self.decided[predictor]), 1)


def verdict(name: str, series: Series, seed: int, rounds: int) -> Verdict:
    """Judge all predictors on the second half of a series' spells. Of burners the detector may see fewer than there were."""
    ends = [here for here in range(1, len(series)) if series[here - 1].is_slow and not series[here].is_slow]
    if len(ends) < LEAST:
        raise SystemExit(f"{name}: {len(ends)} spells were seen: expected at least {LEAST}; raise --spells")
    known, asked = series[: ends[len(ends) // 2 - 1]], series[ends[len(ends) // 2 - 1] :]
    lengths = spells_of(asked)
    mine, my_errors = ours(known, asked)
    network, network_errors = by_network(known, asked, seed, rounds)
    waits = {
        "ours": mine,
        "as last time": {price: [0] * len(lengths) for price in PRICES},
        "LSTM": network,
        "rent or buy": {price: [int(price) if length > price else None for length in lengths] for price in PRICES},
    }
    if name in HAZARDS:
        waits["the hazard known"] = {price: told(name, asked, lengths, price) for price in PRICES}
    decided = {who: [judged(lengths, by_price[price], price) for price in PRICES] for who, by_price in waits.items()}
    outcomes = (_lasts(asked, here) for here, sample in enumerate(asked) if sample.is_slow)
    always = [float(not lasts) for lasts in outcomes if lasts is not None]
    return Verdict(decided, {"ours": fmean(my_errors), "as last time": fmean(always), "LSTM": fmean(network_errors)})


def rows_of(name: str, verdicts: Sequence[Verdict]) -> Iterator[Row]:
    """Yield what a hazard's verdicts say."""
    seeds = len(verdicts)
    for who in PREDICTORS:
        if who in verdicts[0].decided:
            costs = [one.cost(who) for one in verdicts]
            yield Row(f"{name}, {who}: cost", fmean(costs), BAR, "of foresight's", seeds)
            if (half := half_interval(costs)) is not None:
                yield Row(f"{name}, {who}: its interval ±", half, None, "of foresight's", seeds)
    usual = sum(one.false_alarms("as last time") for one in verdicts)
    for who in ("ours", "LSTM"):
        alarms = sum(one.false_alarms(who) for one in verdicts)
        yield Row(f"{name}, {who}: false alarms", alarms / max(usual, 1), ALARMS, 'of "as last time"', seeds)
        yield Row(f"{name}, {who}: changes made of those worth it", fmean(one.recall(who) for one in verdicts), 1.0, "", seeds)
    for who in ("ours", "LSTM"):
        errors, before = (fmean(one.errors[which] for one in verdicts) for which in (who, "as last time"))
        yield Row(f"{name}, {who}: still slow in {AHEAD} steps, Brier's score", errors, before, "(as last time)", seeds)


def main() -> int:
    """Judge, and print."""
    arguments = parser(__doc__)
    arguments.add_argument("--seeds", type=int, default=5)
    arguments.add_argument("--spells", type=int, default=60, help="spells that are known, and as many that are judged")
    arguments.add_argument("--rounds", type=int, default=200, help="batches that the network is trained with")
    arguments.add_argument("--hazards", default=",".join(HAZARDS), help=f"some of {','.join(HAZARDS)}")
    arguments.add_argument("--burners", action="store_true", help="burn the processor instead of drawing spells")
    given = arguments.parse_args()
    rows: list[Row] = []
    every: list[Verdict] = []
    sets = {"burners": burned} if given.burners else {name: partial(drawn, name) for name in given.hazards.split(",")}
    for name, draw in sets.items():
        found = [
            verdict(name, draw(2 * given.spells, seed), seed, given.rounds)
            for seed in track(range(given.seeds), name, console=Console(stderr=True))
        ]
        rows += rows_of(name, found)
        every += found
    rows += overall(every)
    print_rows("share or wait", rows, baseline="bar", as_json=given.json)
    return 0


def overall(every: Sequence[Verdict]) -> Iterable[Row]:
    """Return the figures that the bars are about: all hazards together."""
    alarms, usual = (sum(one.false_alarms(who) for one in every) for who in ("ours", "as last time"))
    return [
        Row("all, ours: cost", fmean(one.cost("ours") for one in every), BAR, "of foresight's", len(every)),
        Row("all, ours: false alarms", alarms / max(usual, 1), ALARMS, 'of "as last time"', len(every)),
    ]


if __name__ == "__main__":
    sys.exit(main())
