"""Steps of one pipeline in a row: their period, a bound of it, and plans that repeat sooner than those of a short makespan."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from strategies import cases, programs

from adaptra import _C
from adaptra.errors import CaseError, PlanError, ScheduleError
from adaptra.planning.least_memory import WITHIN, plan_least_memory
from adaptra.planning.planner import plan, with_split_backwards
from adaptra.planning.routes.joined_programs import join
from adaptra.planning.routes.steady_steps import PERIOD, pipeline_bound, timing_of
from adaptra.planning.timing import MAKESPAN
from adaptra.program import Op, Program
from adaptra.program.schedules import GENERATORS, generate
from adaptra.program.verify import verify
from adaptra.simulation.case import Case
from adaptra.simulation.case_files import case_from_json, case_to_json
from adaptra.simulation.cost import Blocking, CostModel
from adaptra.simulation.job import pipeline_of
from adaptra.simulation.simulate import STEPS, simulate
from adaptra.sizes import MemoryLimit

EVEN = Case(CostModel.uniform(4, 1, 1, 1), 16, (0, 1, 2, 3))
LATE = replace(EVEN, cost=CostModel.uniform(4, 1, 1, 1, latency=1))


def uneven(number: int) -> Case:
    """A case of 2 to 8 stages with uneven times, delays, and for some a limit of memory."""
    draw = random.Random(number)
    stages, microbatches = draw.randint(2, 8), draw.randint(4, 24)
    times = [tuple(round(draw.uniform(0.6, 1.4), 2) for _ in range(stages)) for _ in range(3)]
    delays = [tuple(round(draw.choice((0.0, 0.3, 1.0, 2.0)) * draw.random(), 2) for _ in range(stages - 1)) for _ in range(4)]
    limit = draw.choice((None, stages, 1.5 * stages, 2.0 * stages))
    (forward, input_grad, weight_grad), edges = times, delays
    cost = CostModel(forward, input_grad, weight_grad, edges[0], edges[1], edges[2], edges[3])
    cost = replace(cost, memory_limit=None if limit is None else MemoryLimit((float(limit),) * stages))
    return Case(cost, microbatches, tuple(range(stages)), f"uneven {number}")


# ── the period ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


@settings(max_examples=60, deadline=None)
@given(program=programs(lowered=False), times=st.data())
def test_the_period_of_a_program_is_that_of_a_job_of_one_replica(program: Program, times: st.DataObject) -> None:
    number = st.floats(0, 5)
    duration = st.floats(0.125, 5)  # without any, messages may depart in another order, as their ops end at once
    stages = program.stages
    drawn = [tuple(times.draw(st.tuples(*(duration,) * stages))) for _ in range(3)]
    drawn += [tuple(times.draw(st.tuples(*(number,) * (stages - 1)))) for _ in range(2)]
    nothing = (0.0,) * (stages - 1)  # a worker's ports make messages of its links wait for each other, a rank has none
    cost = CostModel(drawn[0], drawn[1], drawn[2], drawn[3], drawn[4], nothing, nothing)
    # Between stages of one worker a job's messages take no time, those of one pipeline do.
    assume(len(set(program.placement)) == stages or not any(map(any, drawn[3:])))
    case = Case(cost, program.microbatches, program.placement)
    assert simulate(program, cost).period == pytest.approx(simulate(join([program]), case.of_replicas(1)).period)


@settings(max_examples=40, deadline=None)
@given(program=programs(lowered=False), blocking=st.sampled_from(Blocking), half_duplex=st.booleans())
def test_shared_edges_and_blocking_messages_count_as_in_the_steps_written_out(
    program: Program, blocking: Blocking, half_duplex: bool
) -> None:
    cost = CostModel.uniform(program.stages, 3, 2, 1, latency=1.5, occupancy=2.25)
    cost = replace(cost, blocking=blocking, half_duplex=half_duplex)
    repeated = tuple(
        tuple(Op(op.stage, op.kind, op.microbatch + step * program.microbatches) for step in range(STEPS) for op in order)
        for order in program.orders
    )
    whole = simulate(Program.of_pipeline("whole", program.placement, STEPS * program.microbatches, repeated), cost)
    ends = [
        [whole.timeline.ops[rank][(step + 1) * len(order) - 1].end for step in (STEPS // 2 - 1, STEPS - 1)]
        for rank, order in enumerate(program.orders)
    ]
    assert simulate(program, cost).period == max(last - middle for middle, last in ends) / (STEPS - STEPS // 2)


@pytest.mark.parametrize("number", range(6))
def test_the_search_times_steps_as_the_simulator_does(number: int) -> None:
    case = uneven(number)
    found = _C.search_period(pipeline_of(case, case.cost), None, 20_000, 0, None, 0.0)
    assert found is not None
    program = Program.of_pipeline("found", case.placement, case.microbatches, found[1].computed())
    assert simulate(program, case.cost).period == pytest.approx(found[0], rel=1e-12)
    assert not simulate(program, case.cost).over_memory


def test_a_program_that_deadlocks_has_no_period() -> None:
    good = generate("1f1b", 2, 2)
    turned = replace(good, orders=(good.orders[0][::-1], good.orders[1]))
    with pytest.raises(ScheduleError):
        simulate(turned, CostModel.uniform(2, 1, 1, 1))
    with pytest.raises(CaseError, match="has 2 stages, the cost model 3"):
        simulate(good, CostModel.uniform(3, 1, 1, 1))


def with_updates(number: int) -> Case:
    """The same with time between the steps of each stage's rank."""
    case, draw = uneven(number), random.Random(number)
    return replace(case, cost=replace(case.cost, update=tuple(draw.choice((0.0, 2.0, 8.0)) for _ in range(case.stages))))


@pytest.mark.parametrize("number", range(12))
def test_a_rank_updates_between_its_steps_and_neither_bound_nor_search_forgets_it(number: int) -> None:
    case = with_updates(number)
    program = plan(case, effort=3000)
    found = simulate(program, case.cost)
    assert found.period == pytest.approx(simulate(join([program]), replace(case.of_replicas(1), memory=None)).period)
    assert found.makespan == simulate(program, uneven(number).cost).makespan, "a step behind a barrier has no update"
    times = zip(case.cost.forward, case.cost.input_grad, case.cost.weight_grad, case.cost.update, strict=True)
    load = max(case.microbatches * (f + i + w) + update for f, i, w, update in times)
    best = PERIOD.plan(case, effort=3000)
    assert load <= pipeline_bound(case).value * (1 + 1e-9)
    assert pipeline_bound(case).value <= PERIOD.of(best, case.cost) * (1 + 1e-9) <= found.period * (1 + 2e-9)
    needed = PERIOD.needed_memory(case, PERIOD.of(best, case.cost))
    assert needed is not None
    assert all(map(float.__le__, needed, (most + 1e-6 for most in simulate(best, case.cost).peak_memory)))
    searched = _C.search_period(pipeline_of(case, case.cost), None, 20_000, 0, None, 0.0)
    assert searched is not None
    program = Program.of_pipeline("found", case.placement, case.microbatches, searched[1].computed())
    assert simulate(program, case.cost).period == pytest.approx(searched[0], rel=1e-12)


def test_a_plan_that_knows_of_an_update_repeats_sooner_than_one_that_does_not() -> None:
    """The rank of the last stage is busy between steps, so what the others do meanwhile must not wait for it."""
    cost = CostModel.uniform(4, 1, 1, 1).limited((3.0,) * 4)
    known = replace(cost, update=(0.0, 0.0, 0.0, 8.0))
    assert PERIOD.of(PERIOD.plan(Case(known, 6)), known) == 26.0 < PERIOD.of(PERIOD.plan(Case(cost, 6)), known)


def test_updates_are_part_of_a_case_and_of_step_where_there_are_several_replicas() -> None:
    case = with_updates(3)
    assert case_from_json(case_to_json(case)) == case and "t_update" not in case_to_json(uneven(3))["case"]
    together = case.of_replicas(2, step=1.0)
    assert together.step == tuple(1.0 + one for one in case.cost.update) and not any(together.cost.update)
    with pytest.raises(CaseError, match=r"^uneven 3: t_update: expected none with several replicas, which have t_opt"):
        replace(case, replicas=2)


# ── its bound ────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@settings(max_examples=150, deadline=None)
@given(case=cases(max_stages=4, max_microbatches=5))
def test_no_plan_of_any_search_is_below_the_bound(case: Case) -> None:
    bound = pipeline_bound(case).value
    for find in (plan, PERIOD.plan):
        try:
            program = find(case, effort=3000)
        except PlanError:
            assert math.isinf(bound)
            return
        if not simulate(program, case.cost).over_memory:
            assert PERIOD.of(program, case.cost) >= bound * (1 - 1e-9)


@settings(max_examples=60, deadline=None)
@given(program=programs(lowered=False), freed=st.floats(0, 1), latency=st.floats(0, 4))
def test_no_program_is_below_the_bound_for_the_memory_that_it_holds(program: Program, freed: float, latency: float) -> None:
    cost = CostModel.uniform(program.stages, 1, 2, 3, latency=latency)
    cost = replace(cost, memory_input_grad=(freed,) * program.stages)
    held = cost.limited(simulate(program, cost).peak_memory)
    assert PERIOD.of(program, cost) >= PERIOD.bound(Case(held, program.microbatches, program.placement)) * (1 - 1e-9)


@settings(max_examples=60, deadline=None)
@given(program=programs(lowered=False), freed=st.floats(0, 1), latency=st.floats(0, 4))
def test_no_program_holds_less_than_its_period_needs(program: Program, freed: float, latency: float) -> None:
    assume(len(set(program.placement)) == program.stages)
    cost = CostModel.uniform(program.stages, 1, 2, 3, latency=latency)
    cost = replace(cost, memory_input_grad=(freed,) * program.stages)
    needed = PERIOD.needed_memory(Case(cost, program.microbatches, program.placement), PERIOD.of(program, cost))
    assert needed is not None
    assert all(map(float.__le__, needed, (most + 1e-6 for most in simulate(program, cost).peak_memory)))


@pytest.mark.parametrize(
    ("case", "value", "where"),
    [
        (EVEN, 48, "work, rank 0"),
        (replace(EVEN, cost=EVEN.cost.limited((6.0,) * 4)), 49, "fill, rank 0"),
        (replace(LATE, cost=LATE.cost.limited((10.0,) * 4)), 51, "fill, rank 0"),
        (replace(EVEN, cost=EVEN.cost.limited((0.5,) * 4)), math.inf, "memory, rank 0"),
        (replace(EVEN, cost=CostModel.uniform(4, 1, 1, 1, occupancy=4)), 93, "link, link of ranks 0→1"),
        (replace(EVEN, cost=replace(CostModel.uniform(4, 1, 1, 1, occupancy=2), half_duplex=True)), 64, "link, edge 0-1"),
    ],
    ids=["work", "memory", "memory and delays", "no room", "link", "shared edge"],
)
def test_bounds_have_a_value_and_a_cause(case: Case, value: float, where: str) -> None:
    found = pipeline_bound(case)
    assert f"{found.kind.value}, {found.where}" == where and found.value == pytest.approx(value)


# ── plans ────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("number", range(12))
def test_no_period_is_longer_than_that_of_the_makespans_plan_or_a_published_schedule(number: int) -> None:
    case = uneven(number)
    found = PERIOD.plan(case, effort=60_000)
    verify(found)
    assert not simulate(found, case.cost).over_memory
    others = [plan(case, effort=60_000)]
    others += [with_split_backwards(generate(name, case.cost.stages, case.microbatches), case.cost) for name in GENERATORS]
    periods = [PERIOD.of(other, case.cost) for other in others if not simulate(other, case.cost).over_memory]
    assert PERIOD.of(found, case.cost) <= min(periods)
    assert PERIOD.plan(case, effort=60_000) == found


def test_a_late_pipeline_idles_not_at_all_where_the_makespans_plan_idles_for_an_eighth() -> None:
    found, before = PERIOD.plan(LATE), plan(LATE)
    assert (PERIOD.of(found, LATE.cost), simulate(found, LATE.cost).makespan) == (48, 54)
    assert (PERIOD.of(before, LATE.cost), simulate(before, LATE.cost).makespan) == (54, 54)


def test_an_incumbent_is_kept_if_nothing_repeats_sooner() -> None:
    known = generate("zb_h2", 4, 16)
    assert PERIOD.of(PERIOD.plan(EVEN, incumbent=known, budget=1e-9), EVEN.cost) == 48
    fused = generate("1f1b", 4, 16)
    few = replace(EVEN, cost=EVEN.cost.limited((4.0,) * 4))
    assert PERIOD.of(PERIOD.plan(few, incumbent=fused), few.cost) <= PERIOD.of(fused, few.cost)


def test_microbatches_in_flight_are_limited_too() -> None:
    limits = (5, 4, 3, 2)
    found = PERIOD.plan(LATE, in_flight=limits)
    assert all(map(int.__le__, simulate(found, LATE.cost).peak_in_flight, limits))


@pytest.mark.parametrize("changed", [{"half_duplex": True}, {"blocking": Blocking.SEND}], ids=["half duplex", "blocking"])
def test_cases_that_only_the_makespans_search_knows_are_planned_by_it(changed: dict[str, object]) -> None:
    case = replace(EVEN, cost=replace(CostModel.uniform(4, 1, 1, 1, occupancy=0.5), **changed))
    found = PERIOD.plan(case)
    assert PERIOD.of(found, case.cost) <= PERIOD.of(plan(case), case.cost)
    with pytest.raises(ValueError, match="does not block"):
        _C.search_period(pipeline_of(case, case.cost), None, 1000, 0, None, 0.0)


def test_a_search_begins_with_whole_orders_of_its_case_only() -> None:
    for other in (generate("1f1b", 4, 15), generate("1f1b", 4, 16)):
        fused = replace(other, orders=(other.orders[0][:-1], *other.orders[1:]))
        with pytest.raises(ValueError, match="start: expected all F, I and W of the case"):
            _C.search_period(pipeline_of(EVEN, EVEN.cost), None, 1000, 0, None, 0.0, _C.to_orders(fused.orders))


def test_what_counts_behind_a_barrier_is_the_makespan() -> None:
    assert timing_of(barrier=True) is MAKESPAN and timing_of(barrier=False) is PERIOD
    assert MAKESPAN.needed_memory(EVEN, 51.0) is None


# ── least memory ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_least_memory_of_the_best_period_is_that_of_zb_h2() -> None:
    found = simulate(plan_least_memory(EVEN, timing=PERIOD), EVEN.cost)
    assert PERIOD.of(found.program, EVEN.cost) == 48
    assert found.peak_memory == simulate(generate("zb_h2", 4, 16), EVEN.cost).peak_memory == (7, 6, 5, 4)


@pytest.mark.parametrize("number", range(6))
def test_a_hundredth_longer_at_most_and_no_more_held_than_by_the_best(number: int) -> None:
    case = uneven(number)
    best, least = PERIOD.plan(case), plan_least_memory(case, timing=PERIOD)
    assert PERIOD.of(least, case.cost) <= (1 + WITHIN) * PERIOD.of(best, case.cost)
    held, most = simulate(least, case.cost), simulate(best, case.cost)
    assert not held.over_memory and max(held.peak_memory) <= max(most.peak_memory)
    assert plan_least_memory(case, timing=PERIOD) == least
    before = plan_least_memory(case)
    if max(simulate(before, case.cost).peak_memory) <= max(held.peak_memory):
        assert PERIOD.of(least, case.cost) <= PERIOD.of(before, case.cost)
