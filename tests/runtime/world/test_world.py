"""Worlds: workers keep their numbers while the processes that host them change, and each change has an epoch of its own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptra.errors import OptionError
from adaptra.program.roles import Roles
from adaptra.runtime.world.world import Place, ProcessId, World


@st.composite
def _roles(draw: st.DrawFn) -> Roles:
    stages, replicas = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    return Roles(stages, tuple(draw(st.permutations(range(stages * replicas)))))


@given(_roles())
def test_a_world_of_roles_has_what_the_roles_have(roles: Roles) -> None:
    world = World.of_roles(roles)
    assert (world.roles, world.replicas, world.epoch) == (roles, roles.replicas, 0)
    for rank in roles.ranks:
        (worker,) = world.hosted(ProcessId(rank))
        assert world.seat(worker) == roles.of(rank)
        assert world.hosts_of([worker]) == (rank,)
    assert [world.hosts_of(world.pipeline(one)) for one in range(roles.replicas)] == list(
        map(roles.pipeline, range(roles.replicas))
    )
    assert [world.hosts_of(world.column(Place(one))) for one in range(roles.stages)] == list(
        map(roles.column, range(roles.stages))
    )


def test_a_change_of_roles_begins_an_epoch_and_keeps_the_workers() -> None:
    before = World.of_roles(Roles(2, (0, 1, 2, 3)))
    after = before.followed_by(Roles(2, (3, 1, 2, 0)))
    assert (after.epoch, after.hosts) == (1, (3, 1, 2, 0))
    assert after.pipeline(1) == before.pipeline(1)
    assert after.followed_by() == World(2, 2, after.hosts)


def test_one_process_may_host_several_workers_which_then_have_no_roles() -> None:
    world = World.of_threads(3)
    assert world.hosted(ProcessId(0)) == world.pipeline(0) == (0, 1, 2)
    with pytest.raises(OptionError, match="expected each rank of the job once"):
        _ = world.roles
