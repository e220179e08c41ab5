"""Evidence of ends: a process that was killed or frozen is found, and one that is only busy is not."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import socket
import threading
import time
from dataclasses import replace
from datetime import timedelta

import pytest
from processes import run_processes
from torch.distributed import Store, TCPStore

from adaptra.runtime.control_store.spare_clients import Part
from adaptra.runtime.membership.announcement import announce, new_token, write_announcement
from adaptra.runtime.survival import evidence as evidence_module
from adaptra.runtime.survival.ends import Ends
from adaptra.runtime.survival.evidence import _FORGET_SECONDS, SILENT_SECONDS, Evidence

PATIENCE = 20.0
HERE = "127.0.0.1"
REFUSED = "has ended: its host refuses connections to it"
SILENT = re.compile(r"has not answered for \d s: it is frozen or cut off")
PROCESSES = 4
KILLED, FROZEN, BUSY = 1, 2, 3
BUSY_SECONDS = 5


def store_of_the_test() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=PATIENCE))


def part(store: Store) -> Store:
    return Part("evidence", store)


def until(evidence: Evidence, processes: list[int], count: int, pause: float = 0.02) -> dict[int, tuple[str, float]]:
    """What is said against so many of the processes, and after how many seconds, if asked with pauses."""
    began, found = time.monotonic(), dict[int, tuple[str, float]]()
    while len(found) < count:
        seconds = time.monotonic() - began
        assert seconds < PATIENCE, found
        for process, why in evidence.against(processes).items():
            found.setdefault(process, (why, seconds))
        time.sleep(pause)
    return found


def ends(rank: int, port: int) -> tuple[dict[int, tuple[str, float]], list[bool]] | None:
    """Process 0 asks for the others, one of which is killed, one stopped, and one busy without running Python.

    Once it awaits the stopped one alone, it hears of its return, and of no other's.
    """
    client = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    returned = threading.Event()
    evidence = Evidence(part(client), rank, range(PROCESSES), HERE, on_return=returned.set)
    if rank == FROZEN:
        client.set("frozen", str(os.getpid()))
    client.add("ready", 1)
    while client.add("ready", 0) < PROCESSES:
        time.sleep(0.01)
    time.sleep(0.5)  # until each has been asked once
    if rank == KILLED:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == FROZEN:
        os.kill(os.getpid(), signal.SIGSTOP)
    if rank == BUSY:
        ctypes.PyDLL(None).sleep(BUSY_SECONDS)  # holds the interpreter's lock
    if rank:
        client.wait(["done"])
        return None
    time.sleep(0.2)
    with evidence.awaiting():  # between answers of a store that are late
        found = until(evidence, [KILLED, FROZEN, BUSY], 2, pause=1.25 * _FORGET_SECONDS)
        assert FROZEN in evidence.against([KILLED, FROZEN])
        heard = [returned.wait(2 * _FORGET_SECONDS)]
        os.kill(int(client.get("frozen")), signal.SIGCONT)
        heard.append(returned.wait(PATIENCE))
    assert FROZEN not in evidence.against([KILLED, FROZEN])
    client.set("done", "")
    evidence.close()
    return found, heard


@pytest.mark.processes
def test_the_killed_and_the_frozen_are_found_and_the_busy_is_not() -> None:
    store = store_of_the_test()
    (found, heard), *_ = run_processes(ends, PROCESSES, store.port, may_die=(KILLED, FROZEN))
    assert found.keys() == {KILLED, FROZEN}
    assert found[KILLED][0] == REFUSED and SILENT.fullmatch(found[FROZEN][0])
    assert heard == [False, True]
    assert found[KILLED][1] < 2 and SILENT_SECONDS < found[FROZEN][1] < BUSY_SECONDS - 1


def write_nowhere(store: Store, process: int) -> None:
    """Announce a process that no question reaches, as behind a firewall."""
    with socket.socket() as bound:
        bound.bind((HERE, 0))
        nowhere = announce(HERE, bound.getsockname()[1], new_token())
    part(store).set(f"listener/{process}", write_announcement(replace(nowhere, place="another host")))


def asks_while_it_is_stopped(rank: int, port: int) -> dict[int, str] | None:
    """Process 1 answers, and process 2 can't be reached."""
    client = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    evidence_module.UNREACHED_SECONDS = 2 * SILENT_SECONDS  # pyright: ignore[reportConstantRedefinition]
    write_nowhere(client, 2)
    evidence = Evidence(part(client), rank, range(3), HERE)
    if rank:
        client.set("ready", "")
        asker = int(client.get("asker"))
        os.kill(asker, signal.SIGSTOP)
        time.sleep(2 * SILENT_SECONDS)
        os.kill(asker, signal.SIGCONT)
        client.wait(["done"])
        return None
    client.wait(["ready"])
    said, awake_at, was_stopped = evidence.against([1, 2]), time.monotonic(), False
    client.set("asker", str(os.getpid()))
    while not was_stopped:  # process 2 is rightly missing until a slow process 1 has stopped this one
        time.sleep(0.02)
        was_stopped, awake_at = time.monotonic() - awake_at > SILENT_SECONDS, time.monotonic()
        said = evidence.against([1, 2])
    while time.monotonic() - awake_at < SILENT_SECONDS:
        said |= evidence.against([1, 2])
        time.sleep(0.02)
    client.set("done", "")
    return said


@pytest.mark.processes
def test_who_was_stopped_itself_blames_nobody() -> None:
    store = store_of_the_test()
    said, _ = run_processes(asks_while_it_is_stopped, 2, store.port)
    assert said == {}


def both(store: Store, **named: object) -> tuple[Evidence, Evidence]:
    """Those of two processes."""
    made: list[Evidence] = []
    other = threading.Thread(target=lambda: made.append(Evidence(part(store.clone()), 1, range(2), HERE)))  # pyright: ignore[reportAttributeAccessIssue]
    other.start()
    own = Evidence(part(store), 0, range(2), HERE, **named)  # pyright: ignore[reportArgumentType]
    other.join(PATIENCE)
    return own, made[0]


def test_what_a_launcher_tells_is_certain_at_once() -> None:
    store, told = store_of_the_test(), threading.Event()
    own, other = both(store, on_end=lambda *_: told.set())
    outlived = threading.Event()
    launcher = Ends(store, lambda *_: None, lambda process: outlived.set() if process == 1 else None)
    assert own.against([0, 1]) == {}
    launcher.tell(1, "was ended by SIGKILL")
    assert told.wait(PATIENCE)
    assert own.against([0, 1]) == {1: "was ended by SIGKILL"} and own.against([0]) == {}
    own.outlived([1])
    assert outlived.wait(PATIENCE)
    for one in (own, other, launcher):
        one.close()


def test_silence_counts_from_when_others_are_awaited() -> None:
    """Whoever closes its listener refuses, like a process that has ended."""
    own, other = both(store_of_the_test())
    time.sleep(0.5)
    assert own.against([1]) == {}
    other.close()
    assert until(own, [1], 1)[1][0] == REFUSED
    own.close()


def test_a_process_that_was_never_reached_is_missing_after_a_longer_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A firewall may refuse all connections, so a refusal proves nothing here."""
    monkeypatch.setattr(evidence_module, "UNREACHED_SECONDS", 1.0)
    store = store_of_the_test()
    write_nowhere(store, 1)
    own = Evidence(part(store), 0, range(2), HERE)
    why, seconds = until(own, [1], 1)[1]
    assert why == "has been missing for 1 s, and its host can't be asked" and seconds > 1
    own.close()
