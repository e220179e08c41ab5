"""Bounds of the period: no program beats them, and each of them binds somewhere."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jobs import even_case, random_case, random_job_program

from adaptra.planning.routes.job_planner import plan_job
from adaptra.planning.routes.period_bound import flow_bound, period_bound
from adaptra.planning.routes.route import share_evenly
from adaptra.program.placement import v_shaped
from adaptra.simulation.bound import BoundKind
from adaptra.simulation.case import Case, WorkerLink
from adaptra.simulation.cost import CostModel
from adaptra.simulation.simulate import simulate


@given(st.integers(0, 100_000), st.booleans())
def test_no_program_beats_the_bound(seed: int, links: bool) -> None:
    case = random_case(seed, links=links, shapes=seed % 3 > 0)
    simulated = simulate(random_job_program(case, seed), case)
    case = replace(case, memory=(max(simulated.held),) * case.ranks)
    assert simulated.period >= period_bound(case, simulated.program.routing).value * (1 - 1e-9)


@given(st.integers(0, 100_000), st.booleans())
def test_no_program_of_any_routing_beats_the_flow_bound(seed: int, links: bool) -> None:
    case = random_case(seed, links=links)
    simulated = simulate(random_job_program(case, seed), case)
    case = replace(case, memory=tuple(max(simulated.held) for _ in range(case.stages)))
    assert simulated.period >= flow_bound(case).value * (1 - 1e-9)
    assert flow_bound(case).value <= period_bound(case, simulated.program.routing).value * (1 + 1e-9)


def test_the_flow_bound_counts_what_a_narrow_port_lets_through() -> None:
    # The shares that suit best are 9 and 23. With 10, worker 0 would send 10 messages behind F: 61. Behind the last one F and I
    # of worker 1, a message home, I and W remain: 71.
    case = replace(even_case(2, 2, 16), ports={0: 6.0})
    assert str(flow_bound(case)) == "69 (fill, worker 2)"
    assert str(flow_bound(replace(case, ports={}))) == "48 (fill, worker 0)"


def test_two_workers_in_a_row_reach_the_path_bound() -> None:
    # Eight F and eight I of worker 1, between F and then I and W of worker 0.
    case = replace(even_case(1, 2, 8), cost=CostModel.uniform(2, 3, 3, 1))
    program = plan_job(case)
    found = period_bound(case, program.routing)
    assert (found.value, found.kind) == (56.0, BoundKind.WORK)
    assert simulate(program, case).period == found.value


@pytest.mark.parametrize(
    ("case", "value", "kind", "where"),
    [
        (replace(even_case(3, 4, 6, 3.0), lost=frozenset({6})), 30.0, BoundKind.WORK, "worker 2"),
        # Worker 0 runs 2 F, and then idles until its first I comes back at 11.
        (even_case(1, 6, 2), 6.0 + 9.0, BoundKind.FILL, "worker 0"),
        # Worker 0 of two stages waits for the F of worker 1 between its own, before its first I.
        (replace(even_case(1, 3, 1), placement=(0, 1, 0)), 6.0 + 1.0, BoundKind.FILL, "worker 0"),
        # Both stages of a worker share its room for 2: 4 microbatches, each held for 13 on one stage and 3 on the other.
        (replace(even_case(1, 6, 4), placement=v_shaped(3), memory=(2, 8, 8)), 32.0, BoundKind.MEMORY, "worker 0"),
        # Worker 3 steps for 3 with all others, and then waits for three F.
        (replace(even_case(1, 4, 6, 3.0), barrier=True), 24.0, BoundKind.BARRIER, "worker 3"),
        # One microbatch at a time: F, I and W of its own, and F and I of three more stages.
        (replace(even_case(1, 4, 3), memory=(1, 9, 9, 9)), 27.0, BoundKind.MEMORY, "worker 0"),
        # All F and I of worker 3, 24, lie between three F and then three I and a W of earlier stages.
        (replace(even_case(2, 4, 4), cost=CostModel.uniform(4, 3, 3, 1)), 43.0, BoundKind.PATH, "worker 3, stage 0"),
        # Four messages one after the other behind F, and then F and I of worker 1 and I and W of worker 0.
        (replace(even_case(1, 2, 4), links={(0, 1): WorkerLink(0.0, 5.0)}), 25.0, BoundKind.LINK, "link 0→1"),
        # The first of 24 messages leaves worker 1 at 5, and the last one at 74. It flies for 3, and I and W of worker 0 remain.
        (replace(even_case(1, 3, 12), ports={1: 3.0}), 79.0, BoundKind.PORT, "worker 1 sends"),
    ],
)
def test_each_bound_binds_somewhere(case: Case, value: float, kind: BoundKind, where: str) -> None:
    found = period_bound(case, share_evenly(case, in_turns=False))
    assert (found.value, found.kind, found.where) == (value, kind, where)
    assert str(found) == f"{value:g} ({kind.value}, {where})"


def test_the_bound_is_reached_where_only_work_counts() -> None:
    case = replace(even_case(3, 4, 6, 3.0), lost=frozenset({6}))
    program = plan_job(case)
    assert simulate(program, case).period == period_bound(case, program.routing).value
