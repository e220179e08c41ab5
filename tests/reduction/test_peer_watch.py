"""The watch over the ranks of a sum: what it makes of a store that rests, and of other threads."""

from __future__ import annotations

import sys
import threading
from types import FrameType
from typing import Any

import pytest
from patience import HUNG
from processes import run_processes

pytestmark = pytest.mark.processes


class Resting:
    """A store that answers nothing until it is let go on."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.goes_on = threading.Event()

    def __getattr__(self, name: str) -> Any:
        def wait(*args: Any) -> Any:
            assert self.goes_on.wait(HUNG)
            return getattr(self._store, name)(*args)

        return wait


def watches(name: str) -> tuple[Any, Any, threading.Event]:
    """The watches of two members, and what is set once one of them ends waits."""
    from adaptra.reduction.peer_watch import PeerWatch
    from adaptra.runtime.transports.process_groups import Members

    ended = threading.Event()
    made: dict[int, Any] = {}

    def make(member: int) -> None:
        made[member] = PeerWatch(Members(name, member, 2), [0, 1], ended.set, lambda: None)

    threads = [threading.Thread(target=make, args=(member,)) for member in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return made[0], made[1], ended


def rest(_: int) -> list[str]:
    """The errors of two members that do different things, once a store has rested while one of them said what it does."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    first, second, ended = watches("rest")
    asked = first._store
    store, asked._store = asked._store, Resting(asked._store)
    resting = asked._store
    first.begin(1, "A")
    while asked.ask(lambda _: True):  # until another question has no answer
        threading.Event().wait(0.01)
    second.begin(1, "B")
    resting.goes_on.set()
    asked._store = store
    assert ended.wait(HUNG), "nobody has found out"
    return [str(one.error) for one in (first, second) if one.error is not None]


def test_a_store_that_rests_ends_no_comparison() -> None:
    errors = run_processes(rest, 1)[0]
    both = ["rank 0 does: A; rank 1: B", "rank 1 does: B; rank 0: A"]
    assert errors and {*errors} <= {f"{each}: expected the same on all ranks of the group" for each in both}


def switch(_: int) -> tuple[int, list[str]]:
    """At how many instructions of a comparison the next meeting began, and the errors of that."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    first, second, _ended = watches("switch")
    second.begin(2, "B")
    second._compare()
    comparison: Any = type(first)._compare
    left = switches = 0

    def at_instruction(_frame: FrameType, event: str, _arg: Any) -> Any:
        nonlocal left
        left -= event == "opcode"
        if left == 0:
            first.begin(2, "B")
        return at_instruction

    def at_call(frame: FrameType, _event: str, _arg: Any) -> Any:
        if frame.f_code is not comparison.__code__:
            return None
        frame.f_trace_opcodes = True
        return at_instruction

    while left <= 0 and first.error is None:
        switches += 1
        left = switches
        first.begin(1, "A")
        sys.settrace(at_call)
        first._compare()
        sys.settrace(None)
    return switches, [str(one.error) for one in (first, second) if one.error is not None]


def test_a_comparison_is_of_one_meeting_wherever_the_next_begins() -> None:
    switches, errors = run_processes(switch, 1)[0]
    assert switches > 10
    assert not errors
