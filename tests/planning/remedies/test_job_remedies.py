"""What a job does about a slow worker or a narrow or late link: the targets, what is kept, and what is given back."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from measured import noisy, seconds_of_updates

from adaptra.errors import CaseError, PlanError
from adaptra.planning.planner import plan
from adaptra.planning.remedies.job_remedies import JobRemedy, RemedyComparison, compare_remedies, hand_overs, moves
from adaptra.planning.routes.joined_programs import join
from adaptra.planning.routes.measured_jobs import measured_case
from adaptra.planning.routes.period_bound import flow_bound
from adaptra.program import Kind, Program
from adaptra.program.placement import in_turn, v_shaped
from adaptra.program.routing import Route, Routing
from adaptra.program.verify import verify
from adaptra.simulation.case import Case
from adaptra.simulation.cost import CostModel
from adaptra.simulation.simulate import simulate

EFFORT = 300_000
Hurt = Callable[[CostModel], CostModel]


@dataclass(frozen=True)
class Shape:
    """A job of equal replicas, whose ops take 40 ms and whose messages less."""

    replicas: int
    stages: int
    microbatches: int

    @property
    def cost(self) -> CostModel:
        return CostModel.uniform(self.stages, 0.04, 0.04, 0.04, 0.004, 0.03)

    def case(self, hurt: dict[int, Hurt] | None = None, seed: int | None = None, **more: object) -> Case:
        """The case with some replicas hurt, as measured with a noise of 2 %, or without noise if there is no seed."""
        costs = [(hurt or {}).get(replica, lambda cost: cost)(self.cost) for replica in range(self.replicas)]
        chance = random.Random(seed)
        costs = [cost if seed is None else noisy(cost, chance) for cost in costs]
        return replace(measured_case(costs, self.microbatches, seconds_of_updates(self.stages)), **more)

    def healthy(self) -> Program:
        """The program that the healthy job runs."""
        return _running(self)


@cache
def _running(shape: Shape) -> Program:
    one = plan(Case(shape.cost, shape.microbatches, tuple(range(shape.stages))), effort=EFFORT)
    return compare_remedies(shape.case(), join([one] * shape.replicas), effort=EFFORT).best.program


def slow(stage: int, factor: float = 2.0) -> Hurt:
    return lambda cost: cost.with_stage(stage, *(factor * time for time in (0.04, 0.04, 0.04)))


def narrow(stage: int, forwards: float = 6.0) -> Hurt:
    return lambda cost: cost.with_occupancy(stage, stage + 1, 0.04 * forwards).with_occupancy(stage + 1, stage, 0.04 * forwards)


def late(stage: int, forwards: float = 6.0) -> Hurt:
    return lambda cost: cost.with_latency(stage, stage + 1, 0.04 * forwards).with_latency(stage + 1, stage, 0.04 * forwards)


def ratio(shape: Shape, hurt: dict[int, Hurt], found: RemedyComparison) -> float:
    """The chosen program's period under the costs without noise, ÷ that of the healthy job."""
    verify(found.best.program)
    healthy = simulate(shape.healthy(), shape.case()).period
    return simulate(found.best.program, shape.case(hurt)).period / healthy


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("seed", [1, 2])
def test_a_worker_at_half_the_speed_costs_at_most_three_tenths(stage: int, seed: int) -> None:
    shape = Shape(4, 4, 8)
    hurt = {1: slow(stage)}
    found = compare_remedies(shape.case(hurt, seed), shape.healthy(), effort=EFFORT)
    assert found.best.kind is JobRemedy.SHARE
    assert ratio(shape, hurt, found) <= 1.30
    assert re.search(
        rf"^[456] of 8 microbatches of worker 1\.{stage} run on 0\.{stage}, 2\.{stage}, 3\.{stage}$", found.best.what
    )
    pattern = r"keep [\d.]+ s, reorder [\d.]+ s, share [\d.]+ s, detour not possible \(no narrow or late link\)"
    assert re.fullmatch(pattern, str(found))


@pytest.mark.parametrize("stage", range(4))
def test_buffers_that_a_forward_changes_keep_their_order_and_the_same_target(stage: int) -> None:
    shape = Shape(4, 4, 8)
    hurt = {1: slow(stage)}
    case = shape.case(hurt, 1, changing=frozenset(range(4)), hand_over=0.01)
    found = compare_remedies(case, shape.healthy(), effort=EFFORT)
    program = found.best.program
    assert found.best.kind is JobRemedy.SHARE and ratio(shape, hurt, found) <= 1.30
    verify(program, changing=case.changing)
    forwards = {one.op: one for workers in simulate(program, case).steps[:1] for row in workers for one in row}
    handed_over = 0
    for op, interval in forwards.items():
        if op.kind is Kind.F and op.microbatch > 0:
            before = forwards[replace(op, microbatch=op.microbatch - 1)]
            is_handed_over = before.rank != interval.rank
            handed_over += is_handed_over
            assert interval.start >= before.end + case.hand_over * is_handed_over - 1e-9
    assert handed_over >= 2


def test_stages_that_stay_at_home_are_neither_shared_nor_part_of_a_detour() -> None:
    shape = Shape(2, 3, 8)
    hurt: dict[int, Hurt] = {1: lambda cost: narrow(0)(slow(1)(slow(0)(cost)))}
    for kept in (frozenset({0}), frozenset({1, 2})):
        found = compare_remedies(shape.case(hurt, 1, at_home=kept), shape.healthy(), effort=EFFORT)
        assert found.best.moved, "others are shared"
        for one in found.candidates:
            routing = one.program.routing
            for replica, stage in product((0, 1), kept):
                holders = {routing.holder(replica, stage, microbatch) for microbatch in range(8)}
                assert holders == {routing.workers[replica][stage]}, one.what
    found = compare_remedies(shape.case(hurt, 1, at_home=frozenset(range(3))), shape.healthy(), effort=EFFORT)
    assert found.best.moved == 0
    assert found.refused[JobRemedy.SHARE] == "no worker slow enough"


@pytest.mark.parametrize("seed", [1, 2])
def test_a_narrow_edge_costs_at_most_a_tenth(seed: int) -> None:
    shape = Shape(2, 2, 16)
    hurt = {1: narrow(0)}
    found = compare_remedies(shape.case(hurt, seed), shape.healthy(), effort=EFFORT)
    assert found.best.kind is JobRemedy.DETOUR
    assert ratio(shape, hurt, found) <= 1.10
    assert found.best.hand_overs == 2, "all microbatches cross, so accumulators only go home"


@pytest.mark.parametrize("healthy", [0, 2])
def test_three_narrow_links_of_four_cost_at_most_a_tenth_above_the_flow_bound(healthy: int) -> None:
    shape = Shape(4, 4, 8)
    hurt = {replica: narrow(1) for replica in range(4) if replica != healthy}
    found = compare_remedies(shape.case(hurt, 1), shape.healthy(), effort=EFFORT)
    assert found.best.kind is JobRemedy.DETOUR
    period = simulate(found.best.program, shape.case(hurt)).period
    assert period <= 1.1 * flow_bound(shape.case(hurt)).value


def test_a_late_link_is_gone_round_where_memory_leaves_no_order_that_hides_it() -> None:
    shape = Shape(2, 3, 8)
    hurt = {0: late(0)}
    running, memory = shape.healthy(), (4, 4, 4)
    kept = compare_remedies(shape.case(memory=memory), running, effort=EFFORT).best.program
    found = compare_remedies(shape.case(hurt, 1, memory=memory), kept, effort=EFFORT)
    assert found.best.kind is JobRemedy.DETOUR
    assert found.best.what == "8 of 8 microbatches of worker 0.0 run on 1.0; 8 of 8 microbatches of worker 1.0 run on 0.0"
    by_kind = {one.kind: one.period for one in found.candidates}
    assert by_kind[JobRemedy.DETOUR] < 0.9 * by_kind[JobRemedy.REORDER]


def test_a_slow_worker_and_a_narrow_link_at_once() -> None:
    shape = Shape(3, 3, 8)
    hurt: dict[int, Hurt] = {0: slow(1), 2: narrow(1)}
    found = compare_remedies(shape.case(hurt, 3), shape.healthy(), effort=EFFORT)
    assert ratio(shape, hurt, found) <= 1.35
    assert found.best.kind is JobRemedy.DETOUR
    assert any("of worker 0.1 run on" in text for text in moves(found.best.program.routing or pytest.fail("no routing")))


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 100_000), st.integers(2, 4), st.integers(2, 4), st.integers(2, 8), st.booleans())
def test_every_candidate_runs_and_none_that_is_slower_is_chosen(
    seed: int, replicas: int, stages: int, size: int, tight: bool
) -> None:
    chance = random.Random(seed)
    shape = Shape(replicas, stages, size)
    kinds = (
        slow(chance.randrange(stages), chance.choice([1.2, 1.5, 3.0])),
        *(one(chance.randrange(stages - 1)) for one in (narrow, late)),
    )
    hurt = {chance.randrange(replicas): chance.choice(kinds) for _ in range(chance.randint(0, 2))}
    memory = (chance.randint(2, size),) * stages if tight else None
    case = shape.case(hurt, seed, memory=memory)
    delegated = shape.case({}, seed, memory=memory, slow=case.slow)
    found = compare_remedies(case, shape.healthy(), delegated=delegated, effort=60_000)
    keep, best = found.candidates[0], found.best
    assert keep.kind is JobRemedy.KEEP
    assert best is keep or keep.over_memory or best.seconds(100) < 0.97 * keep.seconds(100)
    for one in found.candidates:
        verify(one.program)
        under = delegated if one.kind is JobRemedy.DELEGATE else case
        simulated = simulate(one.program, under)
        assert one.period == simulated.period
        assert one is keep or not simulated.over_memory
        assert one.over_memory or one.period >= one.bound * (1 - 1e-9)
    assert {one.kind for one in found.candidates} | set(found.refused) == set(JobRemedy)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 100_000), st.integers(2, 4), st.integers(2, 4))
def test_noise_changes_nothing(seed: int, replicas: int, stages: int) -> None:
    shape = Shape(replicas, stages, 8)
    assert compare_remedies(shape.case(seed=seed), shape.healthy(), effort=60_000).best.kind is JobRemedy.KEEP


@pytest.mark.parametrize("hurt", [slow(0), slow(1), narrow(0)])
def test_routes_are_given_back_once_the_job_is_healthy(hurt: Hurt) -> None:
    shape = Shape(2, 2, 8)
    running = compare_remedies(shape.case({0: hurt}, 1), shape.healthy(), effort=EFFORT).best
    assert running.moved
    kept = compare_remedies(shape.case({0: hurt}, 2), running.program, effort=EFFORT).best
    assert kept.kind is JobRemedy.KEEP, "as long as it is hurt"
    back = compare_remedies(shape.case(seed=3), running.program, effort=EFFORT).best
    assert (back.kind, back.moved, back.hand_overs) == (JobRemedy.REORDER, 0, 0)
    healthy = simulate(shape.healthy(), shape.case()).period
    assert simulate(back.program, shape.case()).period <= 1.02 * healthy


def test_the_delegate_wins_if_its_links_are_as_good_and_opening_them_costs_little() -> None:
    shape = Shape(2, 2, 16)
    case = shape.case({1: narrow(0)})
    for costs, kind in (({}, JobRemedy.DELEGATE), ({JobRemedy.DELEGATE: 60.0}, JobRemedy.DETOUR)):
        found = compare_remedies(case, shape.healthy(), delegated=shape.case(), costs=costs, effort=EFFORT)
        assert found.best.kind is kind
        assert ", delegate " in str(found)


def test_a_slow_worker_shares_what_the_others_memory_allows() -> None:
    shape = Shape(2, 3, 8)
    memory = (2, 2, 2)
    running = compare_remedies(shape.case(memory=memory), shape.healthy(), effort=EFFORT).best.program
    found = compare_remedies(shape.case({0: slow(1, 3.0)}, memory=memory), running, effort=EFFORT)
    assert found.best.kind is JobRemedy.SHARE
    assert max(simulate(found.best.program, found.case).held) <= 2


def test_without_room_no_remedy_is_possible() -> None:
    cost = CostModel.uniform(4, 0.04, 0.04, 0.04, 0.004, 0.01)
    hurt = narrow(0)(slow(1)(cost))
    running = join([plan(Case(cost, 4, v_shaped(2)), effort=EFFORT)] * 2)
    # A microbatch is on two stages of a worker at once, and there is room for one.
    case = measured_case([cost, hurt], 4, seconds_of_updates(4), placement=v_shaped(2), memory=(1, 1))
    found = compare_remedies(case, running, delegated=case, effort=EFFORT)
    assert found.best.kind is JobRemedy.KEEP
    assert found.best.over_memory == (0, 1, 2, 3)
    no_room = "not possible (no room in memory)"
    assert str(found).endswith(f"reorder {no_room}, share {no_room}, detour {no_room}, delegate {no_room}")


def test_a_running_program_that_exceeds_the_memory_is_replaced_even_by_a_slower_one() -> None:
    shape = Shape(2, 3, 8)
    found = compare_remedies(shape.case(memory=(2, 2, 2)), shape.healthy(), effort=EFFORT)
    assert found.candidates[0].over_memory
    assert found.best.kind is JobRemedy.REORDER
    assert found.best.period > found.candidates[0].period


@pytest.mark.parametrize("placement", [v_shaped(2), in_turn(2, 2)])
def test_workers_with_several_stages_share_and_are_gone_round(placement: tuple[int, ...]) -> None:
    cost = CostModel.uniform(4, 0.04, 0.04, 0.04, 0.004, 0.01)
    updates = seconds_of_updates(4)
    running = join([plan(Case(cost, 6, placement), effort=EFFORT)] * 3)
    hurt = cost.with_stage(0, 0.08, 0.08, 0.08).with_stage(placement.index(0, 1), 0.08, 0.08, 0.08)
    narrowed = cost.with_occupancies(
        [(stage, near) for stage in range(4) for near in (stage - 1, stage + 1) if 0 <= near < 4], 24
    )
    for costs, kind in (([cost, hurt, cost], JobRemedy.SHARE), ([cost, narrowed, cost], JobRemedy.DETOUR)):
        case = measured_case(costs, 6, updates, placement=placement)
        found = compare_remedies(case, running, effort=EFFORT)
        verify(found.best.program)
        assert found.best.kind is kind
        assert found.best.period < 0.8 * found.candidates[0].period


def test_what_changes_workers_is_counted_with_the_way_home() -> None:
    routing = Routing(
        ((0, 1), (2, 3)),
        (
            Route(0, range(1), (0, 1)),
            Route(0, range(1, 2), (0, 3)),
            Route(0, range(2, 3), (0, 1)),
            Route(1, range(2), (2, 3)),
            Route(1, range(2, 3), (0, 1)),
        ),
        3,
    )
    assert hand_overs(routing) == 2 + 2 + 2
    assert list(moves(routing)) == [
        "1 of 3 microbatches of worker 0.1 run on 1.1",
        "1 of 3 microbatches of workers 1.0 to 1.1 run on replica 0",
    ]


def test_lost_workers_and_no_time_are_refused() -> None:
    shape = Shape(2, 2, 4)
    case = shape.case(lost=frozenset({3}))
    with pytest.raises(
        CaseError, match=r"^compare_remedies: worker 1\.1 is lost: expected workers that live; decide\(\) plans"
    ):
        compare_remedies(case, shape.healthy())
    with pytest.raises(PlanError, match=r"^budget of 0 seconds: expected a positive number$"):
        compare_remedies(shape.case(), shape.healthy(), budget=0)
