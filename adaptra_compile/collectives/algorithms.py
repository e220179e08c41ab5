"""All algorithms as schedules, by their names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from adaptra.collectives.merge import merge, swap
from adaptra.collectives.references import doubling, ring
from adaptra.collectives.rounds import ALGORITHMS, Algorithm, TermMessage
from adaptra.collectives.schedule import SumSchedule
from adaptra.collectives.streamed import streamed
from adaptra.errors import ScheduleError

REFERENCES: Final[Mapping[str, Callable[[int, int], Iterator[TermMessage]]]] = {"ring": ring, "doubling": doubling}
"""Algorithms that add in other orders."""

LATE: Final[Mapping[str, Callable[[int, int, Sequence[int]], Iterator[TermMessage]]]] = {
    "streamed": streamed,
    "merge": merge,
    "swap": swap,
}
"""Algorithms in which some ranks own nothing."""


def sum_schedule(name: str, ranks: int, parts: int, late: tuple[int, ...] = ()) -> SumSchedule:
    """Return the schedule of an algorithm; arguments are those of :func:`sum_messages`.

    Raises:
        ScheduleError: As :func:`sum_messages`, or the numbers don't fit together.
    """
    empty = SumSchedule(name, ranks, parts, late, (), name not in REFERENCES)
    return replace(empty, messages=tuple(sum_messages(name, ranks, parts, late)))


def algorithm_of(name: str, late: tuple[int, ...] = ()) -> Algorithm:
    """Return an algorithm as the engine takes it; arguments are those of :func:`sum_messages`."""
    # Not a closure: replicas that add in other ways name their algorithms with the late ranks, see `openings.name_of`.
    return ALGORITHMS[name] if name in ALGORITHMS and not late else partial(messages_with, name, late)


def messages_with(name: str, late: tuple[int, ...], ranks: int, parts: int, _rank: int | None) -> Iterator[TermMessage]:
    """Return the messages of an algorithm, for whichever rank; arguments are those of :func:`sum_messages`."""
    return sum_messages(name, ranks, parts, late)


def sum_messages(name: str, ranks: int, parts: int, late: tuple[int, ...] = ()) -> Iterator[TermMessage]:
    """Return the messages of an algorithm, by round.

    Args:
        name: A name in :data:`.rounds.ALGORITHMS`, :data:`LATE` or :data:`REFERENCES`.
        ranks: The number N of ranks.
        parts: The number of parts.
        late: The ranks that own nothing.

    Raises:
        ScheduleError: There is no such algorithm, or none for these ranks.
    """
    named = ",".join(map(str, late))
    if name in LATE:
        if not late:
            raise ScheduleError(f"{name}: expected at least one late rank")
        if name != "streamed" and len(late) > 1:
            raise ScheduleError(f"{name}: late ranks {named}: expected one")
        if name == "swap" and late != (ranks - 1,):
            raise ScheduleError(f"{name}: late rank {named}: expected {ranks - 1}, whose term is the last of the fold")
        return LATE[name](ranks, parts, late)
    if late:
        raise ScheduleError(f"{name}: late ranks {named}: expected none, since every rank owns parts")
    if name in REFERENCES:
        return REFERENCES[name](ranks, parts)
    if name in ALGORITHMS:
        return ALGORITHMS[name](ranks, parts, None)
    raise ScheduleError(f"algorithm {name!r}: expected one of {', '.join([*ALGORITHMS, *LATE, *REFERENCES])}")
