"""Rounds of a sum with one late rank, whose terms go to the owners one a round while results spread by doubling."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import gcd
from typing import Final

from adaptra.collectives.closing import closing_rounds
from adaptra.collectives.rounds import TermMessage, Value
from adaptra.collectives.spreading import Pattern, pattern_of, swap_pattern_of
from adaptra.collectives.streamed import exchange, exchange_rounds

_MOST_STEPS: Final = 8
"""The most orders of ranks that are tried."""
_SWAP_STEPS: Final = {
    2: (33, 37, 93, 161, 167, 249, 251),
    3: (13, 22, 23, 25, 26, 29, 148, 250),
    4: (39, 247, 253),
    5: (27, 42, 72, 94, 248, 252),
}
"""The first order that works for a swap of some numbers of ranks, found by trying. It saves the tries that fail."""


def merge(ranks: int, parts: int, late: Sequence[int]) -> Iterator[TermMessage]:
    """Yield the rounds of a sum that needs C + ⌈log2 N⌉ of them from the late rank's first message on, for C parts.

    First the owners exchange their terms. Then the late rank sends its terms, one a round, and the results spread, see
    :mod:`.spreading`. Where the pattern is deeper than the bound, the last rounds are those of :mod:`.closing`.

    Args:
        ranks: The number N of ranks, from 3 on.
        parts: The number C of parts. Part p belongs to owner p modulo N-1.
        late: The one rank that is late.
    """
    (last_rank,) = late
    return _merged(ranks, parts, last_rank, pattern_of(ranks))


def swap(ranks: int, parts: int, late: Sequence[int]) -> Iterator[TermMessage]:
    """Yield the rounds of a sum that needs one less than :func:`merge`, because the late rank's term is the last of the fold.

    The late rank and an owner swap: one sends its term, the other the fold of all terms before. Both add the same two values.
    Three ranks have no such rounds; theirs are those of :func:`merge`.

    Args:
        ranks, parts: As of :func:`merge`.
        late: The last rank.
    """
    (last_rank,) = late
    return _merged(ranks, parts, last_rank, swap_pattern_of(ranks) or pattern_of(ranks))


def _merged(ranks: int, parts: int, late: int, pattern: Pattern) -> Iterator[TermMessage]:
    owners = [rank for rank in range(ranks) if rank != late]
    yield from exchange(owners, parts)
    begin = exchange_rounds(len(owners), parts)
    closing = _closing(pattern)
    pairs = [(age, pattern.pairs(age)) for age in range(1, pattern.depth + 1)]
    for moment in range(parts if closing else parts + pattern.depth):
        if moment < parts:
            owner = owners[moment % len(owners)]
            yield TermMessage(begin + moment, late, owner, Value(moment, late, late + 1))
            if pattern.is_swap:
                yield TermMessage(begin + moment, owner, late, Value(moment, 0, late))
        for age, places in pairs:
            part = moment - age
            if 0 <= part < parts:
                for sender, receiver in places:
                    source = owners[(part + sender) % len(owners)]
                    destination = late if receiver is None else owners[(part + receiver) % len(owners)]
                    yield TermMessage(begin + moment, source, destination, Value(part, 0, ranks))
    # The rank that owns the last part is number 0 here, and the last part is part 0.
    there = [*(owners[(parts - 1 + place) % len(owners)] for place in range(len(owners))), late]
    for moment, messages in enumerate(closing):
        for sender, receiver, back in messages:
            if back < parts:
                value = Value(parts - 1 - back, 0, ranks)
                yield TermMessage(begin + parts + moment, there[sender], there[receiver], value)


@lru_cache
def _closing(pattern: Pattern) -> list[list[tuple[int, int, int]]]:
    """Return the rounds behind the late rank's last term, of parts counted back from the last; none if the pattern goes on.

    There are some for every number of ranks up to 256 for which the pattern is deeper than the bound. The flows of some fail
    with the ranks in their order, and work in another: each time the one that is ``step`` further.
    """
    owners, parts = len(pattern.receives), range(pattern.depth)
    ranks = owners + 1
    rounds = owners.bit_length() - pattern.is_swap
    if pattern.depth <= rounds:
        return []
    held = [[part for part in parts if pattern.receives[(rank + part) % owners] <= part] for rank in range(owners)]
    held.append([part for part in parts if pattern.late <= part])
    steps = [step for step in range(1, ranks) if gcd(step, ranks) == 1][:_MOST_STEPS]
    for step in sorted(steps, key=lambda step: not pattern.is_swap or ranks not in _SWAP_STEPS.get(step, ())):
        order = [number * step % ranks for number in range(ranks)]
        closing = closing_rounds([held[rank] for rank in order], pattern.depth, rounds)
        if closing is not None:
            return [[(order[sender], order[receiver], part) for sender, receiver, part in each] for each in closing]
    return []
