"""Rounds in which some ranks own nothing: they are late, or their ports are narrow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from adaptra.collectives.rounds import TermMessage, Value


def exchange(owners: Sequence[int], parts: int) -> Iterator[TermMessage]:
    """Yield the rounds in which owners send each other their terms. Part p belongs to owner p modulo their number."""
    moment, count = 0, len(owners)
    for turn in range(-(-parts // count)):
        for shift in range(1, count):
            for place, owner in enumerate(owners):
                part = turn * count + (place + shift) % count
                if part < parts:
                    yield TermMessage(moment, owner, owners[part % count], Value(part, owner, owner + 1))
            moment += 1


def exchange_rounds(owners: int, parts: int) -> int:
    """Return the number of rounds of :func:`exchange`."""
    return -(-parts // owners) * (owners - 1)


def streamed(replicas: int, parts: int, late: Sequence[int]) -> Iterator[TermMessage]:
    """Yield the rounds of a sum whose owners have each other's terms before the late replicas arrive.

    First the owners exchange their terms. Then all replicas shift: in shift r replica i sends to i + r. A late one sends
    its terms. An owner sends the results of its last part, for which the late terms came in the turn before. So there are as
    many turns of N-1 shifts as each owner has parts, and one more.

    Args:
        replicas: The number N of replicas.
        parts: Their number. Part p belongs to owner p modulo the number of owners.
        late: The replicas that own nothing: at least one, and not so many that fewer than two own something.
    """
    owners = [replica for replica in range(replicas) if replica not in late]
    place = {owner: index for index, owner in enumerate(owners)}
    yield from exchange(owners, parts)
    turns, moment = -(-parts // len(owners)), exchange_rounds(len(owners), parts)
    for turn in range(turns + 1):
        for shift in range(1, replicas):
            for source in range(replicas):
                to = (source + shift) % replicas
                if source in place:
                    value = Value((turn - 1) * len(owners) + place[source], 0, replicas)
                elif to in place:
                    value = Value(turn * len(owners) + place[to], source, source + 1)
                else:
                    continue
                if 0 <= value.part < parts:
                    yield TermMessage(moment, source, to, value)
            moment += 1
