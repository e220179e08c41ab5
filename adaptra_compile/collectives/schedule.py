"""Schedules of sums: every message of every rank, in rounds. Here are their type and their text.

A header names the algorithm, the ranks, the parts, the late ranks, and the order of additions. Each round has a line::

    sum swap version=1 ranks=4 parts=1 late=3 order=fold
    0: 2>0:0=2
    1: 1>0:0=1
    2: 3>0:0=3 0>3:0=0..2
    3: 0>1:0=0..3 3>2:0=0..3

``0>3:0=0..2`` says that rank 0 sends to rank 3, of part 0, the sum of the terms of ranks 0 to 2. ``3>0:0=3`` is a single term.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from adaptra.collectives.rounds import TermMessage, Value
from adaptra.errors import ProgramTextError, ScheduleError
from adaptra.program.program import text_lines
from adaptra.program.routing import NUMBER, TextLine

FORMAT_VERSION: Final = 1
"""The version of the text form."""


@dataclass(frozen=True, slots=True)
class SumSchedule:
    """Who sends what to whom, in which round, until every rank has the sum of each part.

    Attributes:
        name: The algorithm.
        ranks: The number N of ranks.
        parts: The number of parts. Each is a message.
        late: The ranks that own nothing, in ascending order: they bring their terms late, or their ports are narrow.
        messages: By round.
        is_fold: Whether every sum is the left fold in the order of ranks, with the bits that all such schedules share. Others
            add neighbouring sums in any order; they serve to compare costs.

    Raises:
        ScheduleError: The parts don't fit together. :func:`.verify.verify_sum` checks whether the messages make the sum.
    """

    name: str
    ranks: int
    parts: int
    late: tuple[int, ...]
    messages: tuple[TermMessage, ...]
    is_fold: bool = True

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ScheduleError(f"name {self.name!r}: expected lower-case letters and digits")
        if self.ranks < 2 or self.parts < 1:
            raise ScheduleError(f"ranks={self.ranks} parts={self.parts}: expected at least 2 ranks and 1 part")
        require_late(self.ranks, self.late)
        rounds = [message.round for message in self.messages]
        if rounds != sorted(rounds):
            raise ScheduleError("expected the messages in the order of their rounds")
        for message in self.messages:
            self.require_in_range(message)

    def require_in_range(self, message: TermMessage) -> None:
        """Refuse a message between ranks, of a part or of terms that are not there.

        Raises:
            ScheduleError: Names it.
        """
        ends, (part, first, end) = (message.source, message.destination), message.value
        most = self.ranks if self.is_fold else first + self.ranks
        if message.round < 0 or not all(0 <= rank < self.ranks for rank in ends) or ends[0] == ends[1]:
            raise ScheduleError(f"{token_of(message, self.ranks)}: expected a message between two of {self.ranks} ranks")
        if not (0 <= part < self.parts and 0 <= first < self.ranks and first < end <= most):
            raise ScheduleError(
                f"{token_of(message, self.ranks)}: expected one of {self.parts} parts and a span of {self.ranks} ranks"
                + (" in their order" if self.is_fold else "")
            )

    @property
    def rounds(self) -> int:
        """The number of rounds."""
        return 1 + max((message.round for message in self.messages), default=-1)

    @property
    def rounds_of_late(self) -> int:
        """The number of rounds from the first that needs a late rank; all if no rank is late."""
        first = (message.round for message in self.messages if message.source in self.late or message.destination in self.late)
        return self.rounds - next(first, 0)

    def __str__(self) -> str:
        """Return the text form; ends in a newline."""
        late, order = ",".join(map(str, self.late)) or "-", "fold" if self.is_fold else "any"
        lines = [
            f"sum {self.name} version={FORMAT_VERSION} ranks={self.ranks} parts={self.parts} late={late} order={order}",
            *(
                f"{moment}: " + " ".join(token_of(message, self.ranks) for message in together)
                for moment, together in groupby(self.messages, lambda message: message.round)
            ),
        ]
        return "\n".join(lines) + "\n"

    @staticmethod
    def parse(text: str) -> SumSchedule:
        """Parse the text form. Blank lines and comments after ``#`` are ignored. Everything else must match in full.

        Raises:
            ProgramTextError: The text is invalid. The error has line and column, and names the token and the expected form.
        """
        lines = text_lines(text)
        if not lines:
            raise ProgramTextError(f"empty schedule: expected a line {_FORM!r}")
        header, *rest = lines
        match = _HEADER.fullmatch(header.text)
        if match is None:
            raise header.error(f"header {header.text!r}: expected {_FORM!r}")
        if int(match["version"]) != FORMAT_VERSION:
            reason = f"version {match['version']}: this adaptra reads version {FORMAT_VERSION}"
            raise header.error(reason, match.start("version"))
        late = () if match["late"] == "-" else tuple(map(int, match["late"].split(",")))
        empty = _placed(header, match["name"], int(match["ranks"]), int(match["parts"]), late, match["order"] == "fold")
        messages: list[TermMessage] = []
        for line in rest:
            messages += _parse_round(line, empty, messages[-1].round if messages else -1)
        return SumSchedule(empty.name, empty.ranks, empty.parts, late, tuple(messages), empty.is_fold)


def require_late(ranks: int, late: tuple[int, ...]) -> None:
    """Refuse late ranks that are not there, named twice or not in order, or so many that fewer than two own parts.

    Raises:
        ScheduleError: Names them.
    """
    if any(not 0 <= rank < ranks for rank in late) or [*late] != sorted(set(late)):
        raise ScheduleError(f"late ranks {_text_of(late)}: expected some of 0..{ranks - 1}, each once, in ascending order")
    if late and len(late) > ranks - 2:
        raise ScheduleError(f"late ranks {_text_of(late)} of {ranks}: expected at least two ranks that are not late")


def token_of(message: TermMessage, ranks: int) -> str:
    """Return a message as it stands in the line of its round."""
    part, first, end = message.value
    span = f"{first}" if end == first + 1 else f"{first}..{(end - 1) % ranks}"
    return f"{message.source}>{message.destination}:{part}={span}"


def _text_of(late: tuple[int, ...]) -> str:
    return ",".join(map(str, late))


_NAME = re.compile(r"[a-z0-9]+")
_FORM = "sum NAME version=1 ranks=N parts=C late=RANK,RANK,…|- order=fold|any"
_HEADER = re.compile(
    rf"sum (?P<name>[a-z0-9]+) version=(?P<version>{NUMBER}) ranks=(?P<ranks>{NUMBER}) parts=(?P<parts>{NUMBER})"
    rf" late=(?P<late>-|{NUMBER}(?:,{NUMBER})*) order=(?P<order>fold|any)"
)
_MESSAGE = re.compile(rf"({NUMBER})>({NUMBER}):({NUMBER})=({NUMBER})(?:\.\.({NUMBER}))?")
_ROUND = re.compile(rf"({NUMBER}):")


def _placed(header: TextLine, name: str, ranks: int, parts: int, late: tuple[int, ...], is_fold: bool) -> SumSchedule:
    try:
        return SumSchedule(name, ranks, parts, late, (), is_fold)
    except ScheduleError as error:
        raise header.error(str(error)) from None


def _parse_round(line: TextLine, schedule: SumSchedule, before: int) -> list[TermMessage]:
    label, *words = re.finditer(r"\S+", line.text)
    match = _ROUND.fullmatch(label[0])
    if match is None or int(match[1]) <= before or not words:
        raise line.error(f"{label[0]!r}: expected 'ROUND:' with a round above {before}, and its messages")
    messages: list[TermMessage] = []
    for word in words:
        try:
            messages.append(_parse_message(word[0], int(match[1]), schedule))
        except ScheduleError as error:
            raise line.error(str(error), word.start()) from None
    return messages


def _parse_message(token: str, moment: int, schedule: SumSchedule) -> TermMessage:
    match = _MESSAGE.fullmatch(token)
    if match is None:
        raise ScheduleError(f"message {token!r}: expected SOURCE>DESTINATION:PART=RANK or =FIRST..LAST such as 0>2:1=0..1")
    source, destination, part, first = map(int, match.groups()[:4])
    last = first if match[5] is None else int(match[5])
    length = (last - first) % schedule.ranks + 1
    message = TermMessage(moment, source, destination, Value(part, first, first + length))
    if token_of(message, schedule.ranks) != token:
        raise ScheduleError(f"message {token!r}: expected ranks below {schedule.ranks}, and a single one without '..'")
    schedule.require_in_range(message)
    return message
