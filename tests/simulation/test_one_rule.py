"""The table of needs is what all its readers go by: without a row both simulators change as the definition does."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from jobs import random_case, random_job_program, random_placement
from naive import random_program, simulate_by_iteration, simulate_steps

from adaptra.passes import insert_comm
from adaptra.program import Kind, Op, Program
from adaptra.program.dependencies import RULE, Row, When
from adaptra.program.routing import Routing
from adaptra.simulation.case import Case
from adaptra.simulation.cost import CostModel
from adaptra.simulation.simulate import lower_bound, simulate

COMPUTED = (Kind.F, Kind.I, Kind.W, Kind.B)
ROWS = [(kind, row) for kind in COMPUTED for row in RULE[kind]]
SEEDS = range(40)
TIMES = 2
"""Steps, of which the second begins while the first ends."""


def names_of(value: object) -> str | None:
    return None if not isinstance(value, Row) else f"{value.offset} {value.later} {value.when.value}"


def costs(seed: int, stages: int) -> CostModel:
    """Unequal ops and latencies; messages take no room, so that one that nobody needs delays no other."""
    dice = random.Random(f"rule {seed}")
    ops = [tuple(dice.choice((0.5, 1.0, 1.75)) for _ in range(stages)) for _ in range(3)]
    late = [tuple(dice.choice((0.0, 0.5, 2.0)) for _ in range(stages - 1)) for _ in range(2)]
    none = (0.0,) * (stages - 1)
    return CostModel(ops[0], ops[1], ops[2], late[0], late[1], none, none)


def pipelines() -> list[tuple[Program, CostModel]]:
    """Programs of one pipeline, with several stages a rank and with both gradients in one op."""
    found: list[tuple[Program, CostModel]] = []
    for seed in SEEDS:
        placement = random_placement(1 + seed % 4, seed)
        program = random_program(seed, placement, 1 + seed % 5)
        found.append((program, costs(seed, len(placement))))
    return found


def jobs() -> list[tuple[Program, Case]]:
    """Programs of several replicas around lost and slow workers, on stages that change buffers too."""
    cases = [random_case(seed, shapes=seed % 3 > 0) for seed in SEEDS]
    for seed, case in enumerate(cases):
        changing = frozenset({0}) if seed % 2 else case.changing
        cases[seed] = replace(case, cost=costs(seed, case.stages), changing=changing)
    return [(random_job_program(case, seed), case) for seed, case in enumerate(cases)]


PIPELINES, JOBS = pipelines(), jobs()


def times_of_pipelines() -> list[dict[Op, tuple[float, float]]]:
    """The times of all ops; the simulator's, which are the definition's."""
    found: list[dict[Op, tuple[float, float]]] = []
    for program, cost in PIPELINES:
        simulated = {one.op: (one.start, one.end) for one in simulate(program, cost).timeline}
        assert simulated == simulate_by_iteration(program, cost)
        found.append(simulated)
    return found


def times_of_jobs() -> list[dict[tuple[int, Op], tuple[float, float]]]:
    """The same of several replicas; REDUCE is left out, as the two have its start otherwise."""
    found: list[dict[tuple[int, Op], tuple[float, float]]] = []
    for program, case in JOBS:
        simulated = simulate(program, case)
        steps = enumerate(simulated.steps[:TIMES])
        times = {
            (step, one.op): (one.start, one.end)
            for step, workers in steps
            for intervals in workers
            for one in intervals
            if one.op.kind is not Kind.REDUCE
        }
        expected = simulate_steps(simulated.program, case, TIMES)
        for at, found_at in times.items():
            assert found_at == pytest.approx(expected[at])
        found.append(times)
    return found


@pytest.mark.parametrize(("kind", "row"), ROWS, ids=names_of)
def test_both_simulators_follow_the_table_when_a_row_is_gone(monkeypatch: pytest.MonkeyPatch, kind: Kind, row: Row) -> None:
    """Without those between stages, workers would run any number of steps ahead, which only one step's simulator can show."""
    whole = times_of_pipelines(), times_of_jobs()
    monkeypatch.setitem(RULE, kind, tuple(other for other in RULE[kind] if other != row))
    some, others = (
        any(op.kind is kind for one, _ in all_of for ops in one.orders for op in ops) for all_of in (PIPELINES, JOBS)
    )
    is_implied = row.offset == row.later == 0  # by the order of a worker's ops
    assert (times_of_pipelines() != whole[0]) is (some and not is_implied and row.when is When.ALWAYS)
    if row.offset == 0:
        assert (times_of_jobs() != whole[1]) is (others and not is_implied)


@pytest.mark.parametrize("kind", [Kind.F, Kind.I])
def test_the_bound_follows_the_table_when_a_row_is_gone(monkeypatch: pytest.MonkeyPatch, kind: Kind) -> None:
    """Without the needs between stages in one direction, late messages of it hold up neither a program nor the bound."""
    late = [(program, replace(cost, **_latencies(program.stages, 50.0))) for program, cost in PIPELINES if program.stages > 1]
    whole = [lower_bound(Case(cost, program.microbatches, program.placement)).value for program, cost in late]
    monkeypatch.setitem(RULE, kind, tuple(row for row in RULE[kind] if row.offset == 0))
    if kind is Kind.I:
        monkeypatch.setitem(RULE, Kind.B, tuple(row for row in RULE[Kind.B] if row.offset == 0))
    lower = 0
    for (program, cost), before in zip(late, whole, strict=True):
        bound = lower_bound(Case(cost, program.microbatches, program.placement)).value
        assert bound <= simulate(program, cost).makespan * (1 + 1e-9)
        assert bound <= before
        lower += bound < before
    assert lower > len(late) / 2


def _latencies(stages: int, latency: float) -> dict[str, tuple[float, ...]]:
    return dict.fromkeys(("latency_forward", "latency_backward"), (latency,) * (stages - 1))


def test_accumulators_travel_only_while_a_row_hands_them_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def sends() -> int:
        lowered = (insert_comm.InsertComm().apply(program, case.cost) for program, case in JOBS if case.hands_over)
        return sum(op.kind is Kind.SEND_W for program in lowered for order in program.orders for op in order)

    assert sends() > 0
    for kind in (Kind.W, Kind.B):
        monkeypatch.setitem(RULE, kind, tuple(row for row in RULE[kind] if row.when is not When.HANDED_OVER))
    assert sends() == 0


@pytest.mark.parametrize("seed", SEEDS)
def test_one_pipeline_has_the_same_makespan_in_both_simulators(seed: int) -> None:
    dice = random.Random(f"makespan {seed}")
    placement = random_placement(1 + seed % 5, seed)
    cost = costs(seed, len(placement))
    if max(placement) + 1 == len(placement):  # a rank with several stages has a port where their messages wait for each other
        rooms = [tuple(dice.choice((0.0, 0.25, 1.5)) for _ in range(len(placement) - 1)) for _ in range(2)]
        cost = replace(cost, occupancy_forward=rooms[0], occupancy_backward=rooms[1])
    case = Case(cost, 1 + seed % 6, placement).of_replicas(1)
    program = replace(random_job_program(case, seed), routing=Routing.of_pipeline(placement, case.microbatches))
    assert program.is_one_pipeline
    alone = replace(program, orders=tuple(tuple(op for op in order if not op.kind.is_update) for order in program.orders))
    assert simulate(program, case).makespan == pytest.approx(simulate(alone, cost).makespan)
