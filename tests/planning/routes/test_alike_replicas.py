"""Replicas that are alike: which ones are, and that the orders of one are right for all of them."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from jobs import even_case, random_case

from adaptra.planning.routes.alike_replicas import merge_alike
from adaptra.planning.routes.job_planner import plan_job
from adaptra.planning.routes.route import share_evenly
from adaptra.program.routing import Routing
from adaptra.program.verify import verify
from adaptra.simulation.case import WorkerLink
from adaptra.simulation.simulate import simulate


def test_only_replicas_with_a_part_in_a_failure_stay_apart() -> None:
    case = replace(even_case(9, 2, 4, 1.0), lost=frozenset({3}), slow={15: 1.0, 16: 1.25, 17: 1.25})
    merged = merge_alike(case, share_evenly(case, in_turns=False))
    # Replica 1 lost a worker, and four others take one of its microbatches each. Replica 8 is slow, and gives one to a sixth.
    assert merged.groups[1] == (1,)
    assert sum(len(group) for group in merged.groups) == 9
    assert all(len(group) == 1 for group in merged.groups if 8 in group or 1 in group)
    assert merged.case.replicas == len(merged.groups) < 9
    assert merged.case.lost == frozenset({3})


def test_healthy_replicas_are_one_unless_their_links_differ() -> None:
    case = even_case(4, 2, 4, 1.0)
    assert merge_alike(case, Routing.healthy(4, 2, 4)).groups == ((0, 1, 2, 3),)
    late = replace(case, links={(2, 3): WorkerLink(5.0)})
    assert merge_alike(late, Routing.healthy(4, 2, 4)).groups == ((0, 2, 3), (1,))
    assert merge_alike(replace(case, slow={5: 1.1}), Routing.healthy(4, 2, 4)).groups == ((0, 1, 3), (2,))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 100_000))
def test_the_whole_job_takes_as_long_as_the_merged_one(seed: int) -> None:
    case = random_case(seed, shapes=True)
    more = replace(case, replicas=case.replicas + 3)
    program = plan_job(more, effort=20_000)
    verify(program, hands_over=case.hands_over, barrier=case.barrier)
    merged = merge_alike(more, program.routing)
    orders = [()] * (merged.routing.live[-1] + 1)
    whole = merged.expand(orders, program.routing)
    assert len(whole) == len(program.orders)
    for group in merged.groups:
        first = [program.orders[worker] for worker in program.routing.workers[group[0]] if worker is not None]
        for replica in group[1:]:
            there = [program.orders[worker] for worker in program.routing.workers[replica] if worker is not None]
            assert there == [tuple(replace(op, replica=replica) for op in order) for order in first]
    assert simulate(program, more).held
