"""Rounds as data: who sends what to whom, and in which order. An algorithm only moves terms; the sum is the same for all.

Parts are numbered through all buckets. Each bucket has as many parts as there are replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple


class Value(NamedTuple):
    """The sum of the terms of replicas ``first`` to ``end - 1`` for one part. A single term is a sum of one.

    A sum of several terms begins with the first replica's, because the whole is a left fold. Algorithms that add in another
    order, which serve as references, count round: behind the last replica, numbered N-1, follows the first as number N.
    """

    part: int
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class TermMessage:
    """One message between two replicas.

    Attributes:
        round: Its round, from 0.
        source, destination: Replicas.
        value: What it carries.
    """

    round: int
    source: int
    destination: int
    value: Value


Algorithm = Callable[[int, int, int | None], Iterator[TermMessage]]
"""Yields the messages for a number of replicas and parts, by round: of all replicas, or of those that one sends or receives."""


def direct(replicas: int, parts: int, rank: int | None = None) -> Iterator[TermMessage]:
    """Yield the rounds of an exchange between all: terms go to the part's owner, which adds them, and the results go back.

    Replica i owns the parts whose number is i modulo the number of replicas. In shift r it sends to replica i + r. The terms of
    the next bucket travel before the results of this one, so that an owner adds while messages travel.

    Args:
        replicas: The number N of replicas.
        parts: N for each bucket; the last bucket may have fewer.
        rank: Only messages of this replica, or None for all.
    """
    buckets, moment = -(-parts // replicas), 0
    for bucket in range(buckets + 1):
        for of, is_result in ((bucket, False), (bucket - 1, True)):
            if not 0 <= of < buckets:
                continue
            for shift in range(1, replicas):
                for source in range(replicas) if rank is None else {rank, (rank - shift) % replicas}:
                    destination = (source + shift) % replicas
                    if is_result:
                        value = Value(of * replicas + source, 0, replicas)
                    else:
                        value = Value(of * replicas + destination, source, source + 1)
                    if value.part < parts:
                        yield TermMessage(moment, source, destination, value)
                moment += 1


def to_owners(replicas: int, parts: int, rank: int | None = None) -> Iterator[TermMessage]:
    """Yield the rounds of :func:`direct` that bring terms to owners: each has the results of its own parts then."""
    return (one for one in direct(replicas, parts, rank) if (one.value.first, one.value.end) != (0, replicas))


def chain(replicas: int, parts: int, rank: int | None = None) -> Iterator[TermMessage]:
    """Yield the rounds of a pipelined fold from the first replica to the last, and of the result's way back.

    Each link between neighbours carries every part once per direction. A replica in the middle sends two messages per part,
    so parts follow each other every other round. Arguments are those of :func:`direct`.
    """
    pace = min(replicas - 1, 2)
    last = replicas - 1
    messages = [
        message
        for part in range(parts if replicas > 1 else 0)
        for hop in range(last)
        for message in (
            TermMessage(pace * part + hop, hop, hop + 1, Value(part, 0, hop + 1)),
            TermMessage(pace * part + last + hop + pace - 1, last - hop, last - hop - 1, Value(part, 0, replicas)),
        )
        if rank is None or rank in (message.source, message.destination)
    ]
    yield from sorted(messages, key=lambda message: message.round)


ALGORITHMS: Final[Mapping[str, Algorithm]] = {"direct": direct, "chain": chain}
"""All algorithms by their names."""
