"""What joins the workers of one world after the other: made of any of the job's processes, and ended with the world."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from open_files import more_open, open_files
from processes import run_processes
from transport_bodies import SMALL, forward, make

from adaptra.errors import LaunchError
from adaptra.runtime.control_store import spare_clients
from adaptra.runtime.launch.carriers import DelegateSetup
from adaptra.runtime.launch.job import Launch
from adaptra.runtime.launch.launch import launch
from adaptra.runtime.transports.base import Transport
from adaptra.runtime.world.world import Attempt, ProcessId, World

pytestmark = pytest.mark.processes

RANKS, ABSENT, EPOCHS = 3, 1, 9
TIMEOUT = 60.0


def exchange(transport: Transport) -> None:
    """Send a message to the other worker, and receive its own."""
    other = 1 - transport.rank
    transport.reserve({(other, SMALL): 1})
    identity = forward(0, source=transport.rank, destination=other)
    sent = transport.send(other, identity, make(identity))
    pending = transport.receive(other, forward(0, source=other, destination=transport.rank))
    for got, expected in zip(pending.wait(TIMEOUT), make(pending.identity), strict=True):
        assert torch.equal(got, expected)
    sent.wait(TIMEOUT)
    transport.release(pending)


def enter(rank: int, with_delegate: bool) -> tuple[int, int] | None:
    """How many more files are open after the last of some epochs than after the first, and the clients opened meanwhile."""
    dist.init_process_group("gloo")
    delegate = DelegateSetup(is_beside=True, addresses=["127.0.0.1"]) if with_delegate else DelegateSetup()
    launched: Launch = launch(RANKS, "c10d", {}, TIMEOUT, delegate=delegate)
    job = launched.job
    launched.meet(TIMEOUT)
    everyone = launched.everyone
    assert (everyone.rank(), everyone.size()) == (rank, RANKS)
    opened: list[object] = []
    opens = spare_clients.cloned
    spare_clients.cloned = lambda client: opened.append(client) or opens(client)
    before = more = 0
    if rank != ABSENT:
        for epoch in range(1, EPOCHS):
            hosts = (ProcessId(0), ProcessId(2))
            world = World(epoch, 2, hosts if epoch % 2 else hosts[::-1], (0, 0))
            after = launched.enter(world)
            for transport in launched.transports:
                transport.close()
            launched.end()
            launched = after
            (transport,) = launched.transports
            assert (transport.rank, transport.world_size) == (world.hosts.index(ProcessId(rank)), 2)
            assert transport.attempt == Attempt(epoch)
            exchange(transport)
            before = before or open_files()
        more = more_open(before, EPOCHS // 2)
    registered = list(dist.distributed_c10d._world.pg_names.values())
    assert len(registered) == 1, registered
    dist.barrier()
    for transport in launched.transports:
        transport.close()
    launched.end()
    job.close()
    launched.membership.close()
    return None if rank == ABSENT else (more, len(opened))


def meet_again(rank: int) -> list[list[str]]:
    """What this rank reads in a later attempt, and in the next epoch, after it alone has met once more in the first attempt."""
    dist.init_process_group("gloo")
    launched = launch(2, "c10d", {}, TIMEOUT)
    found = [launched.meet(TIMEOUT, text=f"first of {rank}")]
    if rank == 0:
        with pytest.raises(LaunchError, match="rank 1 did not answer"):
            launched.meet(0.5, text="alone")
    dist.barrier()
    launched.transports[0].begin(Attempt(0, 1))
    found.append(launched.meet(TIMEOUT, text=f"again of {rank}"))
    after = launched.enter(launched.world.followed_by())
    assert after.job.run == launched.job.run
    found.append(launched.tell("run", after.job.run, TIMEOUT))
    found.append(after.meet(TIMEOUT, text=f"next of {rank}"))
    dist.barrier()
    for transport in (*launched.transports, *after.transports):
        transport.close()
    after.membership.close()
    return found


def test_ranks_meet_in_each_attempt_anew() -> None:
    expected = [[f"{when} of {rank}" for rank in range(2)] for when in ("first", "again", "next")]
    found = run_processes(meet_again, 2)
    runs = [name for told in found for name in told.pop(2)]
    assert len(runs) == 4 and len(set(runs)) == 1 and found == [expected] * 2


@pytest.mark.parametrize("with_delegate", [False, True])
def test_a_world_is_joined_by_its_own_processes_and_ends_as_a_whole(with_delegate: bool) -> None:
    results = run_processes(enter, RANKS, with_delegate)
    assert results[ABSENT] is None
    for rank in (0, 2):
        more, opened = results[rank]
        assert more <= EPOCHS // 2 and opened == 0, results[rank]
