"""Which ranks change roles: a slow link carries what it costs least to carry, and nobody moves for nothing."""

from __future__ import annotations

from collections.abc import Collection
from itertools import combinations, pairwise, permutations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adaptra.errors import CaseError
from adaptra.planning.layouts.choose_roles import JobModel, StageLoad, choose_roles
from adaptra.planning.routes.steady_steps import timing_of
from adaptra.program.roles import Roles
from adaptra.simulation.cost import CostModel
from adaptra.simulation.links import Link

FAST, SLOW = Link(1e-4, 1e-9), Link(0.06, 1e-8)
LOAD = StageLoad(gradient_bytes=40_000_000, state_bytes=120_000_000)


def job(slow: Collection[tuple[int, int]] = (), ranks: int = 4, stages: int = 2, link: Link = SLOW, **changes: Any) -> JobModel:
    links = {pair: link if pair in slow else FAST for pair in combinations(range(ranks), 2)}
    fields: dict[str, Any] = {
        "cost": CostModel.uniform(stages, 0.02, 0.02, 0.02),
        "microbatches": 8,
        "message_bytes": [(100_000, 100_000)] * (stages - 1),
        "loads": [LOAD] * stages,
        "links": links,
        "restart": 1.0,
    }
    return JobModel(**{**fields, **changes})


INITIAL = Roles.initial(4, 2)


def test_nobody_moves_between_equal_links() -> None:
    assert choose_roles(job(), INITIAL, 10**6) is None


def test_a_slow_network_between_replicas_carries_activations_instead_of_gradients() -> None:
    """Two racks, a replica in each: the links between them then join stages, whose messages a plan hides."""
    racks = job(slow={(0, 2), (0, 3), (1, 2), (1, 3)})
    change = choose_roles(racks, INITIAL, 1000)
    assert change is not None
    assert {frozenset(change.after.column(stage)) for stage in range(2)} == {frozenset({0, 1}), frozenset({2, 3})}
    # The 40 MB of a sum took 0.4 s and two latencies, which became two that a plan hides in part.
    assert change.seconds_before - change.seconds_after > 0.35
    assert "ms a step instead of" in str(change) and "steps' gain" in str(change)


@pytest.mark.parametrize("placement", [(0, 1, 1, 0), (0, 1, 0, 1, 0, 1)])
def test_all_stages_of_a_rank_move_together(placement: tuple[int, ...]) -> None:
    """The edges of a pipeline follow the ranks of its stages, and stages of one rank have no link between them."""
    racks = job(
        slow={(0, 2), (0, 3), (1, 2), (1, 3)},
        cost=CostModel.uniform(len(placement), 0.02, 0.02, 0.02),
        message_bytes=[(100_000, 100_000)] * (len(placement) - 1),
        placement=placement,
    )
    case = racks.pipeline((0, 2))
    assert case.placement == placement
    crossing = [0.0 if one == other else SLOW.latency for one, other in pairwise(placement)]
    assert list(case.cost.latency_forward) == list(case.cost.latency_backward) == crossing
    change = choose_roles(racks, INITIAL, 1000)
    assert change is not None and change.placement == placement
    assert {frozenset(change.after.column(place)) for place in range(2)} == {frozenset({0, 1}), frozenset({2, 3})}


def test_one_slow_link_between_replicas_carries_nothing_or_activations() -> None:
    change = choose_roles(job(slow={(0, 2)}), INITIAL, 1000)
    assert change is not None
    assert all({0, 2} != set(change.after.column(stage)) for stage in range(2))


def test_a_change_must_pay_within_the_horizon() -> None:
    slow = job(slow={(0, 2)})
    change = choose_roles(slow, INITIAL, 1000)
    assert change is not None
    pays_after = change.moving / (change.seconds_before - change.seconds_after)
    assert choose_roles(slow, INITIAL, int(pays_after)) is None
    assert choose_roles(slow, INITIAL, int(pays_after) + 1) is not None


def test_a_slow_pipeline_link_that_a_plan_hides_is_left_alone() -> None:
    assert choose_roles(job(slow={(0, 1)}, link=Link(0.004, 1e-9)), INITIAL, 100) is None


def test_every_pair_needs_a_link() -> None:
    with pytest.raises(CaseError, match="links: none between ranks 0 and 1: expected one for every pair of ranks"):
        choose_roles(job(links={}), INITIAL, 10)


def seconds(model: JobModel, roles: Roles) -> float:
    pipelines = [model.pipeline(roles.pipeline(replica)) for replica in range(roles.replicas)]
    averaging = max(model.averaging(stage, roles.column(stage)) for stage in range(roles.stages))
    return max(timing_of(barrier=model.barrier).bound(case) for case in pipelines) + averaging


@settings(max_examples=25, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(list(combinations(range(4), 2))),
        st.builds(Link, st.sampled_from([0.0, 0.01, 0.1]), st.sampled_from([0.0, 1e-8, 1e-7])),
    ),
    st.permutations(range(4)),
    st.integers(1, 10_000),
)
def test_a_change_saves_what_it_says_and_no_bound_promises_more(
    links: dict[tuple[int, int], Link], ranks: list[int], horizon: int
) -> None:
    model, before = job(), Roles(2, tuple(ranks))
    model = job(links={**model.links, **links})
    change = choose_roles(model, before, horizon)
    if change is not None:
        assert sorted(change.after.ranks) == [0, 1, 2, 3]
        assert change.seconds_after < change.seconds_before
        assert horizon * (change.seconds_before - change.seconds_after) > change.moving == model.moving(before, change.after)
        assert change.seconds_after >= seconds(model, change.after) * (1 - 1e-9)
        # From where it leads, a change back can't win.
        again = choose_roles(model, change.after, horizon)
        assert again is None or again.seconds_after < change.seconds_after
    else:
        # Then no swap's bound is so low that even a plan a tenth above it would pay.
        for one, other in combinations(range(4), 2):
            swapped = before.swapped(one, other)
            saved = seconds(model, before) - 1.1 * seconds(model, swapped)
            assert horizon * saved <= model.moving(before, swapped) + 1e-9 or saved < 0.1 * seconds(model, before)


def test_the_best_of_all_assignments_of_four_ranks_is_found() -> None:
    racks = job(slow={(0, 2), (0, 3), (1, 2), (1, 3)}, restart=0.0)
    change = choose_roles(racks, INITIAL, 10**6)
    assert change is not None
    best = min(seconds(racks, Roles(2, ranks)) for ranks in permutations(range(4)))
    assert change.seconds_after <= 1.1 * best


def test_a_step_costs_the_makespan_only_where_ranks_meet_between_steps() -> None:
    racks = {(0, 2), (0, 3), (1, 2), (1, 3)}
    steady, meeting = (choose_roles(job(slow=racks, barrier=barrier), INITIAL, 1000) for barrier in (False, True))
    assert steady is not None and meeting is not None
    # Two equal stages: each works for 8 microbatches, and behind a barrier also fills and drains.
    work, averaging = 8 * 3 * 0.02, job(slow=racks).averaging(0, (0, 2))
    assert steady.seconds_before == pytest.approx(work + averaging, rel=1e-3)
    assert meeting.seconds_before == pytest.approx(work + 0.02 + averaging, rel=1e-3)
