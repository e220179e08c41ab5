"""Which ranks of a sum are late, step by step, and which algorithm the next sum takes over the ports that were measured.

All ranks of a sum know the arrivals of all, alike to the bit. This is a pure function of them. So all ranks decide alike,
without a message. A digest of all that a decision depends on says whether they do.

A rank is late once it has arrived behind all that are not, in each of a few steps and by more than noise explains. Then the
rounds of all algorithms are played. Another one is taken only if two steps gain what one loses where nobody is late. It is
left once its late ranks have come earlier than that loss in each of a few steps.

The ranks of narrow ports own nothing as long as nobody is late, if that pays. Ports are measured at the start, and again once
sums have taken another time than before in each of a few steps. In a sum itself all messages share the ports, and end together.
Sums round a narrow port take hardly less where it is wide again. So then ports are measured now and then.
"""

from __future__ import annotations

import math
import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import sub
from statistics import median, median_high
from typing import Final

from adaptra.collectives.buckets import LEAST_BYTES
from adaptra.collectives.choice import SumCase, SumWay
from adaptra.collectives.ports import Ports
from adaptra.equations.sums import sum_equations
from adaptra.sizes import size_text

STEPS_IN_A_ROW: Final = 3
"""The number of steps that must agree: that a rank is late, and that it is not any more."""

NOISES: Final = 8.0
"""A rank is late by at least this many times the median change of an arrival from step to step. The largest counts.
Such changes of normal noise are as large as its standard deviation.
"""

REMEMBERED: Final = 32
"""The number of steps whose changes are noise."""

OTHER_SECONDS: Final = 1.3
"""Ports are measured again where sums take so many times as long, or as short. One of eight ports at half rate doubles them."""

MEASURED_NOISES: Final = 4.0
"""Those seconds differ by at least this many times their median change. A measurement costs little, and so does one in vain."""

PROBES_SHARE: Final = 100
"""With a narrow port so many times the bytes of a measurement leave a port in sums before the next one."""

LEAST_REMEMBERED: Final = 8
"""Before so many changes nothing is known of noise, and nobody is late. A job's first steps differ by other reasons, too."""

TAKEN: Final = "streamed"
"""The algorithm for late ranks. Over real ports ``merge`` takes longer than its rounds play, see bench/late_rank.py."""

PAYING_STEPS: Final = 2
"""So many right steps must gain what a step with late ranks that are not late loses."""

_NEAR: Final = 0.9
"""Another algorithm for late ranks replaces one only where it takes less than this, times the other."""

_FINENESS: Final = 8
"""A lateness is rounded down to so many steps between two powers of two. So few different ones are played."""

_MOST_KEPT: Final = 64
"""The most latenesses whose prices are kept."""

_MOST_RANKS: Final = 16
"""The rounds of more ranks are not played, as that takes seconds, inside a step. Their prices are those of the equations."""


@dataclass(frozen=True, slots=True)
class SumChoice:
    """How the next sum is made, and why.

    Attributes:
        way: How.
        lateness: The seconds by which each rank came later than the first, in the last step; empty before that is known.
        seconds: What each algorithm takes from the first arrival on, by its name, the shortest first. Empty as long as no rank
            was late.
        wrong_guess: The seconds that the way costs over that of steps without late ranks, where nobody is late. If it is the
            latter itself: over direct, where all ports are as wide as the widest.
    """

    way: SumWay
    lateness: tuple[float, ...] = ()
    seconds: tuple[tuple[str, float], ...] = ()
    wrong_guess: float = 0.0

    def __str__(self) -> str:
        last = max(self.lateness, default=0.0)
        late = "" if last == 0.0 else f"replica {self.lateness.index(last)} last, {1e3 * last:.1f} ms behind the first; "
        prices = ", ".join(f"{name} {1e3 * seconds:.1f} ms" for name, seconds in self.seconds)
        return f"{late}by {self.way}" + (f" ({prices})" if prices else "")


class _SumSeconds:
    """The seconds of sums without late ranks since ports were measured: they tell when to do so again.

    Args:
        between: The number of sums round a narrow port behind which they are measured anyway.
    """

    def __init__(self, between: int) -> None:
        self.between = between
        self._took: deque[float] = deque(maxlen=REMEMBERED)
        self._left = between

    def forget(self) -> None:
        """Compare no later sum with those so far."""
        self._took.clear()

    def is_time_to_measure(self, took: float, *, is_round_a_port: bool) -> bool:
        """Take the seconds of a sum. Return whether a few differ alike from those before, or many have gone round a port."""
        self._left -= is_round_a_port
        self._took.append(took)
        before, latest = [*self._took][:-STEPS_IN_A_ROW], [*self._took][-STEPS_IN_A_ROW:]
        if self._left <= 0 or len(before) < LEAST_REMEMBERED:
            return self._left <= 0
        usual, noise = median(before), median(map(abs, map(sub, before[1:], before)))
        longer = min(latest) > max(OTHER_SECONDS * usual, usual + MEASURED_NOISES * noise)
        return longer or max(latest) < min(usual / OTHER_SECONDS, usual - MEASURED_NOISES * noise)


class LateRanks:
    """Decides how the next sum is made.

    Args:
        nbytes: The bytes of one rank's terms.
        ports: The ports of the ranks, as measured, at least three: of two neither can do the other's part.
        memory: The most bytes of terms that a rank may hold until a late one arrives.
        bucket: The bytes of a bucket; None for what suits each algorithm.
        probed: The bytes that leave a port to measure its links.

    Attributes:
        choice: How the next sum is made.
        asks: Whether all ranks are to measure their ports now, for :meth:`measured`.
        digest: A number below 2**32, equal on ranks that have decided alike and from the same arrivals.
    """

    def __init__(self, nbytes: int, ports: Ports, memory: int, bucket: int | None = None, probed: int = 0) -> None:
        sum_equations()  # built here, not in a step
        ranks = ports.ranks
        self._nbytes = nbytes
        self._ports = ports
        self._memory = memory
        self._bucket = bucket
        self._direct = SumWay("direct", (), ranks)
        self._latest: deque[tuple[float, ...]] = deque(maxlen=STEPS_IN_A_ROW)
        self._relative: tuple[float, ...] = ()
        self._changes: tuple[deque[float], ...] = tuple(deque[float](maxlen=REMEMBERED) for _ in range(ranks))
        self._priced: dict[tuple[float, ...], list[tuple[SumWay, float]]] = {}
        self._durations = _SumSeconds(max(REMEMBERED, math.ceil(PROBES_SHARE * probed / (2 * nbytes))))
        self._usual = self._without_late_ranks()
        self.choice = self._usual
        self.asks = False
        self.digest = zlib.crc32(repr((nbytes, ports, memory, bucket)).encode())

    def __str__(self) -> str:
        """What the next sum's choice depends on, and what it costs if it is wrong."""
        way, widest = self.choice.way, min(self._ports.per_byte)
        rate = f"{1e-6 / widest:.0f} MB/s" if widest > 0 else "no limit"
        text = f"{self.choice}; links of {1e3 * self._ports.latency:.3f} ms and {rate}"
        for rank, per_byte in enumerate(self._ports.per_byte):
            if per_byte > widest:
                text += f", {1e-6 / per_byte:.0f} MB/s to replica {rank}"
        if not way.late:
            return text
        is_usual = way == self._usual.way
        where = "ports are alike" if is_usual else "nobody is late"
        wrong = f"{1e3 * self.choice.wrong_guess:.1f} ms more than {'direct' if is_usual else self._usual.way.algorithm}"
        held, whom = size_text(self.held_bytes(way)), "replica with a narrow port" if way.has_lanes else "late replica"
        return f"{text}; where {where} it takes {wrong}; up to {held} wait for a {whom}"

    def observe(self, arrivals: Sequence[float], took: float = 0.0) -> None:
        """Take a step's sum, and decide how the next one is made.

        Args:
            arrivals: When each rank began it, in seconds on one clock.
            took: The seconds that it took the last one to arrive.
        """
        first, middle = min(arrivals), median(arrivals)
        relative, before = tuple(one - middle for one in arrivals), self._relative
        if before:
            for changes, now, earlier in zip(self._changes, relative, before, strict=True):
                changes.append(abs(now - earlier))
        self._relative = relative
        self._latest.append(tuple(one - first for one in arrivals))
        choice = replace(self.choice, lateness=self._latest[-1])
        if len(self._changes[0]) >= LEAST_REMEMBERED:
            late = [rank for rank in choice.way.late if rank not in choice.way.narrow]
            if late and max(map(partial(_behind, late), self._latest)) < choice.wrong_guess:
                choice = replace(self._usual, lateness=choice.lateness)
            choice = self._decide(choice)
        is_usual = choice.way == self.choice.way == self._usual.way
        self.asks = is_usual and self._durations.is_time_to_measure(took, is_round_a_port=bool(choice.way.late))
        if choice.way != self.choice.way:
            self._durations.forget()
        self.choice = choice
        self.digest = zlib.crc32(repr((self.digest, arrivals, took, choice.way)).encode())

    def measured(self, ports: Ports) -> None:
        """Take the ports as they are now, and decide how the next sum is made."""
        was_usual, self._ports = self.choice.way == self._usual.way, ports
        self._priced.clear()
        self._durations = _SumSeconds(self._durations.between)
        self._usual = self._without_late_ranks()
        if was_usual:
            self.choice = replace(self._usual, lateness=self.choice.lateness)
        self.asks = False
        self.digest = zlib.crc32(repr((self.digest, ports, self.choice.way)).encode())

    @property
    def _noise(self) -> float:
        """The median change of a rank's arrival from step to step, seconds, of the rank where it is largest."""
        return max(median_high(changes) for changes in self._changes)

    def held_bytes(self, way: SumWay) -> int:
        """Return the most bytes of terms that a rank holds until a late one arrives: of its own parts those of other owners."""
        owners = self._ports.ranks - len(way.late)
        return self._nbytes * (owners - 1) // owners

    def bucket_of(self, way: SumWay) -> int:
        """Return the bytes of a bucket with which a sum has a way's parts; a bucket has as many as there are ranks."""
        return self._bucket or math.ceil(self._nbytes * self._ports.ranks / way.parts)

    def _without_late_ranks(self) -> SumChoice:
        """Return the choice where nobody is late: direct, unless a port is narrow and another way gains enough."""
        direct, widest = SumChoice(self._direct), min(self._ports.per_byte)
        if max(self._ports.per_byte) == widest:
            return direct
        case = SumCase(self._nbytes, self._ports)
        alike = SumCase(self._nbytes, Ports(self._ports.latency, (widest,) * self._ports.ranks))
        prices = self._prices(case)
        best, now = self._best(prices), self._seconds(case, self._direct)
        direct = replace(direct, seconds=_by_name(prices))
        if best is None or not best[0].has_lanes:
            return direct
        wrong = max(0.0, self._seconds(alike, best[0]) - self._seconds(alike, self._direct))
        is_worth = best[1] < _NEAR * now and PAYING_STEPS * (now - best[1]) >= wrong
        return SumChoice(best[0], (), direct.seconds, wrong) if is_worth else direct

    def _decide(self, choice: SumChoice) -> SumChoice:
        """Return the choice with the best way for ranks that are late by now, if it gains enough."""
        delays = self._delays()
        if not any(delays):
            return choice
        case, nobody = SumCase(self._nbytes, replace(self._ports, arrivals=delays)), SumCase(self._nbytes, self._ports)
        if delays not in self._priced:
            while len(self._priced) >= _MOST_KEPT:
                del self._priced[next(iter(self._priced))]
            self._priced[delays] = self._prices(case)
        choice = replace(choice, seconds=_by_name(self._priced[delays]))
        best = self._best(self._priced[delays])
        if best is None or best[0] == choice.way:
            return choice
        (way, seconds), now, last = best, self._seconds(case, choice.way), max(delays)
        wrong = max(0.0, self._seconds(nobody, way) - self._seconds(nobody, self._usual.way))
        if choice.way != self._usual.way:
            is_worth = seconds - last < _NEAR * (now - last)
        else:
            is_worth = seconds < now and PAYING_STEPS * (now - seconds) >= wrong
        return replace(choice, way=way, wrong_guess=wrong) if is_worth else choice

    def _prices(self, case: SumCase) -> list[tuple[SumWay, float]]:
        """Return each algorithm, in buckets, and when the last rank has the sum, the shortest first."""
        prices = [(way, self._seconds(case, way)) for way in map(self._in_buckets, self._ways(case))]
        return sorted(prices, key=lambda price: price[1])

    def _best(self, prices: Sequence[tuple[SumWay, float]]) -> tuple[SumWay, float] | None:
        """Return the shortest way that may be taken in place of direct."""
        return next((one for one in prices if one[0].algorithm == TAKEN and self.held_bytes(one[0]) <= self._memory), None)

    def _ways(self, case: SumCase) -> list[SumWay]:
        """Return each algorithm with the ranks that own nothing in it, and its number of parts."""
        ranks = self._ports.ranks
        if ranks <= _MOST_RANKS:
            return [price.way for price in case.prices]
        late = min(case.late_sets(), key=lambda late: case.expected(case.way("streamed", late)))
        return [self._direct, case.way("streamed", late), *([case.way("merge", late)] if len(late) == 1 else [])]

    def _seconds(self, case: SumCase, way: SumWay) -> float:
        """Return when the last rank has the sum."""
        return case.price(way).seconds if self._ports.ranks <= _MOST_RANKS else case.expected(way)

    def _in_buckets(self, way: SumWay) -> SumWay:
        """Return a way with a number of parts that buckets have; direct stays as it is.

        The number of buckets is a power of two. So there are few sizes of messages, for each of which a transport keeps memory.
        """
        ranks = self._ports.ranks
        if way == self._direct:
            return way
        if self._bucket is not None:
            return replace(way, parts=ranks * math.ceil(self._nbytes / self._bucket))
        most = max(1, self._nbytes // LEAST_BYTES)
        buckets = min(most, max(1.0, way.parts / ranks))
        return replace(way, parts=ranks << min(round(math.log2(buckets)), most.bit_length() - 1))

    def _delays(self) -> tuple[float, ...]:
        """Return the seconds by which each rank is late, at least, in the latest steps; all 0 if none is."""
        ranks = self._ports.ranks
        last_first = sorted(range(ranks), key=lambda rank: -min(step[rank] for step in self._latest))
        for count in range(ranks - 2, 0, -1):
            late = last_first[:count]
            behind = min(map(partial(_behind, late), self._latest))
            if behind > 0 and behind > NOISES * self._noise:
                owners = last_first[count:]
                return tuple(_rounded(self._least(rank, owners)) if rank in late else 0.0 for rank in range(ranks))
        return (0.0,) * ranks

    def _least(self, rank: int, owners: Sequence[int]) -> float:
        return min(step[rank] - max(step[owner] for owner in owners) for step in self._latest)


def _behind(late: Sequence[int], step: Sequence[float]) -> float:
    """Return the seconds by which the first of some ranks came later than the last of all others; below 0 if earlier."""
    return min(step[rank] for rank in late) - max(one for rank, one in enumerate(step) if rank not in late)


def _rounded(seconds: float) -> float:
    mantissa, exponent = math.frexp(seconds)
    return math.ldexp(math.floor(mantissa * 2 * _FINENESS), exponent) / (2 * _FINENESS)


def _by_name(prices: Sequence[tuple[SumWay, float]]) -> tuple[tuple[str, float], ...]:
    return tuple((way.algorithm, seconds) for way, seconds in prices)
