"""Detours: which microbatches cross to another replica, and that every worker computes as many as before."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from adaptra.planning.routes.detour import around_links, detours
from adaptra.planning.routes.job_planner import plan_job
from adaptra.planning.routes.route import share_evenly
from adaptra.program.routing import Routing
from adaptra.program.verify import verify
from adaptra.simulation.case import Case, WorkerLink
from adaptra.simulation.cost import CostModel
from adaptra.simulation.simulate import simulate


def narrow(replicas: int, stages: int, microbatches: int, *links: tuple[int, int]) -> Case:
    """Even replicas in which messages over these links take six forwards, both ways."""
    pipeline = Case(CostModel.uniform(stages, 1, 1, 1, occupancy=0.2), microbatches, tuple(range(stages)))
    both = {ends: WorkerLink(0.0, 6.0) for link in links for ends in (link, link[::-1])}
    return replace(pipeline.of_replicas(replicas), links=both, hands_over=False)


def crossing(routing: Routing) -> Counter[tuple[int, int]]:
    """Count the microbatches over each link forwards."""
    return Counter(
        pair
        for route in routing.routes
        for pair in zip(route.workers, route.workers[1:], strict=False)
        for _ in route.microbatches
    )


def test_two_replicas_exchange_the_rest_of_the_path() -> None:
    case = narrow(2, 3, 8, (0, 1))
    found = list(detours(case, Routing.healthy(2, 3, 8), limit=24.0))
    assert 1 < len(found) <= 4
    numbers = [crossing(routing)[0, 4] for routing in found]
    assert numbers == sorted(numbers)
    assert numbers[0] == 4, "4 messages of 6 are as long as 24"
    for routing, number in zip(found, numbers, strict=True):
        links = crossing(routing)
        assert (links[0, 1], links[3, 4]) == (8 - number, 8 - number)
        assert (links[0, 4], links[3, 1]) == (number, number)
        assert links[1, 5] == links[4, 2] == 0, "behind the link each path stays with its replica"
        held = Counter(worker for route in routing.routes for worker in route.workers for _ in route.microbatches)
        assert set(held.values()) == {8}


def test_links_that_are_wide_enough_have_no_detour() -> None:
    case = narrow(2, 2, 4, (0, 1))
    assert list(detours(case, Routing.healthy(2, 2, 4), limit=24.0)) == []
    assert list(detours(replace(case, replicas=1), Routing.healthy(1, 2, 4), limit=6.0)) == [], "no other replica"


def test_all_microbatches_go_round_narrow_and_late_links_of_several_edges() -> None:
    case = narrow(3, 4, 6, (0, 1), (2, 3), (9, 10))
    case = replace(case, links={**case.links, (5, 6): WorkerLink(2.0, 0.2)})
    for base in (Routing.healthy(3, 4, 6), share_evenly(replace(case, slow={1: 2.0}), in_turns=False)):
        routing = around_links(case, base)
        assert routing is not None
        links = crossing(routing)
        assert not any(links[ends] for ends in ((0, 1), (2, 3), (9, 10), (5, 6)))
        before = Counter(worker for route in base.routes for worker in route.workers for _ in route.microbatches)
        assert before == Counter(worker for route in routing.routes for worker in route.workers for _ in route.microbatches)


def test_the_shorter_part_of_the_path_changes_workers() -> None:
    first, last = (around_links(narrow(2, 4, 4, ends), Routing.healthy(2, 4, 4)) for ends in ((0, 1), (2, 3)))
    assert first is not None
    assert last is not None
    assert [route.workers for route in first.routes] == [(4, 1, 2, 3), (0, 5, 6, 7)]
    assert [route.workers for route in last.routes] == [(0, 1, 2, 7), (4, 5, 6, 3)]


def test_links_no_worse_than_those_to_other_replicas_have_no_way_round() -> None:
    case = narrow(2, 2, 4)
    assert around_links(case, Routing.healthy(2, 2, 4)) is None
    narrower = {ends: WorkerLink(0.0, 9.0) for ends in ((0, 3), (3, 0))}
    assert around_links(replace(narrow(2, 2, 4, (0, 1)), links=narrower), Routing.healthy(2, 2, 4)) is None


def test_a_plan_round_a_narrow_link_is_as_short_as_a_healthy_one() -> None:
    for links in (((0, 1),), ((0, 1), (2, 3), (4, 5))):
        case = narrow(4, 2, 16, *links)
        program = plan_job(case, effort=400_000)
        verify(program, hands_over=False)
        assert simulate(program, case).period <= 1.05 * 48.0
