"""The choice of an algorithm for sums over ranks, against the played rounds of all algorithms, late sets and numbers of parts.

Random cases have some ranks late and some ports narrow. What counts is the time from the last rank's arrival on: every sum
waits for that. The equations stand beside StragglAR's published model and the ratios that it makes for 1 GiB.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator

from _table import Row, parser, print_rows
from rich.console import Console
from rich.progress import track

from adaptra.collectives.choice import SumCase, SumWay
from adaptra.collectives.ports import Ports
from adaptra.equations.sums import sum_equations

GIB = 2**30, 3e-3, 1e3 / (450 * 2**30)
"""1 GiB, 3 µs a message and 450 GiB/s, in milliseconds."""
STRAGGLAR = {
    4: (4, 2.975, 1.4875, 3.3513, 1.1111),
    6: (7, 3.1321, 1.7898, 3.7337, 1.1882),
    8: (9, 2.8841, 1.9228, 3.9309, 0.876),
    12: (15, 3.0753, 2.0502, 4.1401, 0.9854),
    16: (18, 2.7207, 2.1161, 4.2567, 0.5801),
    32: (35, 2.614, 2.2405, 4.4916, 0.3629),
    48: (57, 2.866, 2.3129, 4.6339, 0.5451),
    64: (68, 2.6026, 2.3729, 4.753, 0.2225),
    128: (133, 2.7262, 2.5827, 5.1717, 0.1372),
    256: (262, 3.0692, 2.9755, 5.9571, 0.0876),
}
"""By ranks: StragglAR's rounds, and milliseconds of its model: after and before the late rank, a ring, the critical delay."""
RATIOS = {4: 1.36, 8: 1.56, 16: 1.66, 32: 1.73}
"""By ranks: direct ÷ merge behind a late rank, as first estimated."""


def model_rows() -> Iterator[Row]:
    """Yield the rows of the equations."""
    model, worst = sum_equations(), 0.0
    for ranks, (rounds, *published) in STRAGGLAR.items():
        parts, spread = ranks - 1, rounds - ranks + 1
        gather = model.gather.evaluate(ranks, parts, *GIB)
        ours = (
            model.merge.evaluate(0.0, ranks, parts, spread, *GIB) - gather,
            gather,
            model.direct.evaluate(0.0, ranks, *GIB),
            model.critical_delay.evaluate(ranks, parts, spread, *GIB),
        )
        worst = max(worst, *(abs(one / other - 1) for one, other in zip(ours, published, strict=True)))
    yield Row("equations beside StragglAR's model, worst of its figures, relative", worst, 1e-3, "", 4 * len(STRAGGLAR))
    for ranks, ratio in RATIOS.items():
        size, alpha, beta = (GIB[0], GIB[1] / 1e3, GIB[2] / 1e3)
        case = SumCase(size, Ports(alpha, (beta,) * ranks, (0.0,) * (ranks - 1) + (1.0,)))
        direct, merge = (case.expected(way) - 1.0 for way in (case.way("direct"), case.way("merge", (ranks - 1,))))
        yield Row(f"{ranks} ranks, 1 GiB, one late: direct ÷ merge by their equations", direct / merge, ratio, "", 1)


def random_case(chance: random.Random, most: int) -> SumCase:
    """Return a sum of a random size over random ports, of which some are narrow, by ranks of which some are late."""
    ranks = chance.randint(2, most)
    nbytes, alpha = 10 ** chance.uniform(5.5, 9.5), 10 ** chance.uniform(-5.7, -3.5)
    beta = 1 / 10 ** chance.uniform(8, 11.5)
    whole = 2 * (alpha * ranks + nbytes * beta)
    delays, narrow, arrivals = chance.choice([0, 1, 1, 1, 2, 3, ranks]), chance.choice([0, 0, 0, 1, 2]), [0.0] * ranks
    for rank in chance.sample(range(ranks), min(delays, ranks)):
        arrivals[rank] = whole * 10 ** chance.uniform(-1.5, 0.7)
    factors = dict.fromkeys(chance.sample(range(ranks), min(narrow, ranks - 1)), chance.choice([1.3, 2.0, 4.0]))
    return SumCase(nbytes, Ports(alpha, tuple(beta * factors.get(rank, 1.0) for rank in range(ranks)), tuple(arrivals)))


def every_way(case: SumCase) -> Iterator[SumWay]:
    """Yield all algorithms with late sets by arrival, by port and by both, and a ladder of parts from 1 to 4 times the best."""
    ranks, ports = case.ports.ranks, case.ports
    yield case.way("direct")
    drafts = [case.way("chain")] if ranks > 2 else []
    orders = (
        [ports.arrivals[rank] for rank in range(ranks)],
        [ports.per_byte[rank] for rank in range(ranks)],
        [ports.arrivals[rank] + case.nbytes * ports.per_byte[rank] for rank in range(ranks)],
    )
    for order in orders:
        last_first = sorted(range(ranks), key=lambda rank: -order[rank])
        for count in range(1, ranks - 1):
            late = tuple(sorted(last_first[:count]))
            names = ("streamed", *(("merge",) if count == 1 else ()), *(("swap",) if late == (ranks - 1,) else ()))
            drafts += [case.way(name, late) for name in names]
    for draft in dict.fromkeys(drafts):
        ladder = [draft.parts * 4 ** (step / 6) for step in range(-12, 7)]
        yield from dict.fromkeys(draft.with_parts(about, ranks) for about in ladder)


def decision_rows(count: int, seed: int, most: int) -> Iterator[Row]:
    """Yield the rows of random cases."""
    chance = random.Random(seed)
    ratios: list[float] = []
    below: list[float] = []
    gaps: list[float] = []
    seconds: list[float] = []
    for _ in track(range(count), "random cases", console=Console(stderr=True)):
        case = random_case(chance, most)
        last = max(case.ports.arrivals)
        started = time.process_time()
        chosen = case.prices[0]
        seconds.append(time.process_time() - started)
        played = {way: case.price(way).seconds - last for way in every_way(case)}
        ratios.append((chosen.seconds - last) / min(played.values()))
        gaps.append((chosen.seconds - last) / (case.bound.seconds - last))
        critical, ordered = case.critical_delay, sorted(case.ports.arrivals)
        is_one_late = len(set(case.ports.per_byte)) == 1 and ordered[0] == ordered[-2]
        if is_one_late and (critical is None or ordered[-1] < critical.result):
            below.append((chosen.seconds - last) / (case.price(case.way("direct")).seconds - last))
    yield Row("choice ÷ shortest of all played, worst", max(ratios), 1.02, "", count)
    yield Row("the same, cases above 1.005", sum(one > 1.005 for one in ratios), None, "cases", count)
    yield Row("below the critical delay: choice ÷ direct, worst", max(below), 1.01, "", len(below))
    yield Row("choice ÷ water level, median", sorted(gaps)[count // 2], 1.0, "", count)
    yield Row("processor seconds of a choice, worst", max(seconds), None, "s", count)


def main() -> int:
    """Play and print."""
    arguments = parser(__doc__)
    arguments.add_argument("--random", type=int, default=300, help="random cases")
    arguments.add_argument("--seed", type=int, default=1, help="of the random cases")
    arguments.add_argument("--ranks", type=int, default=16, help="the most ranks of a random case")
    options = arguments.parse_args()
    rows = [*model_rows(), *decision_rows(options.random, options.seed, options.ranks)]
    print_rows("sums with late ranks and narrow ports", rows, baseline="bar", as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
