"""The period of one pipeline's plans beside what the planner of the makespan gives, the best known, and published schedules.

Steps in a row overlap, so a step costs the period. Simulated, in units of one op. Best known is the shortest of long searches
with several seeds. ``--cases N`` sets the number of random cases: 2 to 8 stages, uneven, with delays, some with limits of
memory. ``--long EFFORT`` sets the effort of a long search.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from _table import Row, parser, print_rows

from adaptra.frontend.planned.first_plan import first_plan
from adaptra.planning.least_memory import plan_least_memory
from adaptra.planning.planner import plan
from adaptra.planning.routes.steady_steps import PERIOD
from adaptra.program import Program
from adaptra.program.schedules import generate
from adaptra.runtime.options import Options
from adaptra.simulation.case import Case
from adaptra.simulation.cost import CostModel
from adaptra.simulation.simulate import lower_bound, simulate

EVEN = Case(CostModel.uniform(4, 1, 1, 1), 16, (0, 1, 2, 3), "even")
SEEDS = (1, 2, 3)
FIRST = 1e-9
"""Seconds: no time at all, which still gives a plan."""


def random_case(seed: int) -> Case:
    """Unequal stages and delays, for some a limit of memory in microbatches."""
    dice = random.Random(f"period {seed}")
    stages, microbatches = dice.randint(2, 8), dice.randint(4, 24)

    def drawn(count: int, low: float, high: float) -> tuple[float, ...]:
        return tuple(round(dice.uniform(low, high), 2) for _ in range(count))

    delay = dice.choice((0.0, 0.5, 1.0, 2.0))
    cost = CostModel(
        drawn(stages, 0.6, 1.4),
        drawn(stages, 0.6, 1.4),
        drawn(stages, 0.6, 1.4),
        drawn(stages - 1, 0.0, delay),
        drawn(stages - 1, 0.0, delay),
        drawn(stages - 1, 0.0, dice.choice((0.0, 0.5))),
        drawn(stages - 1, 0.0, dice.choice((0.0, 0.5))),
    )
    limit = dice.choice((None, 1.0, 1.5, 2.0))
    return Case(
        cost if limit is None else cost.limited((round(limit * stages, 1),) * stages),
        microbatches,
        tuple(range(stages)),
        f"random {seed}",
    )


def timed(made: Callable[[], Program]) -> tuple[Program, float]:
    """The program and the seconds that it took."""
    began = time.perf_counter()
    program = made()
    return program, time.perf_counter() - began


def of_even_stages() -> Iterator[Row]:
    """The default first plan and plans within memory, beside those by the makespan and ZB-H2."""
    before = plan_least_memory(EVEN)
    ours = first_plan(Options(), EVEN).program
    zb_h2 = generate("zb_h2", 4, 16)
    yield Row("first plan, no delay, beside the makespan's", PERIOD.of(ours, EVEN.cost), PERIOD.of(before, EVEN.cost), "ops", 1)
    yield Row("first plan, no delay, beside ZB-H2", PERIOD.of(ours, EVEN.cost), PERIOD.of(zb_h2, EVEN.cost), "ops", 1)
    held, held_before = (max(simulate(one, EVEN.cost).peak_memory) for one in (ours, before))
    yield Row("memory of it, beside the makespan's", held, held_before, "microbatches", 1)
    late = replace(EVEN, cost=CostModel.uniform(4, 1, 1, 1, latency=1))
    for most in (7, 8, 10, 12, 16):
        case = replace(late, cost=late.cost.limited((float(most),) * 4))
        found, by_makespan = PERIOD.of(PERIOD.plan(case), case.cost), PERIOD.of(plan(case), case.cost)
        yield Row(f"every edge one op late, memory {most}", found, by_makespan, "ops", 1)
    twice = CostModel.uniform(4, 1, 1, 1, latency=2)
    found, by_makespan = PERIOD.of(PERIOD.plan(late), twice), PERIOD.of(plan(late), twice)
    yield Row("planned for one op of delay, but it is two", found, by_makespan, "ops", 1)


def of_random_cases(count: int, effort: int) -> Iterator[Row]:
    """The period over the best known one, ours and that of the makespan's plan; and what is kept behind a barrier."""
    ours: list[float] = []
    before: list[float] = []
    never_above, seconds, of_first, of_first_before = 0.0, list[float](), list[float](), list[float]()
    behind: list[float] = []
    least_above = 0.0
    for seed in range(count):
        case = random_case(seed)
        program, taken = timed(lambda case=case: PERIOD.plan(case))
        found, by_makespan = PERIOD.of(program, case.cost), plan(case)
        assert not simulate(program, case.cost).over_memory
        was = PERIOD.of(by_makespan, case.cost)
        best = min(found, was, *(PERIOD.of(PERIOD.plan(case, effort=effort, seed=one), case.cost) for one in SEEDS))
        ours.append(found / best)
        before.append(was / best)
        seconds.append(taken)
        never_above = max(never_above, found / was)
        behind.append(simulate(by_makespan, case.cost).makespan / lower_bound(case).value)
        first, first_seconds = timed(lambda case=case: plan_least_memory(case, timing=PERIOD))
        old, old_seconds = timed(lambda case=case: plan_least_memory(case))
        of_first.append(first_seconds)
        of_first_before.append(old_seconds)
        least_above = max(least_above, _above_at_equal_memory(case, first, old))
    yield Row("random cases: period over the best known, mean", statistics.mean(ours), statistics.mean(before), "÷", count)
    yield Row("random cases: the same, worst", max(ours), max(before), "÷", count)
    yield Row("random cases: period over the makespan's at the same limit, most", never_above, 1.0, "÷", count)
    yield Row("random cases: first plan over the former one that holds no more, most", least_above, 1.0, "÷", count)
    yield Row("random cases: behind a barrier, makespan over its bound, mean", statistics.mean(behind), None, "÷", count)
    yield Row("random cases: plan", statistics.mean(seconds), None, "s", count)
    yield Row("random cases: first plan", statistics.mean(of_first), statistics.mean(of_first_before), "s", count)
    yield Row("random cases: first plan, most", max(of_first), max(of_first_before), "s", count)


def _above_at_equal_memory(case: Case, ours: Program, before: Program) -> float:
    """Our period over that of a former plan which holds no more on its fullest rank; 0 if it holds more."""
    held, held_before = (max(simulate(one, case.cost).peak_memory) for one in (ours, before))
    return PERIOD.of(ours, case.cost) / PERIOD.of(before, case.cost) if held_before <= held + 1e-9 else 0.0


def of_sizes() -> Iterator[Row]:
    """Seconds to plan for large pipelines: at once, without a limit of time, and the least memory."""
    for stages, microbatches in ((24, 96), (64, 512)):
        case = Case(CostModel.uniform(stages, 1, 1, 1, latency=1), microbatches, tuple(range(stages)))
        name = f"{stages} × {microbatches}"
        yield Row(f"{name}: plan at once", *_seconds(case, lambda find, case: find(case, budget=FIRST)), "s", 3)
        yield Row(f"{name}: plan", *_seconds(case, lambda find, case: find(case)), "s", 3)
        ours, taken = timed(lambda case=case: plan_least_memory(case, timing=PERIOD))
        before, taken_before = timed(lambda case=case: plan_least_memory(case))
        yield Row(f"{name}: first plan", taken, taken_before, "s", 1)
        yield Row(f"{name}: its period", PERIOD.of(ours, case.cost), PERIOD.of(before, case.cost), "ops", 1)


def _seconds(case: Case, made: Callable[[Callable[..., Program], Case], Program]) -> tuple[float, float]:
    """The median seconds of three plans by the period and by the makespan."""
    found: list[float] = []
    for find in (PERIOD.plan, plan):
        found.append(statistics.median(timed(lambda find=find: made(find, case))[1] for _ in range(3)))
    return found[0], found[1]


def main() -> None:
    """Measure, and print the rows."""
    arguments = parser(__doc__)
    arguments.add_argument("--cases", type=int, default=40, help="random cases")
    arguments.add_argument("--long", type=int, default=6_000_000, help="effort of a long search")
    options = arguments.parse_args()
    plan(EVEN)  # the first call compiles the equations
    rows = [*of_even_stages(), *of_random_cases(options.cases, options.long), *of_sizes()]
    print_rows("the period", rows, baseline="by the makespan", as_json=options.json)


if __name__ == "__main__":
    main()
