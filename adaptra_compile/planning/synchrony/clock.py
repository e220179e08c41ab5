"""The simulated clock: when updates happen in each mode, and which microbatches are in them, from drawn times of steps.

All modes see the same times: the n-th step of a replica takes as long in each of them. :func:`updates_of` yields the updates
one by one, for whoever trains beside the clock. :func:`pace_of` takes means over them.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, cycle, islice
from operator import mul
from typing import Final, NamedTuple

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


class ReplicaPart(NamedTuple):
    """What one replica has in an update.

    Attributes:
        replica: The replica whose microbatches they are, whoever computes them.
        microbatches: Their numbers in the order in which the replica takes its data. None is left out: one that an update
            goes without is the first of a later one.
        age: How many updates old the parameters are that the gradients are of.
    """

    replica: int
    microbatches: range
    age: int


@dataclass(frozen=True, slots=True)
class TimedUpdate:
    """An update, and when it happens.

    Attributes:
        moment: Seconds from the start until the replicas in it have its parameters.
        parts: What each replica has in it.
        exchanged: Whether replicas exchange in it. Without, each replica changes its own parameters.
    """

    moment: float
    parts: tuple[ReplicaPart, ...]
    exchanged: bool = True

    @property
    def microbatches(self) -> int:
        """How many microbatches are in it."""
        return sum(len(part.microbatches) for part in self.parts)

    @property
    def age(self) -> float:
        """The mean age of its gradients."""
        return sum(len(part.microbatches) * part.age for part in self.parts) / self.microbatches


@dataclass(frozen=True, slots=True)
class Pace:
    """How a mode goes on.

    Attributes:
        seconds: The mean time from one update to the next.
        updates: How many updates have so many samples and gradients of this mean age.
        most_age: The largest age of a gradient, in updates.
    """

    seconds: float
    updates: Mapping[tuple[float, float], int]
    most_age: int = 0

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


def updates_of(mode: Mode, case: SynchronyCase, times: StepTimes) -> Iterator[TimedUpdate]:
    """Yield one update after the other, without end: after the last of the times the first follows again."""
    match mode:
        case Synchronous(stealing=stealing):
            return _together(stolen if stealing else _by_shares, case, times)
        case XOrder(x=None, groups=groups, staleness=limit):
            return _reported(groups if isinstance(groups, tuple) else groups_by_speed(case.factors), 1, limit, case, times)
        case XOrder(x=x, staleness=limit):
            return _reported(tuple((one,) for one in range(case.replicas)), x or case.replicas, limit, case, times)
        case Deadline():
            return _until_deadline(mode, case, times)
        case Local(every=every):
            return _between_exchanges(every, case, times)


def pace_of(mode: Mode, case: SynchronyCase, times: StepTimes) -> Pace:
    """Return how a mode goes on when steps take these times: each time is in some update."""
    moment, updates, most = 0.0, Counter[tuple[float, float]](), 0
    samples = case.batch / case.microbatches
    for update in _until_used(mode, case, times):
        moment = update.moment
        updates[update.microbatches * samples, update.age] += 1
        most = max(most, *(part.age for part in update.parts))
    return Pace(moment / sum(updates.values()), updates, most)


def _until_used(mode: Mode, case: SynchronyCase, times: StepTimes) -> Iterator[TimedUpdate]:
    """Yield updates until each time is in some; in x-order, until the replica that is ahead has used all of its own."""
    updates = updates_of(mode, case, times)
    if not isinstance(mode, XOrder):
        every = mode.every if isinstance(mode, Local) else 1
        yield from islice(updates, math.ceil(len(times) / every) * every)
        return
    used, steps = math.inf, Counter[int]()
    for update in updates:
        if update.moment > used:
            return
        yield update
        steps.update(part.replica for part in update.parts)
        if max(steps.values()) >= len(times):
            used = update.moment


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


def _by_shares(row: Sequence[float], shares: Sequence[int], microbatches: int) -> float:
    """Return when the last microbatch ends if replicas compute their shares; arguments are those of :func:`stolen`."""
    return max(map(mul, row, shares)) / microbatches


def _together(
    last: Callable[[Sequence[float], Sequence[int], int], float], case: SynchronyCase, times: StepTimes
) -> Iterator[TimedUpdate]:
    """Yield updates that have all microbatches of a step. ``last`` says when these end."""
    now, shares = 0.0, shared_microbatches(case)
    for step, row in enumerate(cycle(times)):
        now += last(row, shares, case.microbatches) + case.exchange
        yield TimedUpdate(now, _whole_step(step, case))


def _whole_step(step: int, case: SynchronyCase) -> tuple[ReplicaPart, ...]:
    """Return the parts of an update that has all microbatches of every replica's step."""
    taken = _of_step(step, case)
    return tuple(ReplicaPart(replica, taken, 0) for replica in range(case.replicas))


def _of_step(step: int, case: SynchronyCase) -> range:
    """Return the microbatches of a replica's step, if each step before was whole."""
    return range(step * case.microbatches, (step + 1) * case.microbatches)


def _until_deadline(mode: Deadline, case: SynchronyCase, times: StepTimes) -> Iterator[TimedUpdate]:
    """Yield updates of steps in which replicas begin no more microbatches once a share is begun.

    What is begun is computed to its end. What a replica lacks then it takes first in its next step.
    """
    now, done, each = 0.0, [0] * case.replicas, case.microbatches
    for step, row in enumerate(cycle(times)):
        deferred = [step * each - one for one in done]
        counts = [one + 1 for one in deferred]
        ends = [count * moment / each for count, moment in zip(counts, row, strict=True)]
        begins = [(end, replica) for replica, end in enumerate(ends)]
        heapq.heapify(begins)
        for _ in range(mode.free(each, deferred)):
            begin, replica = heapq.heappop(begins)
            ends[replica] = begin + row[replica] / each
            counts[replica] += 1
            if counts[replica] < deferred[replica] + each:
                heapq.heappush(begins, (ends[replica], replica))
        now += max(ends) + case.exchange
        parts = (ReplicaPart(one, range(done[one], done[one] + counts[one]), 0) for one in range(case.replicas))
        yield TimedUpdate(now, tuple(parts))
        done = [one + count for one, count in zip(done, counts, strict=True)]


def _between_exchanges(every: int, case: SynchronyCase, times: StepTimes) -> Iterator[TimedUpdate]:
    """Yield local steps: all meet at an exchange only. One that isn't the last before it ends with the slowest replica's."""
    began = 0.0
    ends = [0.0] * case.replicas
    for step, row in enumerate(cycle(times)):
        ends = [end + moment for end, moment in zip(ends, row, strict=True)]
        exchanged = (step + 1) % every == 0
        began_next = began + max(ends) + case.exchange * exchanged
        yield TimedUpdate(began_next, _whole_step(step, case), exchanged)
        if exchanged:
            began, ends = began_next, [0.0] * case.replicas


def _reported(groups: Groups, x: int, limit: int | None, case: SynchronyCase, times: StepTimes) -> Iterator[TimedUpdate]:
    """Yield updates with what x groups report, whichever are first. A group reports once all of its replicas are done.

    An update waits for groups whose gradients would be too old in the next one.
    """
    steps, reports = [0] * len(groups), [0] * len(groups)
    began, waiting, now = [0] * len(groups), list[int](), 0.0

    def end(group: int, begin: float) -> tuple[float, int]:
        row = times[steps[group] % len(times)]
        steps[group] += 1
        return begin + max(row[replica] for replica in groups[group]), group

    ends = [end(group, 0.0) for group in range(len(groups))]
    heapq.heapify(ends)
    for number in count():
        while len(waiting) < x or (limit is not None and any(number - began[group] >= limit for _, group in ends)):
            now, group = heapq.heappop(ends)
            waiting.append(group)
        parts = (
            ReplicaPart(replica, _of_step(reports[group], case), number - began[group])
            for group in waiting
            for replica in groups[group]
        )
        yield TimedUpdate(now + case.exchange, tuple(parts))
        for group in waiting:
            began[group], reports[group] = number + 1, reports[group] + 1
            heapq.heappush(ends, end(group, now + case.exchange))
        waiting.clear()
