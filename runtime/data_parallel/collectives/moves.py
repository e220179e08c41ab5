"""The messages of one replica in a sum: which may begin by now, and what follows from those that have ended."""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import NamedTuple, Protocol

from torch import Tensor

from adaptra.collectives.ports import MOST_OPEN
from adaptra.collectives.rounds import TermMessage
from adaptra.runtime.data_parallel.collectives.terms import Terms


class Carrier(Protocol):
    """What brings messages to other replicas, and theirs here."""

    @property
    def has_ended(self) -> bool:
        """Whether :meth:`next` returns at once, as far as that is known."""
        ...

    def begin(self, messages: Sequence[tuple[TermMessage, Tensor]]) -> None:
        """Begin to send values, or to receive them in the memory given."""
        ...

    def next(self) -> tuple[TermMessage, Tensor]:
        """Wait for a message that has ended, in whatever order."""
        ...


class SumTurn(NamedTuple):
    """What a replica does until one message has ended.

    Attributes:
        begun: Messages that begin before; those of a tuple together.
        added: Parts whose terms are added ahead then, each with the term before which that ends.
        ended: The message that ends.
        bucket: The bucket that ends with it, None if none does.
    """

    begun: tuple[tuple[TermMessage, ...], ...]
    added: tuple[tuple[int, int], ...]
    ended: TermMessage
    bucket: int | None


class _MessageLane:
    """Messages that begin one after the other.

    Args:
        waiting: Those that begin together, in the order of rounds.
        most: How many of them may be under way.

    Attributes:
        under_way: How many of them are.
    """

    def __init__(self, waiting: Iterable[tuple[TermMessage, ...]], most: float) -> None:
        self.waiting = deque(waiting)
        self.under_way = 0
        self.most = most


class Moves:
    """Begins the messages of one replica, in any order that gives the same sum, and handles those that have ended.

    Messages to a peer begin in the order of rounds, and so do those from it. Such lanes don't wait for each other. So a peer
    that is late, or slow, delays only what needs its values. Sends that keep their rounds are one lane, whoever gets them. What
    is sent at once shares a port, and then a part comes later than in its round.

    A replica's own term gives way to the part's result. The result is made only behind all sends of the term. It is received as
    soon as they have begun if there is one: what arrives holds the term that was sent.

    Args:
        terms: The replica's values.
        messages: Those that the replica sends or receives, by round.
        rank: The replica.
        end: Ends a bucket of which nothing is under way any more.
        in_rounds: Whether a round's messages begin together, behind those of the rounds before.
        keeps_round: Whether a message to send keeps its round: begins behind all of earlier rounds. None if none does.
        most_sent: The most messages under way that a lane sends.

    Attributes:
        left: By bucket, the messages that have not ended.
    """

    def __init__(
        self,
        terms: Terms,
        messages: Sequence[TermMessage],
        rank: int,
        end: Callable[[int], object],
        *,
        in_rounds: bool,
        keeps_round: Callable[[TermMessage], bool] | None = None,
        most_sent: int = MOST_OPEN,
    ) -> None:
        self._terms = terms
        self._rank = rank
        self._end = end
        self._in_rounds = in_rounds
        self._keeps_round = keeps_round
        self.left = Counter(terms.bucket(message.value) for message in messages)
        # Sends that need the own term of a part: those that have not begun, and of the term itself those that have not ended.
        self._needs = Counter(message.value.part for message in messages if self._needs_own(message))
        self._sends = Counter(message.value.part for message in messages if self._is_own(message))
        self._often = {part for part, count in self._sends.items() if count > 1}
        self._ends_ahead = {} if in_rounds else self._parts_added_ahead(messages)
        self._to_add = deque[int]()  # parts of which one more term is there
        lanes: defaultdict[tuple[int, int | None] | None, list[tuple[TermMessage, ...]]] = defaultdict(list)
        for _, together in groupby(messages, key=lambda message: message.round if in_rounds else message):
            first, *others = together
            lanes[self._lane(first)].append((first, *others))
        self._lanes = {
            lane: _MessageLane(waiting, len(waiting) if lane is None else most_sent if lane[0] == rank else MOST_OPEN)
            for lane, waiting in lanes.items()
        }
        in_line = None if in_rounds else self._lanes.get((rank, None))
        self._beside_line = [
            lane for key, lane in self._lanes.items() if in_line and key and key[0] == rank and lane is not in_line
        ]

    def run(self, carrier: Carrier) -> list[SumTurn]:
        """Move all messages, and return the turns.

        Raises:
            RuntimeError: What the carrier raises of a message that failed.
        """
        turns: list[SumTurn] = []
        while self.left:
            begun = self.begin(carrier)
            assert any(lane.under_way for lane in self._lanes.values()), f"no message may begin; left: {self.left}"
            added: list[tuple[int, int]] = []
            while not carrier.has_ended and (ahead := self.add_ahead()) is not None:
                added.append(ahead)
            message, tensor = carrier.next()
            turns.append(SumTurn(begun, (*added,), message, self.handle(message, tensor)))
        return turns

    def begin(self, carrier: Carrier) -> tuple[tuple[TermMessage, ...], ...]:
        """Begin what may begin, and return it; messages of a tuple begin together.

        Terms that may still be computed are asked for only where nothing else is to be done.
        """
        begun: list[tuple[TermMessage, ...]] = []
        while (lane := self._first_lane(carrier)) is not None:
            messages = lane.waiting.popleft()
            lane.under_way += len(messages)
            if self._ends_ahead and self._asks_for_terms(messages[0]):
                self._to_add += self._terms.parts(self._terms.bucket(messages[0].value))
            carrier.begin([(message, _memory(message, self._terms, self._rank)) for message in messages])
            for message in filter(self._needs_own, messages):
                self._needs[message.value.part] -= 1
            begun.append(messages)
        return (*begun,)

    def add_ahead(self) -> tuple[int, int] | None:
        """Add up the terms of one part that are there before the others.

        Returns:
            The part, and the term before which that ends; None if there were no such terms.
        """
        while self._to_add:
            part = self._to_add.popleft()
            if part in self._ends_ahead and self._terms.add_ahead(part, self._ends_ahead[part]):
                return part, self._ends_ahead[part]
        return None

    def handle(self, message: TermMessage, tensor: Tensor) -> int | None:
        """Record a message that has ended, and its value. Returns the bucket that ends with it, None if none does."""
        self._lanes[self._lane(message)].under_way -= 1
        if message.destination == self._rank:
            self._terms.arrived(message.value, tensor)
            if self._ends_ahead:
                self._to_add.append(message.value.part)
        elif self._is_own(message):
            self._sends[message.value.part] -= 1
        bucket = self._terms.bucket(message.value)
        self.left[bucket] -= 1
        if self.left[bucket]:
            return None
        del self.left[bucket]
        self._end(bucket)
        return bucket

    def _parts_added_ahead(self, messages: Sequence[TermMessage]) -> dict[int, int]:
        """Return the parts whose terms are added up before all are there, and of each the term before which that ends.

        Terms and sums of terms that the replica has to send stay as they are.
        """
        ends = self._terms.large_parts()
        for message in messages if ends else ():
            part, first, end = message.value
            if part in ends and self._needs_own(message) and not self._is_own(message):
                ends[part] = min(ends[part], first or end)
        return ends

    def _first_lane(self, carrier: Carrier) -> _MessageLane | None:
        """Return the lane whose messages may begin: of those that ask for no terms, else of all, that of the earliest round."""
        first: _MessageLane | None = None
        order = True, math.inf
        for lane in self._lanes.values():  # a loop: a step of a small model asks this dozens of times
            if lane.waiting and lane.under_way < lane.most:
                begin_next = lane.waiting[0]
                its_order = any(map(self._asks_for_terms, begin_next)), begin_next[0].round
                if its_order < order and all(map(self._may_begin, begin_next)):
                    first, order = lane, its_order
        return None if order[0] and carrier.has_ended else first

    def _may_begin(self, message: TermMessage) -> bool:
        value, is_result = message.value, self._terms.is_result(message.value)
        if is_result and self._needs[value.part]:
            return False
        if message.destination == self._rank:
            return not is_result or (self._terms.is_open(value) and not (value.part in self._often and self._sends[value.part]))
        return self._terms.has(value) and not (is_result and self._sends[value.part]) and not self._waits_in_line(message)

    def _waits_in_line(self, message: TermMessage) -> bool:
        """Return whether a message to send keeps its round, and another one of an earlier round waits on a lane of its own."""
        earlier = (lane for lane in self._beside_line if lane.waiting and lane.waiting[0][0].round < message.round)
        return self._lane(message) == (self._rank, None) and any(earlier)

    def _asks_for_terms(self, message: TermMessage) -> bool:
        return message.source == self._rank and not self._terms.is_open(message.value)

    def _lane(self, message: TermMessage) -> tuple[int, int | None] | None:
        if self._in_rounds:
            return None
        is_in_line = self._keeps_round is not None and message.source == self._rank and self._keeps_round(message)
        return message.source, None if is_in_line else message.destination

    def _needs_own(self, message: TermMessage) -> bool:
        return message.source == self._rank and not self._terms.is_result(message.value)

    def _is_own(self, message: TermMessage) -> bool:
        return message.source == self._rank and (message.value.first, message.value.end) == (self._rank, self._rank + 1)


def take_again(turns: Iterable[SumTurn], terms: Terms, rank: int, end: Callable[[int], object], carrier: Carrier) -> None:
    """Move messages as :meth:`Moves.run` did for terms of the same sizes, without its decisions.

    Args:
        turns: What it returned.
        terms, rank, end: As of :class:`Moves`.
        carrier: One whose messages end in the same order.

    Raises:
        RuntimeError: As :meth:`Moves.run`.
    """
    for turn in turns:
        for messages in turn.begun:
            carrier.begin([(message, _memory(message, terms, rank)) for message in messages])
        for part, before in turn.added:
            terms.add_ahead(part, before)
        message, tensor = carrier.next()
        assert message is turn.ended, f"{message} has ended before {turn.ended}"
        if message.destination == rank:
            terms.arrived(message.value, tensor)
        if turn.bucket is not None:
            end(turn.bucket)


def _memory(message: TermMessage, terms: Terms, rank: int) -> Tensor:
    """Return the value that a message of a replica sends, or the memory for what it receives."""
    return terms.value(message.value) if message.source == rank else terms.place(message.value)
