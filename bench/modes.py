"""Synchronisation modes: STAR's rules against a table of what they choose, the simulated clock, and the noise scale.

The table has 128 cases of 4 and 8 workers (``traces/star_modes.csv``). The clock's ratios stand beside those of a prototype,
which drew other times. The noise scale is estimated from gradients of eight replicas. Their tasks have 1,000 samples, whose
single gradients are all known.
"""

from __future__ import annotations

import csv
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

import numpy as np
from _table import Row, parser, print_rows

from adaptra.planning.synchrony.case import SynchronyCase
from adaptra.planning.synchrony.choice import ModeChoice
from adaptra.planning.synchrony.noise_scale import NoiseScaleEstimator, TermNorms
from adaptra.planning.synchrony.star import StarRule, star_choice, star_groups

TABLE = Path(__file__).parent / "traces" / "star_modes.csv"
BASE, SAMPLES, GAP = 0.3, 128, 0.05
"""Of the table: seconds of a fast worker, samples of a worker, and the largest difference in a group of workers."""
SINGLE = 1000
"""Samples of a task, whose single gradients are all computed."""
PROTOTYPES = {(8, 8): (0.475, 0.529), (8, 16): (0.475, 0.501), (32, 16): (0.251, 0.283)}
"""Replicas and microbatches: seconds with all replicas busy and with stealing, over exact, as a prototype had them."""


def star_rows() -> Iterator[Row]:
    """Yield how far each rule is from the table, and how many of its choices differ."""
    with TABLE.open() as file:
        rows = [*csv.DictReader(file)]
    for rule in StarRule:
        worst, others = 0.0, 0
        for row in rows:
            said = star_choice(rule, _times(row), float(row["phi"]), SAMPLES)
            for name, x in (("first", said.first), ("best", said.best)):
                if (column := f"{rule.value}_{name}") in row:
                    worst = max(worst, abs(said.of_all(x) - float(row[f"{column}_of_all"])))
                    others += x != int(row[column])
        yield Row(f"STAR, {rule.value}: largest difference of 128 rows", worst, 1e-4, "of all workers", len(rows))
        yield Row(f"STAR, {rule.value}: other choices", others, 0, "rows", len(rows))
    groups = [star_groups(_times(row), float(row["phi"]), SAMPLES, GAP) for row in rows]
    worst = max(abs(cost - float(row["groups_of_all"])) for (_, cost), row in zip(groups, rows, strict=True))
    others = sum("+".join(map(str, sizes)) != row["groups"] for (sizes, _), row in zip(groups, rows, strict=True))
    yield Row("STAR, groups: largest difference of 128 rows", worst, 1e-4, "of all workers", len(rows))
    yield Row("STAR, groups: other choices", others, 0, "rows", len(rows))


def _times(row: dict[str, str]) -> list[float]:
    slow = int(row["stragglers"])
    return [BASE] * (int(row["n"]) - slow) + [BASE * float(row["slowdown"])] * slow


def clock_rows(seeds: int) -> Iterator[Row]:
    """Yield the seconds of an update over exact with jitter and pauses, and what nothing wrong chooses."""
    for (replicas, count), (busy, stealing) in PROTOTYPES.items():
        case = SynchronyCase(replicas, 1000, {}, jitter=0.3, pauses=0.05, microbatches=count, modes=("stealing",))
        choices = [ModeChoice(case, seed) for seed in range(seeds)]
        what = f"jitter, {replicas} replicas, {count} microbatches"
        measured = fmean(choice.prices[1].pace.seconds / choice.exact.pace.seconds for choice in choices)
        yield Row(f"{what}: stealing ÷ exact, seconds of an update", measured, stealing, "", seeds)
        measured = fmean(choice.capacity / choice.exact.pace.seconds for choice in choices)
        yield Row(f"{what}: all busy ÷ exact", measured, busy, "", seeds)
    kinds = ("x-order", "deadline", "local")
    healthy = [ModeChoice(SynchronyCase(n, phi, {}, allow=kinds)) for n in (2, 8, 32) for phi in (10, 1e3, 1e5)]
    left = sum(str(choice.chosen.mode) != "exact" or bool(choice.trials) for choice in healthy)
    yield Row("nothing wrong, all allowed: choices that leave exact", left, 0, "cases", len(healthy))
    started = time.process_time()
    _ = ModeChoice(SynchronyCase(256, 1000, {0: 2.0}, jitter=0.3, pauses=0.05, microbatches=32)).chosen
    yield Row("processor seconds of a choice, 256 replicas, 32 microbatches", time.process_time() - started, None, "s", 1)


def noise_row(checks: int) -> Row:
    """Return how often the true noise scale is within the interval of 200 steps."""
    within = 0
    for seed in range(checks):
        chance = np.random.default_rng(seed)
        inputs, right = chance.normal(size=(SINGLE, 20)), chance.normal(size=20)
        weights = right + 0.3 * chance.normal(size=20)
        single = (inputs @ weights - inputs @ right - chance.normal(size=SINGLE))[:, None] * inputs
        mean, estimator = single.mean(0), NoiseScaleEstimator(16, 8)
        for _ in range(200):
            terms = single[chance.integers(SINGLE, size=(8, 16))].mean(1)
            whole = terms.mean(0)
            estimator.add(TermNorms(tuple(map(float, (terms**2).sum(1))), float(whole @ whole)))
        estimate = estimator.estimate
        true = ((single - mean) ** 2).sum(1).mean() / (mean @ mean)
        within += estimate is not None and estimate.low <= true <= estimate.high
    return Row("noise scale within its interval", within / checks, 0.9, "of checks", checks)


def main() -> int:
    """Compute, and print."""
    arguments = parser(__doc__)
    arguments.add_argument("--seeds", type=int, default=5, help="draws of the clock's times")
    arguments.add_argument("--checks", type=int, default=20, help="tasks whose noise scale is estimated")
    given = arguments.parse_args()
    stars, clocks, noise = [*star_rows()], [*clock_rows(given.seeds)], noise_row(given.checks)
    print_rows("synchronisation modes", [*stars, *clocks, noise], baseline="bar", as_json=given.json)
    left = next(row for row in clocks if row.name.startswith("nothing wrong"))
    failed = [row for row in (*stars, left) if row.ours > (row.baseline or 0)]
    return int(bool(failed) or noise.ours < 0.9)


if __name__ == "__main__":
    raise SystemExit(main())
