"""The simulated clock: seconds of an update in each mode, its samples and the age of its gradients, from drawn times of steps.

All modes see the same times: the n-th step of a replica takes as long in each of them.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import mul
from typing import Final

from adaptra.planning.synchrony.case import SynchronyCase
from adaptra.planning.synchrony.modes import Deadline, Groups, Local, Mode, Synchronous, XOrder

_MOST_STEPS: Final = 2000
_LEAST_STEPS: Final = 64
_MOST_MICROBATCHES: Final = 300_000
"""Microbatches that are drawn in all, so that a large case takes a second or two."""
_GAP: Final = 1 / 6
"""Replicas are of one group if the time of a step differs less, in units of the fastest: STAR's 50 ms of 300 ms."""

StepTimes = Sequence[Sequence[float]]
"""The seconds of each step of each replica: one row per step."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How a mode goes on.

    Attributes:
        seconds: The mean time from one update to the next.
        updates: How many updates have so many samples and gradients of this mean age.
        most_age: The largest age of a gradient, in updates.
        anew: The share of steps whose gradients were too old and were computed anew.
    """

    seconds: float
    updates: Mapping[tuple[float, float], int]
    most_age: int = 0
    anew: float = 0.0

    @property
    def samples(self) -> float:
        """The mean samples of an update."""
        return sum(samples * count for (samples, _), count in self.updates.items()) / sum(self.updates.values())

    @property
    def age(self) -> float:
        """The mean age of a gradient, by samples."""
        weights = [(samples * count, age) for (samples, age), count in self.updates.items()]
        return sum(weight * age for weight, age in weights) / sum(weight for weight, _ in weights)


def draw_times(case: SynchronyCase, seed: int = 0) -> StepTimes:
    """Draw the seconds of the steps of all replicas. Without jitter and pauses each takes its usual time."""
    chance = random.Random(seed)
    count = min(_MOST_STEPS, max(_LEAST_STEPS, _MOST_MICROBATCHES // (case.replicas * case.microbatches)))

    def step(factor: float) -> float:
        moment = factor * chance.lognormvariate(0, case.jitter) if case.jitter else factor
        pause = chance.paretovariate(1.5) - 1 if case.pauses and chance.random() < case.pauses else 0.0
        return case.seconds * (moment + pause)

    factors = case.factors
    return [[step(factor) for factor in factors] for _ in range(count)]


def pace_of(mode: Mode, case: SynchronyCase, times: StepTimes) -> Pace:
    """Return how a mode goes on when steps take these times."""
    match mode:
        case Synchronous(stealing=stealing):
            shares, count = shared_microbatches(case), case.microbatches
            moments = [stolen(row, shares, count) if stealing else max(map(mul, row, shares)) / count for row in times]
            return Pace(sum(moments) / len(moments) + case.exchange, {(case.replicas * case.batch, 0.0): len(moments)})
        case XOrder(x=None, groups=groups, staleness=limit):
            return _grouped(groups_by_speed(case.factors) if isinstance(groups, bool) else groups, limit, case, times)
        case XOrder(x=x, staleness=limit):
            return _in_order(x or case.replicas, limit, case, times)
        case Deadline(quorum=quorum):
            counts = [_by_quorum(row, case.microbatches, quorum) for row in times]
            seconds = sum(moment for moment, _ in counts) / len(counts) + case.exchange
            samples = case.batch / case.microbatches
            return Pace(seconds, Counter((count * samples, 0.0) for _, count in counts))
        case Local(every=every):
            return _between_exchanges(every, case, times)


def capacity(case: SynchronyCase, times: StepTimes) -> float:
    """Return the seconds below which no exact update goes: all replicas are busy, with fractions of microbatches."""
    return sum(case.replicas / sum(1 / moment for moment in row) for row in times) / len(times) + case.exchange


def shared_microbatches(case: SynchronyCase) -> list[int]:
    """Return how many microbatches each replica computes if lasting slowness is known."""
    counts, factors = [0] * case.replicas, case.factors
    ends = [(factor, replica) for replica, factor in enumerate(factors)]
    heapq.heapify(ends)
    for _ in range(case.replicas * case.microbatches):
        end, replica = ends[0]
        counts[replica] += 1
        heapq.heapreplace(ends, (end + factors[replica], replica))
    return counts


def groups_by_speed(times: Sequence[float], gap: float | None = None) -> Groups:
    """Return groups of replicas whose times differ by less than the gap, the fastest first.

    Args:
        times: The time of a step of each replica.
        gap: The largest difference within a group; by default a sixth of the fastest time.
    """
    gap = _GAP * min(times) if gap is None else gap
    groups: list[list[int]] = []
    for replica in sorted(range(len(times)), key=lambda one: (times[one], one)):
        if groups and times[replica] - times[groups[-1][0]] < gap:
            groups[-1].append(replica)
        else:
            groups.append([replica])
    return tuple(map(tuple, groups))


def stolen(row: Sequence[float], shares: Sequence[int], microbatches: int) -> float:
    """Return when the last microbatch ends if replicas that are done take microbatches that others have not begun.

    The first that is done takes one from that which would be done last, if it is done with it sooner. So no step takes longer
    than without.

    Args:
        row: The seconds of a step of each replica, with its own microbatches only.
        shares: The microbatches that each begins with.
        microbatches: The microbatches of one replica.
    """
    each = [moment / microbatches for moment in row]
    own = [*shares]
    ends = [share * moment for share, moment in zip(shares, each, strict=True)]
    first_done = [(end, replica) for replica, end in enumerate(ends)]
    last_done = [(-end, replica) for replica, end in enumerate(ends)]
    heapq.heapify(first_done)
    heapq.heapify(last_done)
    while first_done:
        now, thief = heapq.heappop(first_done)
        if now != ends[thief]:  # it has given one away since, and stands further ahead
            continue
        while -last_done[0][0] != ends[last_done[0][1]]:
            heapq.heappop(last_done)
        last, owner = -last_done[0][0], last_done[0][1]
        if now + each[thief] >= last:
            continue
        if own[owner] <= math.floor(now / each[owner]) + 1:  # it has begun all: nobody can end the step sooner
            break
        own[owner] -= 1
        for replica, more in ((owner, -each[owner]), (thief, each[thief])):
            ends[replica] += more
            heapq.heappush(first_done, (ends[replica], replica))
            heapq.heappush(last_done, (-ends[replica], replica))
    return max(ends)


def _by_quorum(row: Sequence[float], microbatches: int, quorum: float) -> tuple[float, int]:
    """Return when the quorum is in, and how many microbatches are then."""
    ends = sorted(moment * (1 + done) / microbatches for moment in row for done in range(microbatches))
    moment = ends[math.ceil(quorum * len(ends)) - 1]
    return moment, sum(end <= moment for end in ends)


def _between_exchanges(every: int, case: SynchronyCase, times: StepTimes) -> Pace:
    """Return the pace of local steps: all meet at an exchange only."""
    rounds = list(_rounds(every, times))
    moments = [max(map(sum, zip(*rows, strict=True))) for rows in rounds]
    seconds = (sum(moments) / len(moments) + case.exchange) / every
    return Pace(seconds, {(case.replicas * case.batch, 0.0): len(moments) * every})


def _rounds(every: int, times: StepTimes) -> Iterator[StepTimes]:
    """Yield the steps between exchanges; times are taken again from the first on until each has been in some."""
    for begin in range(0, len(times), every):
        yield [times[step % len(times)] for step in range(begin, begin + every)]


def _in_order(x: int, limit: int | None, case: SynchronyCase, times: StepTimes) -> Pace:
    """Return the pace of updates that happen when x replicas have reported, whichever they are."""
    return _reported(tuple((replica,) for replica in range(case.replicas)), x, limit, case, times)


def _grouped(groups: Groups, limit: int | None, case: SynchronyCase, times: StepTimes) -> Pace:
    """Return the pace of groups that update by themselves, each with what all of its replicas report."""
    return _reported(groups, 1, limit, case, times)


def _reported(groups: Groups, x: int, limit: int | None, case: SynchronyCase, times: StepTimes) -> Pace:
    """Play reports, of which x are an update, until the group that is ahead has used all times."""
    steps, updates, anew, most, now = [0] * len(groups), Counter[tuple[float, float]](), 0, 0, 0.0
    began, waiting, ahead = [0] * len(groups), list[int](), 0

    def end(group: int, begin: float) -> tuple[float, int]:
        nonlocal ahead
        row = times[steps[group] % len(times)]
        steps[group] += 1
        ahead = max(ahead, steps[group])
        return begin + max(row[replica] for replica in groups[group]), group

    ends = [end(group, 0.0) for group in range(len(groups))]
    heapq.heapify(ends)
    count = 0
    while ahead <= len(times) or not count or ends[0][0] <= now:
        now, group = heapq.heappop(ends)
        if limit is not None and count - began[group] > limit:
            anew, began[group] = anew + 1, count
            heapq.heappush(ends, end(group, now))
            continue
        waiting.append(group)
        if len(waiting) < x:
            continue
        sizes = [len(groups[one]) for one in waiting]
        ages = [count - began[one] for one in waiting]
        reports = sum(sizes)
        updates[reports * case.batch, sum(size * age for size, age in zip(sizes, ages, strict=True)) / reports] += 1
        most, count = max(most, *ages), count + 1
        for one in waiting:
            began[one] = count
            heapq.heappush(ends, end(one, now + case.exchange))
        waiting.clear()
    return Pace((now + case.exchange) / count, updates, most, anew / sum(steps))
