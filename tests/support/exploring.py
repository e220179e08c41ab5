"""All states that events lead to, for model checkers. From every one an end must stay possible without another fault."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from functools import partial
from typing import TypeVar

State = TypeVar("State")
Trace = Callable[[], str]
"""Returns the events that lead to a state."""


class ViolationError(Exception):
    """A property does not hold; the message has the events that lead there."""


def explore(
    initial: State,
    key: Callable[[State], Hashable],
    successors: Callable[[State, Trace], Iterable[tuple[str, bool, State]]],
    is_end: Callable[[State, Trace], bool],
) -> int:
    """Visit every reachable state and return how many there are.

    Args:
        initial: The first state.
        key: Equal for equal states.
        successors: The states after one event: its name, whether it is a fault, and the state.
        is_end: Whether a state is an end; nothing needs to follow it.

    Raises:
        ViolationError: A state is no end and nothing follows, or no end can be reached from it without a fault.
    """
    states = [initial]
    numbers = {key(initial): 0}
    origins: list[tuple[int, str]] = [(0, "start")]
    predecessors: list[list[int]] = [[]]
    ends: list[int] = []
    for number, state in enumerate(states):
        path = partial(_trace, origins, number)
        may_stop = is_end(state, path)
        if may_stop:
            ends.append(number)
        goes_on = False
        for name, is_fault, successor in successors(state, path):
            goes_on |= not is_fault
            number_after = numbers.setdefault(key(successor), len(states))
            if number_after == len(states):
                states.append(successor)
                origins.append((number, name))
                predecessors.append([])
            if not is_fault:
                predecessors[number_after].append(number)
        if not goes_on and not may_stop:
            raise ViolationError(f"deadlock after {path()}")
    can_end = set(ends)
    while ends:
        for number in predecessors[ends.pop()]:
            if number not in can_end:
                can_end.add(number)
                ends.append(number)
    if len(can_end) < len(states):
        stuck = next(number for number in range(len(states)) if number not in can_end)
        raise ViolationError(f"no end can be reached after {_trace(origins, stuck)}")
    return len(states)


def _trace(origins: list[tuple[int, str]], number: int) -> str:
    names: list[str] = []
    while number:
        number, name = origins[number]
        names.append(name)
    return ", ".join(reversed(names)) or "start"
