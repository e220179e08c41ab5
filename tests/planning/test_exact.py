"""The exact reference: its plans are valid and take what the solver says.

Its optimum is that of trying every order, and the planner comes close to it.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from itertools import product
from statistics import mean

import pytest

from adaptra.errors import MissingExtraError, PlanError, ScheduleError
from adaptra.planning.exact import solve_exactly
from adaptra.planning.planner import plan
from adaptra.program import Kind, Op, Program
from adaptra.program.schedules import one_f_one_b
from adaptra.program.verify import verify
from adaptra.simulation.case import Case
from adaptra.simulation.cost import Blocking, CostModel
from adaptra.simulation.simulate import lower_bound, simulate
from adaptra.sizes import MemoryLimit

needs_solver = pytest.mark.skipif(find_spec("ortools") is None, reason="needs OR-tools: pip install 'adaptra[exact]'")


def random_case(seed: int, placement: Sequence[int] | None = None, whole: bool = True) -> Case:
    """At most 4 stages and 6 microbatches; half of the cases have a memory limit."""
    chance = random.Random(seed)
    placement = tuple(range(chance.randint(2, 4))) if placement is None else tuple(placement)
    stages, ranks, microbatches = len(placement), max(placement) + 1, chance.randint(1, 6)

    def some(count: int, least: int, most: int) -> tuple[float, ...]:
        return tuple(float(chance.randint(least, most)) if whole else chance.uniform(least, most) for _ in range(count))

    forward, input_grad, weight_grad = (some(stages, 1, 10) for _ in range(3))
    there, back = (some(stages - 1, 0, 20) for _ in range(2))
    busy_there, busy_back = (some(stages - 1, 0, 8) for _ in range(2))
    several = stages // ranks
    limit = tuple(float(several * chance.randint(1, microbatches)) for _ in range(ranks)) if chance.random() < 0.5 else None
    cost = CostModel(
        forward, input_grad, weight_grad, there, back, busy_there, busy_back, memory_limit=MemoryLimit(limit) if limit else None
    )
    return Case(cost, microbatches, placement, f"random-{seed}")


def stage_orders(stage: int, microbatches: int) -> Iterator[tuple[Op, ...]]:
    """Every order of a stage's F, I and W, each kind by microbatch and each microbatch F before I before W."""

    def grow(order: tuple[Op, ...], forwards: int, gradients: int, weights: int) -> Iterator[tuple[Op, ...]]:
        if weights == microbatches:
            yield order
        if forwards < microbatches:
            yield from grow((*order, Op(stage, Kind.F, forwards)), forwards + 1, gradients, weights)
        if gradients < forwards:
            yield from grow((*order, Op(stage, Kind.I, gradients)), forwards, gradients + 1, weights)
        if weights < gradients:
            yield from grow((*order, Op(stage, Kind.W, weights)), forwards, gradients, weights + 1)

    return grow((), 0, 0, 0)


def shortest_of_all_orders(case: Case) -> float:
    """The least makespan of every program that can be executed and is within memory."""
    found: list[float] = []
    for orders in product(*(tuple(stage_orders(stage, case.microbatches)) for stage in range(case.cost.stages))):
        try:
            simulated = simulate(Program.of_pipeline("any", case.placement, case.microbatches, orders), case.cost)
        except ScheduleError:
            continue
        if not simulated.over_memory:
            found.append(simulated.makespan)
    return min(found)


@needs_solver
@pytest.mark.parametrize("seed", range(12))
def test_the_optimum_is_the_best_of_all_orders(seed: int) -> None:
    case = random_case(seed, placement=(0, 1))
    case = replace(case, microbatches=min(3, case.microbatches))
    found = solve_exactly(case, workers=1)
    assert found.proven
    assert found.makespan == found.bound == shortest_of_all_orders(case)


@needs_solver
@pytest.mark.parametrize("placement", [None, (0, 1, 1, 0), (0, 1, 0, 1)], ids=["one stage", "V", "interleaved"])
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_every_plan_is_valid_within_memory_and_takes_what_the_solver_says(
    seed: int, whole: bool, placement: tuple[int, ...] | None
) -> None:
    case = random_case(seed, placement, whole)
    found = solve_exactly(case, workers=1)
    verify(found.program)
    simulated = simulate(found.program, case.cost)
    assert not simulated.over_memory
    assert found.proven
    assert simulated.makespan == found.makespan
    assert found.makespan == pytest.approx(found.bound, rel=0 if whole else 1e-5, abs=0)
    assert found.bound <= simulate(plan(case), case.cost).makespan
    assert found.makespan >= lower_bound(case).value * (1 - 1e-9)


@needs_solver
@pytest.mark.parametrize(
    ("placement", "worst"), [(None, 1.05), ((0, 1, 1, 0), 1.1), ((0, 1, 0, 1), 1.1)], ids=["one stage", "V", "interleaved"]
)
def test_the_planner_is_within_one_percent_of_the_optimum_on_average(placement: tuple[int, ...] | None, worst: float) -> None:
    """And within five percent at worst, with one stage per rank."""
    ratios: list[float] = []
    for seed in range(100, 160 if placement is None else 130):
        case = random_case(seed, placement)
        found = solve_exactly(case, workers=1)
        assert found.proven, case.name
        ratios.append(simulate(plan(case), case.cost).makespan / found.makespan)
    assert min(ratios) >= 1
    assert mean(ratios) <= 1.01
    assert max(ratios) <= worst


@needs_solver
def test_limits_of_microbatches_in_flight_hold_and_cost_time() -> None:
    case = Case(CostModel.uniform(3, 2, 2, 1, latency=3), 6, (0, 1, 2))
    free, bound = solve_exactly(case, workers=1), solve_exactly(case, in_flight=(3, 1, 1), workers=1)
    in_flight = simulate(bound.program, case.cost).peak_in_flight
    assert all(peak <= limit for peak, limit in zip(in_flight, (3, 1, 1), strict=True))
    assert bound.proven
    assert bound.bound > free.makespan


@needs_solver
@pytest.mark.parametrize("seed", range(8))
def test_on_a_shared_edge_the_bound_holds(seed: int) -> None:
    case = random_case(seed)
    case = replace(case, cost=replace(case.cost, half_duplex=True))
    found = solve_exactly(case, workers=1)
    assert found.bound <= found.makespan == simulate(found.program, case.cost).makespan
    assert found.bound >= lower_bound(case).value * (1 - 1e-9)


@needs_solver
@pytest.mark.parametrize("half_duplex", [False, True])
@pytest.mark.parametrize("placement", [(0, 1, 1, 0), (0, 1, 0, 1), (0, 1, 2, 2, 1, 0)], ids=["V", "interleaved", "wide V"])
def test_messages_that_share_a_link_queue_in_the_bound_too(placement: tuple[int, ...], half_duplex: bool) -> None:
    """All from one rank to another share a link, whatever their stages."""
    stages = len(placement)
    times = CostModel.uniform(stages, 2, 2, 1, latency=1, occupancy=8)
    case = Case(replace(times, half_duplex=half_duplex), 3, placement)
    bound, found = lower_bound(case).value, solve_exactly(case, workers=1)
    assert found.proven
    assert bound <= found.makespan * (1 + 1e-9)
    assert bound >= 0.9 * found.makespan
    busiest = max(Counter((placement[a], placement[b]) for a, b in _crossings(placement)).values())
    assert bound > case.microbatches * busiest * 8 * (1 + half_duplex)


def _crossings(placement: Sequence[int]) -> list[tuple[int, int]]:
    """The directed edges between stages of different ranks."""
    down = [(stage, stage + 1) for stage in range(len(placement) - 1) if placement[stage] != placement[stage + 1]]
    return [*down, *((after, before) for before, after in down)]


@needs_solver
def test_ops_that_take_no_time_keep_their_order_and_memory() -> None:
    cost = CostModel((0.0, 1.0), (0.0, 0.0), (2.0, 0.0), (1.0,), (0.0,), (0.0,), (0.0,), memory_limit=MemoryLimit((1.0, 2.0)))
    found = solve_exactly(Case(cost, 4, (0, 1)), workers=1)
    verify(found.program)
    assert found.proven
    assert simulate(found.program, cost).over_memory == ()


@needs_solver
def test_without_time_the_planners_plan_is_the_result_and_the_bound_holds() -> None:
    case = Case(CostModel.uniform(8, 3, 4, 2, latency=5), 24, tuple(range(8)))
    found = solve_exactly(case, incumbent=one_f_one_b(8, 24), seconds=1e-6, workers=1)
    assert found.program == plan(case, incumbent=one_f_one_b(8, 24))
    assert found.makespan == simulate(found.program, case.cost).makespan
    assert 0 <= found.bound <= found.makespan
    assert not found.proven


@needs_solver
def test_blocking_communication_is_refused() -> None:
    case = Case(replace(CostModel.uniform(2, 1, 1, 1), blocking=Blocking.SEND), 2, (0, 1), "held")
    with pytest.raises(PlanError, match=r"^held: blocking send: expected none for an exact plan$"):
        solve_exactly(case)


def test_without_the_extra_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    with pytest.raises(MissingExtraError, match=r"^exact plans need OR-tools: pip install 'adaptra\[exact\]'$"):
        solve_exactly(Case(CostModel.uniform(2, 1, 1, 1), 2, (0, 1)))
