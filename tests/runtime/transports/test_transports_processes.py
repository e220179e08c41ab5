"""Transports and failures between real processes."""

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
import transport_bodies as bodies
from processes import run_processes
from transport_bodies import SMALL, backward, forward, make

from adaptra.errors import LaunchError, PeerLostError
from adaptra.runtime.control_store.stores import own_address
from adaptra.runtime.injection.faults import Fault
from adaptra.runtime.injection.faulty_transport import FaultyTransport
from adaptra.runtime.membership.membership import Membership
from adaptra.runtime.transports.base import Identity, Transport
from adaptra.runtime.transports.c10d.c10d import C10dTransport
from adaptra.runtime.transports.process_groups import Members
from adaptra.runtime.transports.registry import create_transport

Lost = tuple[str, int | None, tuple[int, int] | None, str | None, float]
"""A lost rank's error: its text, rank, edge and op, and the seconds until it came."""

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module", params=["c10d", "delegate"])
def matrix(request: pytest.FixtureRequest) -> list[dict[str, str]]:
    return run_processes(bodies.run_matrix, 3, request.param)


@pytest.mark.parametrize("body", bodies.MATRIX, ids=lambda body: body.__name__)
def test_matrix(matrix: list[dict[str, str]], body: Callable[[Transport], None]) -> None:
    assert not [failures[body.__name__] for failures in matrix if body.__name__ in failures]


def join_half(rank: int) -> None:
    dist.init_process_group("gloo")
    transport = C10dTransport(Members(f"half {rank % 2}", rank // 2, 2))
    assert (transport.rank, transport.world_size) == (rank // 2, 2)
    bodies.many_in_flight_both_ways(transport)
    # A thread serves a channel from its first message on.
    named = [thread.name for thread in threading.enumerate() if thread.name.startswith("adaptra rank")]
    assert len(named) == 2 and not any("bulk" in name for name in named)
    # Each half has a control plane of its own.
    transport.store.set("parity", str(rank % 2))
    assert int(transport.store.get("parity")) == rank % 2
    dist.barrier()  # the store ends with rank 0
    transport.close()


def test_c10d_joins_a_sub_group_only() -> None:
    run_processes(join_half, 4)


def join_without_group(rank: int) -> bool:
    transport = C10dTransport()
    assert all(0 <= abs(offset.ahead) <= offset.uncertainty + 1e-3 < 5 for offset in transport.clock_offsets)
    bodies.carries_every_dtype(transport)
    transport.close()
    return dist.is_initialized()


def test_c10d_sets_up_and_takes_down_a_default_group_of_its_own() -> None:
    """Processes of one host share a clock, so the offset measured is smaller than its stated uncertainty."""
    assert run_processes(join_without_group, 2) == [False, False]


def test_c10d_without_a_launcher_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(LaunchError, match=r"no process group and no launcher such as torchrun: .*RANK"):
        C10dTransport()


def measure_delay(rank: int) -> list[Any]:
    transport = FaultyTransport(C10dTransport(), (Fault.parse("delay 0>1 2s @1"),))
    found = []
    if rank == 0:
        for step in range(2):
            started = time.monotonic()
            sends = [transport.send(1, forward(k, step=step), make(forward(k))) for k in range(4)]
            found.append(time.monotonic() - started)
            for pending in sends:
                pending.wait(100)
            transport.store.wait([f"received {step}"])
    else:
        transport.reserve({(0, SMALL): 4})
        for step in range(2):
            receives = [transport.receive(0, forward(k, step=step)) for k in range(4)]
            for k, pending in enumerate(receives):
                assert bodies.same(pending.wait(100), make(forward(k)))
                transport.release(pending)
            found.append([pending.arrived_at - pending.sent_at for pending in receives])
            transport.store.set(f"received {step}", "")
    transport.close()
    return found


def test_an_injected_delay_is_measured_by_the_receiver_over_gloo() -> None:
    posting, (healthy, slow) = run_processes(measure_delay, 2)
    assert all(latency < 1.9 for latency in healthy)
    assert all(latency >= 1.9 for latency in slow)
    # The four are under way at the same time, not for eight seconds, and the sender is not held up.
    assert max(slow) < 7
    assert max(posting) < 1.9


class Rank:
    """A rank that waits for a message, as an executor does, with the membership beside it."""

    def __init__(self, lost_after: float = 6.0, name: str = "c10d") -> None:
        self.on_lost = lambda: None
        self.transport = create_transport(name)
        self.membership = Membership(
            self.transport.store,
            self.transport.rank,
            self.transport.world_size,
            self.lose,
            waiting_for=self.transport.waiting_for,
            lost_after=lost_after,
            address=own_address(self.transport.store),
        )

    def lose(self, error: Exception) -> None:
        self.transport.abort(error)
        self.on_lost()

    def await_keys(self, *keys: str) -> None:
        """Wait until the store has keys. Its own wait would hold the client, so that no heartbeat could announce this rank."""
        deadline = time.monotonic() + 100
        while not self.transport.store.check(list(keys)):
            assert time.monotonic() < deadline, f"waited in vain for {keys}"
            time.sleep(0.02)

    def has_reached(self, rank: int) -> bool:
        """Whether a direct question of this rank has got through to another one."""
        membership = self.membership
        assert membership._questions is not None
        with membership._condition:
            return membership._questions.sign(rank).is_reachable

    def wait_in_vain(self, source: int, identity: Identity) -> Lost:
        """The error that ends the wait, and how long that took."""
        started = time.monotonic()
        self.transport.reserve({(source, SMALL): 1})
        with pytest.raises(RuntimeError) as caught:
            self.transport.receive(source, identity).wait(100)
        error = self.membership.fail(caught.value)
        assert isinstance(error, PeerLostError), error
        took = time.monotonic() - started
        self.membership.close()
        self.transport.close()
        return str(error), error.rank, error.edge, error.op, took


def lose_rank_2(rank: int, how: str, name: str = "c10d") -> Lost | None:
    """A pipeline of four; rank 2 dies while the others wait for what would come from it, directly or not."""
    mine = Rank(name=name)
    if rank == 2:
        # All wait now, or will in a moment: either way they must learn of it.
        mine.await_keys("waiting 0", "waiting 1", "waiting 3")
        match how:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "raise":
                mine.membership.fail(ZeroDivisionError("division by zero in the user's model"), edge=(1, 2), op="2F5")
                mine.membership.close()
                mine.transport.close()
                return None
            case _:
                raise AssertionError(how)
    if rank == 0:  # until then silence may be that of a firewall
        deadline = time.monotonic() + 60
        while not mine.has_reached(2):
            assert time.monotonic() < deadline, "no question reaches rank 2"
            time.sleep(0.02)
    mine.transport.store.set(f"waiting {rank}", "")
    source = 2 if rank == 3 else rank + 1
    return mine.wait_in_vain(source, forward(5, 2, 3) if rank == 3 else backward(5, source, rank))


@pytest.mark.parametrize("name", ["c10d", "delegate"])
@pytest.mark.parametrize("how", ["kill", "stop"])
def test_a_killed_or_stopped_rank_ends_the_others_with_its_name_and_edge(how: str, name: str) -> None:
    outcomes = run_processes(lose_rank_2, 4, how, name, may_die=(2,))
    for rank in (0, 1, 3):
        message, lost, edge, op, took = outcomes[rank]
        assert lost == 2, message
        assert "rank 2" in message
        if how == "stop":
            assert "does not answer, so it is frozen or cut off" in message, "it waited for the limit of unknown processes"
        assert took < 90, "it waited for the message's own limit"
        # Neighbours name the edge at which they wait; the others the edge at which a neighbour noticed.
        assert edge in {(2, 1), (2, 3), (1, 0)}, message
        assert op in {"2SEND_B5", "2SEND_F5", "1SEND_B5"}, message


def test_an_exception_on_one_rank_reaches_all_others() -> None:
    outcomes = run_processes(lose_rank_2, 4, "raise")
    for rank in (0, 1, 3):
        message, lost, edge, op, took = outcomes[rank]
        assert message == "rank 2 failed at 2F5 on edge 1→2: ZeroDivisionError: division by zero in the user's model"
        assert (lost, edge, op) == (2, (1, 2), "2F5")
        assert took < 90, "it waited for the message's own limit"


def lose_the_store(rank: int, how: str) -> Lost:
    """Rank 0, host of the store, ends while ranks 1 and 2 wait for each other and not for rank 0."""
    mine = Rank()
    if rank == 0:
        mine.await_keys("waiting 1", "waiting 2")
        os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)
    mine.transport.store.set(f"waiting {rank}", "")
    return mine.wait_in_vain(3 - rank, backward(0, 2, 1) if rank == 1 else forward(0, 1, 2))


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_a_lost_store_is_named(how: str) -> None:
    outcomes = run_processes(lose_the_store, 3, how, may_die=(0,))
    for rank in (1, 2):
        message, lost, edge, _, took = outcomes[rank]
        assert "control store is lost" in message or lost in {0, 1, 2}
        assert edge in {(1, 2), (2, 1)}
        assert took < 90, "it waited for the message's own limit"
    assert any("control store is lost" in outcomes[rank][0] for rank in (1, 2))


def leave(rank: int) -> str | None:
    """The rank that hosts the store leaves first and its process ends; the others stay for a while."""
    mine, told = Rank(lost_after=1.5), threading.Event()
    mine.on_lost = told.set
    if rank > 0:
        mine.await_keys("left")
        # Longer than a loss takes to be noticed, if it were one.
        assert not told.wait(2.5)
    else:
        mine.transport.store.set("left", "")
    mine.membership.close()
    lost = mine.membership.lost
    mine.transport.close()
    return None if lost is None else str(lost)


def test_leaving_is_no_loss() -> None:
    assert run_processes(leave, 3, store_stays=False) == [None, None, None]
