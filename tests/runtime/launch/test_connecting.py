"""A rank that dies or stops while the ranks connect is named to the others, whatever these wait for in C++."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from errors_table import check_documented
from processes import run_processes
from training import MIXED

import adaptra

Raised = tuple[str, str, float]
"""An error's class and text, and when it came."""

ROWS, MICROBATCHES, LOST = 12, 4, 1
TIMEOUT = 120.0
FAILED = "rank … failed: …"


def ended_by(how: str, rank: int, note: Path) -> Callable[..., None] | None:
    """What this process does where a test has it end, once it has noted when; others go on."""

    def end(*_arguments: object, **_options: object) -> None:
        note.write_text(str(time.monotonic()))
        if how == "raise":
            raise ValueError("a network card that is not there")
        os.kill(os.getpid(), signal.SIGSTOP if how == "stop" else signal.SIGKILL)

    return end if rank == LOST else None


def raised(act: Callable[[], object]) -> Raised | None:
    """The error's class and text, and when it came."""
    try:
        act()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic()
    return None


def compiled(stages: int, **options: Any) -> adaptra.Pipeline:
    inputs, _, targets = MIXED.rows(ROWS, seed=0)
    return adaptra.compile(
        MIXED.make(), stages=stages, microbatches=MICROBATCHES, example_inputs=(inputs, targets), loss=MIXED.loss,
        split=["middle.1", "middle.4"][: stages - 1], options=adaptra.Options(timeout=TIMEOUT, **options),
    )  # fmt: skip


def join(rank: int, how: str, where: str, note: Path) -> Raised | None:
    """What a rank raises when another one ends right before it makes its groups, or tells where it listens."""
    import torch.distributed as dist

    from adaptra.runtime.transports import process_groups as groups
    from adaptra.runtime.transports.c10d import communicators
    from adaptra.runtime.transports.delegate import engine as delegate_engine

    # The store is a rank's that lives.
    dist.init_process_group("gloo")
    end = ended_by(how, rank, note)
    if end is not None and where == "groups":
        communicators.make_groups = end
    elif end is not None and where == "group of replicas":
        groups._backend = end
    elif end is not None:
        delegate_engine.share_endpoints = end
    with_delegate = {"delegate": True, "addresses": ["127.0.0.1"]} if where == "endpoints" else {}
    stages = 2 if where == "group of replicas" else dist.get_world_size()
    return raised(lambda: compiled(stages, **with_delegate))


def change(rank: int, how: str, note: Path) -> Raised | None:
    """What a rank raises when another one ends while new groups are made for a cut that moves."""
    import torch
    import torch.distributed as dist

    from adaptra.runtime.transports.c10d import communicators

    dist.init_process_group("gloo")
    inputs, _, targets = MIXED.rows(ROWS, seed=0)
    with compiled(3) as pipe:
        pipe.step(inputs[0], targets)
        end = ended_by(how, rank, note)
        if end is not None:
            communicators.make_groups = end
        return raised(lambda: pipe.take_split(["middle.3", "middle.5"], torch.optim.SGD(pipe.parameters())))


def check_named(results: Sequence[Raised | None], note: Path) -> list[Raised]:
    """Make sure that the others name the lost rank, and don't wait for their own limit; what they say."""
    ended_at = float(note.read_text())
    others = [one for rank, one in enumerate(results) if rank != LOST and one is not None]
    assert len(others) == len(results) - 1
    for one in others:
        kind, message, at = one
        assert kind == "PeerLostError" and f"rank {LOST} " in message, message
        assert at - ended_at < 0.75 * TIMEOUT, (message, at - ended_at)
    return others


def test_a_client_that_is_opened_only_after_a_loss_is_ended_too() -> None:
    """A thread that waits on it would wait as long as the store has its time, also when the process ends."""
    from torch.distributed import TCPStore

    from adaptra.errors import PeerLostError
    from adaptra.runtime.control_store.stores import clone
    from adaptra.runtime.launch.connecting import connect
    from adaptra.runtime.membership.process_membership import ProcessMembership

    store: Any = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def wait_late() -> object:
        time.sleep(0.3)
        return clone(store).get("a key that nobody sets")

    membership = ProcessMembership()
    membership.lose(PeerLostError("rank 1 is lost", rank=1))
    with pytest.raises(PeerLostError, match="rank 1 is lost"):
        connect(membership, 0, wait_late)
    for thread in [one for one in threading.enumerate() if one.name == "adaptra rank 0 connects"]:
        thread.join(5.0)
        assert not thread.is_alive()


def test_an_error_of_torch_may_come_of_a_loss_that_is_found_later() -> None:
    """Where calls survive the launcher tells losses, often after the broken connection."""
    from adaptra.errors import TransportError
    from adaptra.runtime.launch.connecting import connect
    from adaptra.runtime.membership.process_membership import ProcessMembership

    def refuse() -> None:
        raise RuntimeError("Connection refused")

    with pytest.raises(TransportError, match="rank 2: can't connect to the other ranks: Connection refused"):
        connect(ProcessMembership(), 2, refuse)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("how", "where", "count"),
    [("kill", "groups", 3), ("stop", "groups", 2), ("kill", "group of replicas", 4), ("kill", "endpoints", 3)],
)
def test_a_rank_that_ends_while_ranks_connect_is_named(how: str, where: str, count: int, tmp_path: Path) -> None:
    note = tmp_path / "ended at"
    check_named(run_processes(join, count, how, where, note, may_die=(LOST,)), note)


@pytest.mark.processes
def test_a_rank_that_ends_while_a_cut_makes_new_groups_is_named(tmp_path: Path) -> None:
    note = tmp_path / "ended at"
    check_named(run_processes(change, 3, "kill", note, may_die=(LOST,)), note)


@pytest.mark.processes
def test_why_a_rank_could_not_connect_is_told_to_the_others_at_once(tmp_path: Path) -> None:
    note = tmp_path / "ended at"
    results = run_processes(join, 3, "raise", "groups", note)
    for kind, message, _ in check_named(results, note):
        check_documented(kind, message, FAILED)
        assert message.endswith("ValueError: a network card that is not there")
    assert results[LOST][:2] == ("ValueError", "a network card that is not there")
