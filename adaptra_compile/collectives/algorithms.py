"""All algorithms as schedules, by their names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from adaptra.collectives.merge import merge, swap
from adaptra.collectives.references import doubling, ring
from adaptra.collectives.rounds import ALGORITHMS, TermMessage
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
    """Return the schedule of an algorithm.

    Args:
        name: A name in :data:`.rounds.ALGORITHMS`, :data:`LATE` or :data:`REFERENCES`.
        ranks: The number N of ranks.
        parts: The number of parts.
        late: The ranks that own nothing.

    Raises:
        ScheduleError: There is no such algorithm, or none for these ranks.
    """
    empty = SumSchedule(name, ranks, parts, late, (), name not in REFERENCES)
    if name in LATE:
        if not late:
            raise ScheduleError(f"{name}: expected at least one late rank")
        if name != "streamed" and len(late) > 1:
            raise ScheduleError(f"{name}: late ranks {','.join(map(str, late))}: expected one")
        if name == "swap" and late != (ranks - 1,):
            raise ScheduleError(
                f"{name}: late rank {','.join(map(str, late))}: expected {ranks - 1}, whose term is the last of the fold"
            )
        messages = LATE[name](ranks, parts, late)
    elif late:
        raise ScheduleError(f"{name}: late ranks {','.join(map(str, late))}: expected none, since every rank owns parts")
    elif name in REFERENCES:
        messages = REFERENCES[name](ranks, parts)
    elif name in ALGORITHMS:
        messages = ALGORITHMS[name](ranks, parts, None)
    else:
        raise ScheduleError(f"algorithm {name!r}: expected one of {', '.join([*ALGORITHMS, *LATE, *REFERENCES])}")
    return SumSchedule(name, ranks, parts, late, tuple(messages), empty.is_fold)
