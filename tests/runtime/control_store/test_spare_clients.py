"""Clients of the job's store are opened once: what is built anew takes them, and gives them back."""

from __future__ import annotations

import pytest
import torch
from leaking import RANKS, ROWS, compiled
from processes import run_processes
from training import MIXED


def looks(rank: int) -> list[tuple[str, set[str]]]:
    """The connections of a rank to the store, by the system's names, after each change of roles and of a cut."""
    import torch.distributed as dist

    from adaptra.runtime.control_store.forked_children import connections_to

    dist.init_process_group("gloo")
    assert dist.group.WORLD is not None
    store = dist.group.WORLD.get_group_store()
    found: list[tuple[str, set[str]]] = []

    def look(after: str) -> None:
        found.append((after, {name for _, name in connections_to(store)}))

    inputs, _, targets = MIXED.rows(ROWS, seed=0)
    with compiled(inputs, targets) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters())
        pipe.step(inputs[0], targets)
        look("a step")
        for split, swapped in ((["middle.4"], (1, 2)), (["middle.1"], (0, 3))):
            pipe.take_split(split, optimizer)
            look("a cut")
            pipe.step(inputs[0], targets)
            assert pipe.roles is not None
            pipe.take_roles(pipe.roles.swapped(*swapped), optimizer)
            look("roles")
            pipe.step(inputs[0], targets)
    return found


@pytest.mark.processes
def test_a_change_of_roles_or_of_a_cut_opens_no_connection_and_closes_none() -> None:
    """Sockets have names that the system never uses twice."""
    for rank, ((_, first), *rest) in enumerate(run_processes(looks, RANKS)):
        assert len(first) > 1, rank
        for after, now in rest:
            assert now == first, (rank, after)


def lent(_rank: int) -> dict[str, object]:
    """How many connections are open beside the usual one, as clients are reserved, lent and given back."""
    import torch.distributed as dist

    from adaptra.runtime.control_store.forked_children import connections_to
    from adaptra.runtime.control_store.spare_clients import Part, Reservation, client_of, give_back
    from adaptra.runtime.control_store.stores import Connection, clone

    dist.init_process_group("gloo")
    assert dist.group.WORLD is not None
    job = dist.group.WORLD.get_group_store()
    before = len(connections_to(job))
    found: dict[str, object] = {}

    def look(when: str) -> None:
        found[when] = len(connections_to(job)) - before

    spares = Reservation(2)
    look("reserved")
    first, second = clone(Part("a", job)), clone(Part("b", job))
    look("lent")
    third = clone(Part("c", first))
    look("more than reserved")
    third.set("key", "third")
    found["keys"] = Part("c", Part("a", job)).get("key").decode()
    give_back(third)
    del third
    look("given back, not reserved")
    client = client_of(second)
    second.set_timeout(3 * job.timeout)  # pyright: ignore[reportAttributeAccessIssue] - torch's annotations lack it
    give_back(second)
    look("given back")
    second = clone(Part("d", job))
    found["same client"] = client_of(second) is client
    found["usual timeout"] = client.timeout == job.timeout  # pyright: ignore[reportAttributeAccessIssue]
    give_back(first)
    connection = Connection(Part("e", job))
    connection.set("key", "fifth")
    give_back(second)
    names = {name for _, name in connections_to(job)}
    connection.interrupt()
    found["over a spare client"] = connection.get("key").decode()
    found["that was open"] = {name for _, name in connections_to(job)} <= names
    connection.close()
    spares.end()
    del first, second, client, connection
    look("ended")
    return found


@pytest.mark.processes
def test_a_pool_holds_what_is_reserved_and_no_more() -> None:
    """One connection more is that by which process groups meet."""
    (found,) = run_processes(lent, 1)
    assert found == {
        "reserved": 3,
        "lent": 3,
        "more than reserved": 4,
        "keys": "third",
        "given back, not reserved": 3,
        "given back": 3,
        "same client": True,
        "usual timeout": True,
        "over a spare client": "fifth",
        "that was open": True,
        "ended": 0,
    }


def outlive_the_group(_rank: int) -> tuple[bool, bool]:
    """Return whether a client of another store is lent, while the job's group is there and after its end."""
    import torch.distributed as dist

    from adaptra.runtime.control_store.spare_clients import Reservation, take

    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    reserved = Reservation(1)
    lent = [take(dist.HashStore()) is not None]
    dist.destroy_process_group()
    lent.append(take(dist.HashStore()) is not None)
    reserved.end()
    return lent[0], lent[1]


@pytest.mark.processes
def test_a_pool_that_outlives_its_jobs_group_lends_nothing_to_others() -> None:
    assert run_processes(outlive_the_group, 1) == [(False, False)]
