"""All algorithms as schedules, by their names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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


@dataclass(frozen=True, slots=True)
class AlgorithmWithout:
    """An algorithm for given ranks that own nothing, as the engine takes it.

    Replicas that add in other ways name it, see :func:`adaptra.runtime.data_parallel.collectives.sum_names.name_of`.

    Attributes:
        name: A name in :data:`LATE`.
        late: The ranks that own nothing.
        narrow: Those of them that are there in time: only their ports are narrow.
    """

    name: str
    late: tuple[int, ...]
    narrow: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.name}, {own_nothing(self.late, self.narrow)}"

    def __call__(self, ranks: int, parts: int, _rank: int | None) -> Iterator[TermMessage]:
        """Return the messages, of all ranks."""
        return sum_messages(self.name, ranks, parts, self.late)

    def keeps_round(self, message: TermMessage) -> bool:
        """Return whether a message begins only behind all that its source sends in earlier rounds, whoever gets those.

        Behind a late rank each port has as much to do as the others, and what shares a port comes later than in its round. A
        narrow port has more to do. Who waits for it in one lane leaves the other ports idle. Until a late rank comes,
        owners only send their own terms, and no port is short of time.
        """
        value = message.value
        is_owned_term = value.end == value.first + 1 and message.source not in self.late
        return self.late != self.narrow and not is_owned_term


def algorithm_of(name: str, late: tuple[int, ...] = (), narrow: tuple[int, ...] = ()) -> Algorithm:
    """Return an algorithm as the engine takes it; arguments are those of :func:`sum_messages` and :class:`AlgorithmWithout`."""
    return ALGORITHMS[name] if name in ALGORITHMS and not late else AlgorithmWithout(name, late, narrow)


def own_nothing(late: tuple[int, ...], narrow: tuple[int, ...]) -> str:
    """Return what is said of ranks that own nothing, such as ``1+2 own nothing, 2 for a narrow port``."""
    because = f", {'+'.join(map(str, narrow))} for a narrow port" if narrow else ""
    return f"{'+'.join(map(str, late))} own nothing{because}"


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
