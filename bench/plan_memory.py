"""What the first plan of a pipeline holds, beside the shortest plan without a thought of memory.

Short is a short period, as steps follow each other; with ``--barrier`` a short makespan.
``--random N`` adds so many random cases: unequal stages, delays, queues, sizes; straight, as a V, several stages in turn.
Memory is the most that any rank holds.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, replace
from pathlib import Path

from _table import Row, parser, print_rows

from adaptra.planning.least_memory import plan_least_memory
from adaptra.planning.routes.steady_steps import PERIOD
from adaptra.planning.timing import MAKESPAN, StepTiming
from adaptra.simulation.case import Case
from adaptra.simulation.case_files import load_case
from adaptra.simulation.cost import CostModel
from adaptra.simulation.simulate import simulate

CASES = Path(__file__).parent.parent / "tests" / "cases"


@dataclass(frozen=True, slots=True)
class Found:
    """The least and the best plan of a case: time of a step, most memory of a rank, most in flight, seconds to plan."""

    case: Case
    least: tuple[float, float, int, float]
    best: tuple[float, float, int, float]


def random_case(seed: int) -> Case:
    """Unequal stages, some delays and queues, and as often as not stages that hold different sizes; straight, V or in turn."""
    dice = random.Random(seed)
    shape, ranks = dice.choice(["straight", "straight", "v", "turns"]), dice.choice([2, 3, 4, 6, 8])
    stages = ranks if shape == "straight" else 2 * ranks
    placements = {
        "straight": tuple(range(ranks)),
        "v": (*range(ranks), *reversed(range(ranks))),
        "turns": tuple(range(ranks)) * 2,
    }
    placement = placements[shape]

    def some(low: int, high: int) -> tuple[float, ...]:
        return tuple(float(dice.randint(low, high)) for _ in range(stages))

    def of_edges(chance: float, values: list[float]) -> tuple[float, ...]:
        crosses = [placement[edge] != placement[edge + 1] for edge in range(stages - 1)]
        return tuple(dice.choice(values) if dice.random() < chance and crossing else 0.0 for crossing in crosses)

    held = (1.0,) * stages if dice.random() < 0.5 else some(1, 1000)
    cost = CostModel(
        some(5, 20), some(5, 20), some(2, 20),
        of_edges(0.4, [5.0, 20.0, 60.0]), of_edges(0.4, [5.0, 20.0, 60.0]),
        of_edges(0.2, [3.0, 8.0]), of_edges(0.2, [3.0, 8.0]),
        memory_forward=held, memory_input_grad=tuple(dice.choice([0.0, 0.3, 0.5]) * one for one in held),
    )  # fmt: skip
    return Case(cost, dice.choice([4, 8, 12, 16, 24]), placement, f"{shape} {seed}")


def uniform_cases() -> list[Case]:
    """Equal stages, as deep and as long as pipelines are."""
    named = [
        ("readme", CostModel.uniform(4, 1, 1, 1), 16, (0, 1, 2, 3)),
        ("readme, delays", CostModel.uniform(4, 1, 1, 1, latency=1), 16, (0, 1, 2, 3)),
        ("as a V", CostModel.uniform(8, 1, 1, 1), 16, (0, 1, 2, 3, 3, 2, 1, 0)),
        ("8 stages", CostModel.uniform(8, 1, 1, 1), 32, tuple(range(8))),
        ("16 stages", CostModel.uniform(16, 1, 1, 1), 64, tuple(range(16))),
    ]
    return [Case(cost, microbatches, placement, name) for name, cost, microbatches, placement in named]


def measure(case: Case, timing: StepTiming) -> Found:
    """Both plans of a case."""
    figures: list[tuple[float, float, int, float]] = []
    for planner in (lambda: plan_least_memory(case, timing=timing), lambda: timing.plan(case)):
        began = time.perf_counter()
        program = planner()
        seconds = time.perf_counter() - began
        run = simulate(program, case.cost)
        figures.append((timing.of(program, case.cost), max(run.peak_memory), max(run.peak_in_flight), seconds))
    return Found(case, *figures)


def rows(found: Found) -> list[Row]:
    """Of a case: what both plans take, and hold."""
    measures = [("step", "of the case"), ("memory", "of the case"), ("in flight", "microbatches"), ("planning", "s")]
    return [
        Row(f"{found.case.name} {found.case.cost.stages}x{found.case.microbatches}: {name}", ours, best, unit, 1)
        for (name, unit), ours, best in zip(measures, found.least, found.best, strict=True)
    ]


def main() -> None:
    """Measure all cases and print what was found."""
    options = parser(__doc__ or "")
    options.add_argument("--random", type=int, default=20, metavar="N", help="random cases")
    options.add_argument("--barrier", action="store_true", help="ranks meet between steps, so the makespan counts")
    given = options.parse_args()
    timing = MAKESPAN if given.barrier else PERIOD
    known = [load_case(path) for path in sorted(CASES.glob("*.json")) if path.stem != "L07"]
    free = [replace(case, cost=replace(case.cost, memory_limit=None)) for case in known]
    found = [measure(case, timing) for case in (*uniform_cases(), *free, *map(random_case, range(given.random)))]
    print_rows(
        "The plan of least memory beside the shortest plan",
        [row for one in found for row in rows(one)],
        baseline="shortest plan",
        as_json=given.json,
    )


if __name__ == "__main__":
    main()
