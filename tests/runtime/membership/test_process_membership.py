"""What the workers of one process have of its membership in common."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import run_processes
from training import MIXED
from transport_bodies import backward

import adaptra
from adaptra.errors import PeerLostError, TransportError
from adaptra.runtime.membership.membership import Membership
from adaptra.runtime.membership.process_membership import Listener, ProcessMembership
from adaptra.runtime.world.world import WorkerId


def joined(store: dist.Store, rank: int, ranks: int) -> ProcessMembership:
    return ProcessMembership(
        lambda told, awaited: Membership(store, rank, ranks, told, waiting_for=awaited, interval=0.05, lost_after=0.3)
    )


def test_workers_of_one_process_end_with_the_first_that_fails() -> None:
    membership, told = ProcessMembership(), dict[int, list[PeerLostError]]({0: [], 1: [], 2: []})
    listeners = [Listener(told[worker].append, worker=WorkerId(worker)) for worker in range(3)]
    for listener in listeners:
        membership.add(listener)
    error = ZeroDivisionError("by zero")
    assert membership.fail(listeners[1], error) is error
    assert [str(one) for one in told[0]] == ["rank 1 failed: ZeroDivisionError: by zero"]
    assert [one.rank for one in told[2]] == [1] and not told[1]
    # Another's failure is then a consequence, whatever it is.
    followed = membership.fail(listeners[2], PeerLostError("no message", rank=1, edge=(1, 2), op="1SEND_F0"))
    assert str(followed) == "rank 1 failed: ZeroDivisionError: by zero, noticed at 1SEND_F0 on edge 1→2"
    assert membership.fail(listeners[1], error) is error
    assert len(told[0]) == len(told[2]) == 1 and not told[1]
    assert membership.lost is None and not membership.has_lost_a_process and not membership.has_lost_the_store
    membership.close()


def test_all_workers_hear_of_another_processs_failure_and_later_ones_at_once() -> None:
    store = dist.HashStore()
    here, there = joined(store, 0, 2), joined(store, 1, 2)
    heard, told = threading.Barrier(3), list[PeerLostError]()

    def end(lost: PeerLostError) -> None:
        told.append(lost)
        heard.wait(100)

    listeners = [
        Listener(lambda lost: threading.Thread(target=end, args=(lost,)).start(), worker=WorkerId(one)) for one in range(2)
    ]
    gone = Listener(told.append)
    for listener in (*listeners, gone):
        here.add(listener)
    here.remove(gone)
    cause = Listener(print, worker=WorkerId(2))
    there.add(cause)
    error = MemoryError("no memory")
    assert there.fail(cause, error) is error
    heard.wait(100)
    assert [str(one) for one in told] == ["rank 1 failed: MemoryError: no memory"] * 2
    assert here.lost is told[0]
    here.add(gone)
    assert told[2:] == [told[0]]
    assert here.fail(listeners[0], TransportError("connection closed")) is told[0]
    closing = threading.Thread(target=there.close)
    closing.start()
    here.close()
    closing.join()


def test_a_silent_process_is_named_with_the_message_that_any_worker_waits_for() -> None:
    told, heard = list[PeerLostError](), threading.Event()
    membership = joined(dist.HashStore(), 0, 2)
    membership.add(Listener(lambda lost: (told.append(lost), heard.set())))
    membership.add(Listener(print, lambda process: backward(4) if process == 1 else None, WorkerId(1)))
    assert heard.wait(100)
    assert (told[0].rank, told[0].edge, told[0].op) == (1, (1, 0), "1SEND_B4")
    assert membership.has_lost_a_process
    membership.close()


def changing(rank: int, fails: bool) -> tuple[int, int, list[str] | str]:
    """The membership threads of a process after each change, and what it raises if another one fails then."""
    dist.init_process_group("gloo")
    (inputs,), _, targets = MIXED.rows(12, seed=0)
    made: dict[str, Any] = {
        "model": MIXED.make(),
        "microbatches": 4,
        "loss": MIXED.loss,
        "example_inputs": ((inputs,), targets),
    }

    def threads() -> set[str]:
        return {f"{one.name} {one.ident}" for one in threading.enumerate() if "membership" in one.name}

    with adaptra.compile(**made, stages=1) as pipe:
        before = threads()
        optimizer = torch.optim.SGD(pipe.parameters())
        pipe.step(inputs, targets)
        assert pipe.roles is not None
        pipe.take_roles(pipe.roles.swapped(0, 1), optimizer)
        pipe.step(inputs, targets)
        pipe.take_roles(pipe.roles.swapped(0, 1), optimizer)
        pipe.take_roles(pipe.roles.swapped(0, 1), optimizer)
        pipe.step(inputs, targets)
        assert threads() == before
        made["model"] = MIXED.make()
        with adaptra.compile(**made, stages=2) as other:
            other.step(inputs, targets)
            both = len(threads())
        said: list[str] | str = []
        if fails:
            try:
                pipe.step(inputs[:, :1] if rank == 1 else inputs, targets)
            except Exception as error:
                said = f"{type(error).__name__}: {error}"
    return len(before), both, said


@pytest.mark.processes
@pytest.mark.parametrize("fails", [False, True])
def test_a_process_has_one_membership_for_all_its_changes_of_roles(fails: bool) -> None:
    found = run_processes(changing, 2, fails)
    assert [one[:2] for one in found] == [(2, 4)] * 2
    if fails:
        assert str(found[0][2]).startswith("PeerLostError: rank 1 failed: ")
