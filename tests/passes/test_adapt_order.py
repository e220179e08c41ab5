"""adapt-order: never over the budget, never worse than what came in, as good as the published rule on every case."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import paths
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import cases, cost_models, programs

from adaptra import _C
from adaptra.errors import PassError, PlanError
from adaptra.passes import AdaptOrder
from adaptra.planning.planner import plan
from adaptra.program import Kind, Program
from adaptra.program.schedules import forward_only, generate, gpipe, one_f_one_b
from adaptra.program.verify import verify
from adaptra.simulation.case import Case
from adaptra.simulation.case_files import load_case
from adaptra.simulation.cost import Blocking, CostModel
from adaptra.simulation.job import pipeline_of
from adaptra.simulation.simulate import Simulation, lower_bound, simulate
from adaptra.sizes import MemoryLimit

TEN = CostModel.uniform(4, 10, 10, 10)
CASES = sorted(paths.CASES.glob("*.json"))
SMALL = [path for path in CASES if path.stem != "L07"]
QUICK = 20_000
"""Effort for tests that look at guarantees, which hold at any effort."""


def check(program: Program, cost: CostModel, limits: tuple[int, ...] | None = None) -> Simulation:
    verify(program)
    found = simulate(program, cost)
    assert not found.over_memory
    if limits is not None:
        assert all(peak <= limit for peak, limit in zip(found.peak_in_flight, limits, strict=True))
    return found


# ── how good ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_as_good_as_the_papers_rule_and_within_two_percent_of_the_best_known(path: Path) -> None:
    known = json.loads(path.read_text())
    case = load_case(path)
    found = check(plan(case), case.cost)
    assert found.makespan <= known["reference_rule"] * (1 + 1e-9)
    assert found.makespan <= known["best_known"] * 1.02
    assert found.makespan >= lower_bound(case).value * (1 - 1e-9)


@pytest.mark.parametrize("path", SMALL, ids=lambda path: path.stem)
def test_no_generated_schedule_that_fits_is_shorter(path: Path) -> None:
    case = load_case(path)
    found = simulate(plan(case, effort=QUICK), case.cost)
    for name in ("gpipe", "1f1b", "zb_h1", "zb_h2"):
        known = simulate(generate(name, case.cost.stages, case.microbatches), case.cost)
        assert known.over_memory or found.makespan <= known.makespan, name


@pytest.mark.parametrize("latency", [0, 10, 20, 30, 40, 60])
@pytest.mark.parametrize("edge", [0, 1, 2])
def test_a_delayed_link_costs_its_delay_once(latency: float, edge: int) -> None:
    cost = TEN.with_latency(edge, edge + 1, latency).with_latency(edge + 1, edge, latency)
    assert check(plan(Case(cost, 12, (0, 1, 2, 3))), cost).makespan <= 390 + latency


@pytest.mark.parametrize("blocking", Blocking)
@pytest.mark.parametrize("half_duplex", [False, True])
def test_every_mode_of_communication(blocking: Blocking, half_duplex: bool) -> None:
    slow = TEN.with_latency(1, 2, 25).with_occupancy(2, 1, 8).with_occupancy(1, 2, 8)
    cost = replace(slow, blocking=blocking, half_duplex=half_duplex)
    found = check(plan(Case(cost, 8, (0, 1, 2, 3)), effort=QUICK), cost)
    for name in ("gpipe", "1f1b", "zb_h1", "zb_h2"):
        assert found.makespan <= simulate(generate(name, 4, 8), cost).makespan


def test_half_a_percent_above_the_best_known_on_average() -> None:
    ratios = [
        simulate(plan(load_case(path)), load_case(path).cost).makespan / json.loads(path.read_text())["best_known"]
        for path in CASES
    ]
    assert sum(ratios) / len(ratios) <= 1.005


def test_a_longer_search_is_not_worse() -> None:
    case = load_case(paths.CASES / "E04.json")
    makespans = [simulate(plan(case, effort=effort), case.cost).makespan for effort in (1, 50_000, 1_000_000)]
    assert makespans == sorted(makespans, reverse=True)
    assert makespans[-1] < makespans[0]


def test_seeds_search_differently_and_each_the_same_way_every_time() -> None:
    case = load_case(paths.CASES / "E04.json")
    plans = [plan(case, effort=QUICK * 10, seed=seed) for seed in (0, 1, 1)]
    assert plans[0] != plans[1]
    assert plans[1] == plans[2]


# ── time and interruption ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_budget_ends_the_search() -> None:
    case = load_case(paths.CASES / "L02.json")
    began = time.perf_counter()
    found = plan(case, budget=0.2)
    assert time.perf_counter() - began > 0.19
    check(found, case.cost)


def test_the_shortest_budget_still_gives_a_plan() -> None:
    case = load_case(paths.CASES / "E04.json")
    found = check(plan(case, budget=1e-9), case.cost)
    for name in ("gpipe", "1f1b", "zb_h1", "zb_h2"):
        known = simulate(generate(name, case.cost.stages, case.microbatches), case.cost)
        assert known.over_memory or found.makespan <= known.makespan, name


@pytest.mark.parametrize("budget", [0, -1, float("nan")])
def test_a_budget_that_is_no_time_is_refused(budget: float) -> None:
    with pytest.raises(PlanError, match=r"budget of .* seconds: expected a positive number"):
        plan(Case(TEN, 8, (0, 1, 2, 3)), budget=budget)


# ── what always holds ────────────────────────────────────────────────────────────────────────────────────────────────────────


@settings(max_examples=60)
@given(programs(lowered=False), st.data())
def test_any_program_comes_back_valid_within_limits_and_not_worse(program: Program, data: st.DataObject) -> None:
    stages = program.stages
    cost = data.draw(cost_models(stages))
    held = [sum(cost.memory_forward[s] for s in range(stages) if program.placement[s] == rank) for rank in range(program.ranks)]
    limit = data.draw(st.none() | st.tuples(*[st.floats(least, 3 * least) for least in held]))
    blocking, half_duplex = data.draw(st.sampled_from(Blocking)), data.draw(st.booleans())
    cost = replace(cost, memory_limit=limit and MemoryLimit(limit), blocking=blocking, half_duplex=half_duplex)
    memory = data.draw(st.none() | st.integers(1, 4) | st.tuples(*[st.integers(1, 4)] * stages))
    each = (memory or program.microbatches,) * stages if memory is None or isinstance(memory, int) else memory

    adapted = AdaptOrder(memory, effort=2_000).apply(program, cost)

    found = check(adapted, cost, each)
    incoming = simulate(program, cost)
    fits = not incoming.over_memory and all(p <= most for p, most in zip(incoming.peak_in_flight, each, strict=True))
    assert not fits or found.makespan <= incoming.makespan
    assert (adapted.placement, adapted.microbatches) == (program.placement, program.microbatches)
    assert AdaptOrder(memory, effort=2_000).apply(program, cost) == adapted, "the same input gives the same plan"


def test_a_known_schedule_that_ends_with_weight_gradients_counts_even_when_little_shorter() -> None:
    """The last W ends later than the last I must. Here 1F1B gains 1 over what is found first, less than a W of 44 takes."""
    cost = CostModel((0.0, 0.0), (1.0, 0.0), (44.0, 0.0), (0.0,), (0.0,), (0.0,), (45.0,), memory_limit=MemoryLimit((2.0, 1.0)))
    found = simulate(plan(Case(cost, 3, (0, 1)), effort=1), cost)
    assert found.makespan == simulate(generate("1f1b", 2, 3), cost).makespan == 180.0


def test_ranks_that_can_begin_at_one_instant_all_do_before_a_message_of_an_op_without_duration_holds_one() -> None:
    """The search and the simulator agree on that, so the plan is no longer than 1F1B."""
    cost = CostModel((0.0, 0.0), (0.0, 2.0), (1.0, 0.0), (0.0,), (0.0,), (1.0,), (0.0,), blocking=Blocking.BOTH).limited(
        (3.0, 1.0)
    )
    assert (
        simulate(generate("1f1b", 2, 3), cost).makespan == simulate(plan(Case(cost, 3, (0, 1)), effort=1), cost).makespan == 9
    )


@settings(deadline=None, max_examples=100)
@given(cases(max_stages=5, max_microbatches=8), st.data())
def test_between_the_bound_and_every_known_schedule_with_memory_in_bytes(case: Case, data: st.DataObject) -> None:
    """Stages hold different amounts, I frees different parts of them, and limits are not multiples of either."""
    stages = case.cost.stages
    held = tuple(float(data.draw(st.integers(2**20, 2**32))) for _ in range(stages))
    freed = tuple(float(data.draw(st.integers(0, int(most)))) for most in held)
    limit = tuple(float(int(most * data.draw(st.floats(1, stages + 2)))) for most in held)
    blocking, half_duplex = data.draw(st.sampled_from(Blocking)), data.draw(st.booleans())
    cost = replace(case.cost, memory_forward=held, memory_input_grad=freed, memory_limit=limit and MemoryLimit(limit))
    case = replace(case, cost=replace(cost, blocking=blocking, half_duplex=half_duplex))
    found = check(plan(case, effort=data.draw(st.sampled_from([1, 20_000]))), case.cost)
    assert found.makespan >= lower_bound(case).value * (1 - 1e-9)
    for name in ("gpipe", "1f1b", "zb_h1", "zb_h2"):
        known = simulate(generate(name, stages, case.microbatches), case.cost)
        assert known.over_memory or found.makespan <= known.makespan * (1 + 1e-12), name


@settings(deadline=None, max_examples=100)
@given(cases(max_stages=5, max_microbatches=7), st.data())
def test_the_searchs_own_clock_is_the_simulators(case: Case, data: st.DataObject) -> None:
    """In every mode of communication and placement: what the search believes a plan takes is what the simulator says."""
    stages = case.cost.stages
    blocking, half_duplex = data.draw(st.sampled_from(Blocking)), data.draw(st.booleans())
    limit = data.draw(st.none() | st.integers(1, 4))
    ranks = data.draw(st.integers(1, stages))
    placement = tuple(min(stage, 2 * ranks - 1 - stage if stage < 2 * ranks else 0) for stage in range(stages))
    placement = placement if set(placement) == set(range(max(placement) + 1)) else tuple(range(stages))
    most = None if limit is None else tuple(float(limit * placement.count(rank)) for rank in range(max(placement) + 1))
    cost = replace(case.cost, blocking=blocking, half_duplex=half_duplex, memory_limit=most and MemoryLimit(most))
    case = replace(case, cost=cost, placement=placement)
    limits = (case.microbatches,) * stages
    found = _C.search_orders(pipeline_of(case, case.cost), limits, [(1,) * stages, limits], [], 60_000, 0, None)
    if found is None:
        assert limit is not None
        return
    program = Program.of_pipeline("found", placement, case.microbatches, found[1].computed())
    assert found[0] == pytest.approx(check(program, cost).makespan, rel=1e-9)


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 1), (1, 5), (5, 1), (6, 2), (2, 40)])
@pytest.mark.parametrize("memory", [None, 1, 100])
def test_sizes_that_break_the_papers_formulas(stages: int, microbatches: int, memory: int | None) -> None:
    cost = CostModel.uniform(stages, 10, 10, 10, latency=100)
    found = check(plan(Case(cost, microbatches, tuple(range(stages))), in_flight=memory, effort=QUICK), cost)
    assert max(found.peak_in_flight) <= (memory or microbatches)


def test_less_memory_never_makes_a_plan_shorter() -> None:
    cost = TEN.with_latency(1, 2, 60).with_latency(2, 1, 60)
    case = Case(cost, 16, (0, 1, 2, 3))
    bound = lower_bound(case).value
    makespans = [check(plan(case, in_flight=memory), cost, (memory,) * 4).makespan for memory in (4, 8, 16)]
    assert makespans[0] > makespans[1] >= makespans[2] >= bound


def test_stages_that_share_a_rank_are_adapted_too() -> None:
    cost = CostModel.uniform(4, 10, 10, 10)
    case = Case(cost, 8, (0, 1, 1, 0))
    found = check(plan(case), cost)
    assert found.program.name == "adapted"
    assert found.makespan <= 500
    assert found.makespan >= lower_bound(case).value


def test_stages_that_share_a_rank_and_its_memory_never_deadlock() -> None:
    cost = CostModel.uniform(6, 10, 10, 10, latency=7).limited((3.0, 4.0))
    check(plan(Case(cost, 9, (0, 1, 0, 1, 0, 1)), effort=QUICK), cost)


def test_the_incumbent_stays_when_nothing_is_better() -> None:
    best = plan(Case(TEN, 12, (0, 1, 2, 3)))
    assert plan(Case(TEN, 12, (0, 1, 2, 3)), incumbent=best) == best


def test_forward_only_programs_stay() -> None:
    program = forward_only(range(4), 3)
    assert AdaptOrder().apply(program, TEN) is program


# ── refusals ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_refuses_a_cost_model_of_another_size() -> None:
    with pytest.raises(PassError, match=r"gpipe has 3 stages, the cost model 4: expected as many"):
        AdaptOrder().apply(gpipe(3, 2), TEN)


def test_an_impossible_limit_says_the_smallest_that_works() -> None:
    cost = replace(CostModel.uniform(2, 10, 10, 10), memory_forward=(4.0, 2.0), memory_input_grad=(1.0, 1.0))
    with pytest.raises(PlanError, match=r"memory limit of rank 0 is 3: one microbatch holds 4, the smallest that works"):
        plan(Case(cost.limited((3.0, 3.0)), 4, (0, 1)))
    check(
        plan(Case(cost.limited((4.0, 2.0)), 4, (0, 1)), effort=QUICK),
        cost.limited((4.0, 2.0)),
    )


def test_an_incumbent_of_another_pipeline_is_refused() -> None:
    with pytest.raises(
        PlanError, match=r"incumbent 1f1b: placement 0,1,2 and 8 microbatches: expected those of case, 0,1,2,3 and 8"
    ):
        plan(Case(TEN, 8, (0, 1, 2, 3)), incumbent=one_f_one_b(3, 8))


def test_a_fused_incumbent_is_split() -> None:
    found = plan(Case(TEN, 8, (0, 1, 2, 3)), incumbent=one_f_one_b(4, 8, split=False), effort=QUICK)
    assert not any(op.kind is Kind.B for order in found.orders for op in order)
