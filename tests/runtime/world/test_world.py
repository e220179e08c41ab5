"""Worlds: workers keep their numbers while the processes that host them change, and each change has an epoch of its own."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

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
    assert after.followed_by() == World(2, 2, after.hosts, (1, 0, 1, 0))


def test_one_process_may_host_several_workers_which_then_have_no_roles() -> None:
    world = World.of_threads(3)
    assert world.hosted(ProcessId(0)) == world.pipeline(0) == (0, 1, 2)
    with pytest.raises(OptionError, match="expected each rank of the job once"):
        _ = world.roles


@given(st.integers(1, 5), st.integers(1, 5), st.data())
def test_fewer_processes_host_all_workers_evenly(places: int, replicas: int, data: st.DataObject) -> None:
    """And each replica is the home of one, which gives its batch to the others."""
    processes = data.draw(st.integers(max(places, replicas), places * replicas))
    try:
        world = World.of_fewer(processes, places, replicas)
    except OptionError:  # a place with few processes hosts more replicas than it can be at home in
        assert processes < places * (replicas - 1)
        return
    assert world.processes == tuple(range(processes))
    assert set(world.homes) == set(range(replicas))
    for place in range(places):
        counts = [len(world.hosted(ProcessId(one))) for one in range(place, processes, places)]
        assert max(counts) - min(counts) <= 1 and sum(counts) == replicas
    for process in world.processes:
        first, *others = world.hosted(process)
        assert not world.is_guest(first) and all(map(world.is_guest, others))
        assert {world.seat(worker).place for worker in (first, *others)} == {process % places}
    for replica in range(replicas):
        assert world.home(world.giver(replica)) == replica
        needing = {world.hosts[worker] for worker in world.pipeline(replica) if world.is_guest(worker)}
        assert set(world.takers(replica)) == needing
    assert world.has_guests == (processes < places * replicas)


@given(st.integers(1, 4), st.integers(1, 4))
def test_as_many_processes_as_workers_are_consecutive_roles(places: int, replicas: int) -> None:
    count = places * replicas
    assert World.of_fewer(count, places, replicas) == World.of_roles(Roles.initial(count, places))


def test_too_few_processes_are_refused() -> None:
    with pytest.raises(OptionError, match="expected at least 3"):
        World.of_fewer(2, 3, 2)
    with pytest.raises(OptionError, match="expected one at home in each"):
        World.of_fewer(2, 2, 3)


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 3), st.data())
def test_sites_divide_each_column(places: int, sites: int, size: int, data: st.DataObject) -> None:
    """A worker averages gradients with its peers, and exchanges with one counterpart of each site."""
    roles = Roles(places, tuple(data.draw(st.permutations(range(places * sites * size)))))
    world = replace(World.of_roles(roles), sites=sites)
    for place in map(Place, range(places)):
        column = world.column(place)
        peers = list(dict.fromkeys(map(world.peers, column)))
        counterparts = list(dict.fromkeys(map(world.counterparts, column)))
        assert [len(one) for one in peers] == [size] * sites and tuple(chain(*peers)) == column
        assert [len(one) for one in counterparts] == [sites] * size and sorted(chain(*counterparts)) == [*column]
        assert all(len({*one} & {*other}) == 1 for one in peers for other in counterparts)
    for process in world.processes:
        (worker,) = world.hosted(process)
        site = {
            one for place in range(places) for one in world.hosts_of(world.peers(world.pipeline(world.home(process))[place]))
        }
        assert {*world.site_of(process)} == site and process in world.hosts_of(world.peers(worker))
