"""Rounds of the ring and of recursive doubling, which add in other orders. They serve to compare costs; no job runs them."""

from __future__ import annotations

from collections.abc import Iterator

from adaptra.collectives.rounds import TermMessage, Value


def ring(ranks: int, parts: int) -> Iterator[TermMessage]:
    """Yield the rounds in which each part's sum, and then its result, goes round from rank to the next rank.

    Part p begins at rank p modulo N. N parts travel at once, so each rank sends one message in every round.
    """
    steps = 2 * (ranks - 1)
    for turn in range(-(-parts // ranks)):
        for step in range(steps):
            for first in range(min(ranks, parts - turn * ranks)):
                source, end = (first + step) % ranks, first + min(step + 1, ranks)
                yield TermMessage(turn * steps + step, source, (source + 1) % ranks, Value(turn * ranks + first, first, end))


def doubling(ranks: int, parts: int) -> Iterator[TermMessage]:
    """Yield the rounds in which pairs exchange sums of twice as many ranks each time. All parts travel in every step.

    Where N is no power of two, some ranks first give their terms to the next rank, and get the results in the end.
    """
    steps = ranks.bit_length() - 1
    paired = ranks - 2**steps
    begins = [2 * place if place < paired else place + paired for place in range(2**steps)] + [ranks]
    active = [begin + (place < paired) for place, begin in enumerate(begins[:-1])]
    moment = 0
    if paired:
        for part in range(parts):
            for rank in range(0, 2 * paired, 2):
                yield TermMessage(part, rank, rank + 1, Value(part, rank, rank + 1))
        moment = parts
    for step in range(steps):
        for part in range(parts):
            for place, source in enumerate(active):
                block = place >> step << step
                span = Value(part, begins[block], begins[block + 2**step])
                yield TermMessage(moment + part, source, active[place ^ 1 << step], span)
        moment += parts
    for part in range(parts if paired else 0):
        for rank in range(0, 2 * paired, 2):
            yield TermMessage(moment + part, rank + 1, rank, Value(part, 0, ranks))
