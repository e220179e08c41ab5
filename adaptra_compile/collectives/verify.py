"""The proof that a schedule makes the sum: each term counted once, in the order of ranks, through one port each way."""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from itertools import groupby

from adaptra.collectives.rounds import TermMessage
from adaptra.collectives.schedule import SumSchedule, token_of
from adaptra.errors import ScheduleError

_Spans = set[tuple[int, int]]
_Held = dict[tuple[int, int], _Spans]


def verify_sum(schedule: SumSchedule) -> None:
    """Check that a schedule gives every rank the whole sum of each part, and that no port is used twice in a round.

    A rank begins with its own terms. It extends a fold by the next rank's term, and in no other way. Where additions may have
    any order, it adds sums of neighbouring ranks. What arrives in a round can be sent in the next one. Nothing is sent to a
    rank that has it. A late rank owns nothing: it receives only what has the terms of all ranks but one.

    Raises:
        ScheduleError: Names the message that is not possible, or the part that a rank lacks.
    """
    held: _Held = defaultdict(set)
    for rank in range(schedule.ranks):
        for part in range(schedule.parts):
            held[rank, part].add((rank, rank + 1))
    for moment, together in groupby(schedule.messages, lambda message: message.round):
        messages = [*together]
        _require_ports(schedule, moment, messages)
        for message in messages:
            _require_possible(schedule, message, held)
        for message in messages:
            _receive(schedule, message, held[message.destination, message.value.part])
    for rank in range(schedule.ranks):
        for part in range(schedule.parts):
            spans = held[rank, part]
            whole = _can_fold(spans, 0, schedule.ranks) if schedule.is_fold else _longest(spans) == schedule.ranks
            if not whole:
                raise ScheduleError(f"rank {rank}: expected the whole sum of part {part} in the end")


def _error(schedule: SumSchedule, message: TermMessage, expected: str) -> ScheduleError:
    return ScheduleError(f"round {message.round}: {token_of(message, schedule.ranks)}: expected {expected}")


def _require_possible(schedule: SumSchedule, message: TermMessage, held: _Held) -> None:
    part, first, end = message.value
    has = _can_fold if schedule.is_fold else partial(_has, ranks=schedule.ranks)
    if not has(held[message.source, part], first=first, end=end):
        raise _error(schedule, message, "a value that its source can have by then")
    if has(held[message.destination, part], first=first, end=end):
        raise _error(schedule, message, "a value that its destination does not have")
    if message.destination in schedule.late and end - first < schedule.ranks - 1:
        raise _error(schedule, message, "no such value for a late rank, which owns nothing")


def _require_ports(schedule: SumSchedule, moment: int, messages: list[TermMessage]) -> None:
    for ports in ({one.source: one for one in messages}, {one.destination: one for one in messages}):
        if len(ports) < len(messages):
            twice = next(one for one in messages if one not in ports.values())
            other = next(one for one in ports.values() if one.source == twice.source or one.destination == twice.destination)
            raise ScheduleError(
                f"round {moment}: {token_of(twice, schedule.ranks)} and {token_of(other, schedule.ranks)}: "
                "expected each rank to send and to receive at most one message"
            )


def _can_fold(spans: _Spans, first: int, end: int) -> bool:
    """Return True if a rank has a value or can make it: by the next rank's term, added to a fold that it can make."""
    begin = end
    while (first, begin) not in spans:
        if first != 0 or begin == 1 or (begin - 1, begin) not in spans:
            return False
        begin -= 1
    spans.add((first, end))
    return True


def _has(spans: _Spans, ranks: int, first: int, end: int) -> bool:
    return (first, end) in spans or end - first == ranks == _longest(spans)


def _longest(spans: _Spans) -> int:
    return max(end - first for first, end in spans)


def _receive(schedule: SumSchedule, message: TermMessage, spans: _Spans) -> None:
    """Record a value that has arrived. In any order it is added at once to the longest sum of the ranks beside."""
    _, first, end = message.value
    ranks, arrived, longest = schedule.ranks, (first, end), _longest(spans)
    if not schedule.is_fold and longest < ranks and end - first < ranks:
        own = max(spans, key=lambda span: span[1] - span[0])
        if own[1] % ranks == first % ranks:
            arrived = (own[0], own[1] + end - first)
        elif end % ranks == own[0] % ranks:
            arrived = (first, end + longest)
        else:
            raise _error(schedule, message, "the sum of ranks beside those that its destination has")
        if longest + end - first > ranks:
            raise _error(schedule, message, "each term once in a sum")
    spans.add(arrived)
