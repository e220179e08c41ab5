"""Which algorithm a sum takes: the equations say how many parts to begin with, and the rounds are played on the ports."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

from adaptra.collectives.algorithms import own_nothing, sum_messages
from adaptra.collectives.ports import Flight, Ports, WaterLevel, flights, lane_flights, water_level
from adaptra.collectives.rounds import TermMessage
from adaptra.equations.equation import Equation
from adaptra.equations.sums import sum_equations

_NEAR: Final = 1.3
"""Algorithms that take longer than this, times the shortest, are not played with other numbers of parts."""
_EXACT: Final = 0.01
"""Where played rounds differ less from their equation, relatively, the best number of parts by the equation stays."""
_LADDER: Final = (0.5, 0.7, 0.85, 1.2, 1.4, 2.0)
"""Other numbers of parts that are played, times the best so far."""
_MOST_SETS: Final = 6
"""The most late sets that are played."""
_MOST_PARTS: Final = 1024
"""More bring less than a percent beside the rounds that any algorithm takes: messages without bytes would take nothing."""
_MOST_MESSAGES: Final = 100_000
"""More are played only where ranks are so many that each has a single part. That many take some tenths of a second."""
_LONG: Final = 10.0
"""A delay behind which all owners have each other's terms, in times of a sum without late ranks."""


@dataclass(frozen=True, slots=True)
class SumWay:
    """One way to add up the terms of all ranks, with the same bits as every other.

    Attributes:
        algorithm: direct, chain, streamed, merge or swap; see :class:`adaptra.equations.sums.SumEquations`.
        late: The ranks that own nothing, because they are late or their ports are narrow.
        parts: The number of parts.
        narrow: Those of the late ranks that are there in time: only their ports are narrow.
    """

    algorithm: str
    late: tuple[int, ...]
    parts: int
    narrow: tuple[int, ...] = ()

    def __str__(self) -> str:
        late = f", {own_nothing(self.late, self.narrow)}" if self.late else ""
        return f"{self.algorithm} in {self.parts} parts{late}"

    @property
    def has_lanes(self) -> bool:
        """Whether messages to a rank don't wait for those to another; else rounds are kept.

        ``direct`` and ``chain`` take as long either way.
        """
        return bool(self.late) and self.late == self.narrow

    def messages(self, ranks: int) -> Iterable[TermMessage]:
        """Return the messages, by round."""
        return sum_messages(self.algorithm, ranks, self.parts, self.late)

    def with_parts(self, about: float, ranks: int) -> SumWay:
        """Return the same way with about as many parts, up to :func:`most_parts`. Owners of ``streamed`` have equally many."""
        owners = ranks - len(self.late) if self.algorithm == "streamed" else 1
        return replace(self, parts=owners * max(1, round(min(about, most_parts(ranks)) / owners)))


def most_parts(ranks: int) -> int:
    """Return the most parts that are played among so many ranks: a part takes 2 (N - 1) messages."""
    return max(ranks, min(_MOST_PARTS, _MOST_MESSAGES // (2 * (ranks - 1))))


@dataclass(frozen=True, slots=True)
class Applied:
    """An equation and the values of its arguments."""

    equation: Equation
    values: tuple[float, ...]

    @property
    def result(self) -> float:
        """The value of the equation."""
        return self.equation.evaluate(*self.values)


@dataclass(frozen=True, slots=True)
class SumPrice:
    """A way to add up, and what it takes.

    Attributes:
        way: The way.
        rounds: The number of its rounds.
        expected: When the last rank has the sum by the equations, in seconds.
        seconds: The same, by playing the rounds.
    """

    way: SumWay
    rounds: int
    expected: float
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """Return all fields as JSON values."""
        return {
            "algorithm": self.way.algorithm,
            "late": [*self.way.late],
            "narrow": [*self.way.narrow],
            "parts": self.way.parts,
            "rounds": self.rounds,
            "expected": self.expected,
            "seconds": self.seconds,
        }


@dataclass(frozen=True)
class SumCase:
    """A sum over given ports.

    Attributes:
        nbytes: The bytes of one rank's terms.
        ports: The ports, and when their ranks arrive.
    """

    nbytes: float
    ports: Ports

    def to_json(self) -> dict[str, Any]:
        """Return the ports, what each algorithm takes, the choice, the bound and the gap as JSON values; times in seconds."""
        critical, bound, chosen = self.critical_delay, self.bound, self.prices[0]
        return {
            "bytes": self.nbytes,
            "alpha": self.ports.latency,
            "per_byte": [*self.ports.per_byte],
            "arrivals": [*self.ports.arrivals],
            "algorithms": [price.to_json() for price in self.prices],
            "choice": chosen.to_json(),
            "references": self.references,
            "critical_delay": None if critical is None else critical.result,
            "streamed_from": self.streamed_from,
            "bound": bound.seconds,
            "shares": [*bound.shares],
            "gap": chosen.seconds / bound.seconds - 1,
        }

    @property
    def _link(self) -> tuple[float, float, float]:
        """What the equations know of ports: one rate for all, that of the narrowest."""
        return self.nbytes, self.ports.latency, max(self.ports.per_byte)

    @property
    def _doublings(self) -> int:
        return (self.ports.ranks - 1).bit_length()

    @property
    def bound(self) -> WaterLevel:
        """What no sum over these ports goes below."""
        return water_level(self.nbytes, self.ports)

    @property
    def critical_delay(self) -> Applied | None:
        """The delay of one rank from which on ``merge`` beats ``direct``; None for two ranks, where nothing does."""
        ranks = self.ports.ranks
        if ranks == 2:
            return None
        parts = self._even(self.way("merge", (ranks - 1,))).parts
        return Applied(sum_equations().critical_delay, (ranks, parts, self._doublings, *self._link))

    @property
    def streamed_from(self) -> int | None:
        """The least number of ranks, late by far, for which ``streamed`` beats ``merge``; None where it never does."""
        ranks = self.ports.ranks
        delay = _LONG * sum_equations().direct.evaluate(0.0, ranks, *self._link)
        for count in range(1, ranks - 1):
            late = tuple(range(ranks - count, ranks))
            case = SumCase(self.nbytes, replace(self.ports, arrivals=(0.0,) * (ranks - count) + (delay,) * count))
            streamed, merge = (case.expected(case.way(name, who)) for name, who in (("streamed", late), ("merge", late[-1:])))
            if streamed < merge:
                return count
        return None

    @property
    def references(self) -> dict[str, float]:
        """When algorithms that add in another order would end, by their equations. They have other bits, so none is chosen."""
        model, ranks, delay = sum_equations(), self.ports.ranks, max(self.ports.arrivals)
        return {
            "ring": model.direct.evaluate(delay, ranks, *self._link),
            "doubling": model.doubling.evaluate(delay, self._doublings, *self._link),
        }

    def way(self, algorithm: str, late: tuple[int, ...] = ()) -> SumWay:
        """Return an algorithm with the best number of parts by its equation."""
        model, ranks, link = sum_equations(), self.ports.ranks, self._link
        match algorithm:
            case "chain":
                parts = max(2.0, model.chain_parts.evaluate(ranks, *link))
            case "streamed":
                each = model.streamed_parts.evaluate(
                    ranks, len(late), self.nbytes, self.ports.latency, self._owners_per_byte(late)
                )
                parts = each * (ranks - len(late))
            case "merge" | "swap":
                parts = model.merge_parts.evaluate(self._spread(algorithm), *link)
            case _:
                parts = ranks
        return SumWay(algorithm, late, 1, self._narrow(late)).with_parts(parts, ranks)

    def _narrow(self, late: tuple[int, ...]) -> tuple[int, ...]:
        """Return the ranks that own nothing only because of their ports: they are there as soon as all owners."""
        ports, begin = self.ports, self._begin(late)
        return tuple(one for one in late if ports.arrivals[one] <= begin and ports.per_byte[one] > min(ports.per_byte))

    def _owners_per_byte(self, late: tuple[int, ...]) -> float:
        """Return what a byte takes through the narrowest port of an owner, if only narrow ports are left out, else of all."""
        left_out = late if self._narrow(late) == late else ()
        return max(one for rank, one in enumerate(self.ports.per_byte) if rank not in left_out)

    def _spread(self, algorithm: str) -> int:
        return self._doublings - (algorithm == "swap")

    def applied(self, way: SumWay) -> Applied:
        """Return the equation of a way with its numbers: seconds from when all owners are there."""
        model, ranks, owners, link = sum_equations(), self.ports.ranks, self.ports.ranks - len(way.late), self._link
        delay = max(self.ports.arrivals) - self._begin(way.late)
        match way.algorithm:
            case "chain":
                return Applied(model.chain, (delay, ranks, way.parts, *link))
            case "streamed" | "merge" | "swap" if way.has_lanes:
                rates = self._owners_per_byte(way.late), max(self.ports.per_byte[one] for one in way.late)
                return Applied(
                    model.narrow, (ranks, len(way.late), way.parts / owners, self.nbytes, self.ports.latency, *rates)
                )
            case "streamed":
                return Applied(model.streamed, (delay, ranks, len(way.late), way.parts / owners, *link))
            case "merge" | "swap":
                return Applied(model.merge, (delay, ranks, way.parts, self._spread(way.algorithm), *link))
            case _:
                return Applied(model.direct, (delay, ranks, *link))

    def _begin(self, late: tuple[int, ...]) -> float:
        return max(arrival for rank, arrival in enumerate(self.ports.arrivals) if rank not in late)

    def expected(self, way: SumWay) -> float:
        """Return when the last rank has the sum by the equations."""
        return self._begin(way.late) + self.applied(way).result

    def price(self, way: SumWay) -> SumPrice:
        """Return what a way takes, as its rounds play and as the equation says."""
        last_round, seconds = 0, 0.0
        for flight in self.flights(way):
            last_round, seconds = max(last_round, flight.message.round), max(seconds, flight.end)
        return SumPrice(way, 1 + last_round, self.expected(way), seconds)

    def flights(self, way: SumWay) -> Iterator[Flight]:
        """Yield the messages of a way with their times, as the engine sends them."""
        play = lane_flights if way.has_lanes else flights
        return play(way.messages(self.ports.ranks), self.nbytes / way.parts, self.ports)

    @cached_property
    def prices(self) -> list[SumPrice]:
        """The best way of each algorithm, the shortest first. Of those that come near, the best number of parts is sought.

        What is near is counted from the arrival of the last rank, which every sum waits for.
        """
        last, ranks = max(self.ports.arrivals), self.ports.ranks
        ways = sorted(self._ways(), key=self.expected)
        sets = [way.late for way in ways if way.algorithm == "streamed"][:_MOST_SETS]
        best: dict[str, SumPrice] = {}
        for way in ways:
            if way.algorithm != "streamed" or way.late in sets:
                self._keep_shorter(best, way)
        shortest = min(price.seconds for price in best.values()) - last
        for name, price in [*best.items()]:
            seconds, expected = price.seconds - last, price.expected - last
            if name == "direct" or seconds > _NEAR * shortest or abs(seconds - expected) <= _EXACT * seconds:
                continue
            before = None
            while before != best[name]:
                before = best[name]
                ladder = {before.way.with_parts(factor * before.way.parts, ranks) for factor in _LADDER} - {before.way}
                for way in sorted(ladder, key=lambda way: way.parts):
                    self._keep_shorter(best, way)
        return sorted(best.values(), key=lambda price: price.seconds)

    def _keep_shorter(self, best: dict[str, SumPrice], way: SumWay) -> None:
        price = self.price(way)
        if way.algorithm not in best or price.seconds < best[way.algorithm].seconds:
            best[way.algorithm] = price

    def _ways(self) -> Iterator[SumWay]:
        """Yield each algorithm with each set of ranks that may own nothing."""
        ranks = self.ports.ranks
        yield self.way("direct")
        if ranks > 2:
            yield self.way("chain")
        for late in self.late_sets():
            yield self.way("streamed", late)
            for name in self._of_one(late):
                yield self.way(name, late)
                yield self._even(self.way(name, late))

    def _of_one(self, late: tuple[int, ...]) -> Iterator[str]:
        """Yield the algorithms for one late rank. It may add only if its term is the last of the fold."""
        if len(late) == 1:
            yield "merge"
        if late == (self.ports.ranks - 1,):
            yield "swap"

    def _even(self, way: SumWay) -> SumWay:
        """Return a way of one late rank with as many parts for each owner."""
        owners = self.ports.ranks - 1
        return replace(way, parts=owners * max(1, round(way.parts / owners)))

    def late_sets(self) -> Iterator[tuple[int, ...]]:
        """Yield the sets of ranks that may own nothing: those that would be done last if each only sent its own terms.

        A narrow port counts as lateness. Ranks that are alike are in a set together, but for the last rank, which may be alone.
        """
        ports = self.ports
        alone = [arrival + self.nbytes * beta for arrival, beta in zip(ports.arrivals, ports.per_byte, strict=True)]
        last_first = sorted(range(ports.ranks), key=lambda rank: (-alone[rank], -rank))
        for count in range(1, ports.ranks - 1):
            if count == 1 or alone[last_first[count]] < alone[last_first[count - 1]]:
                yield tuple(sorted(last_first[:count]))
