"""Availability over time: failure traces, read or random, and the throughput of a job that lives through one.

All times are in seconds. A trace says which workers join and which are lost, and when. Its levels are the number of live
workers as a step function. A throughput by live workers, integrated over the levels, gives the samples of the whole run.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import groupby
from pathlib import Path
from typing import Final

from adaptra.errors import CaseError

DAY: Final = 86_400.0
"""Seconds of a day."""

_LINE: Final = re.compile(r"(0|[1-9][0-9]{0,14}),(add|remove),([^,\s]+)")


class MtbfOf(Enum):
    """Whose mean time between failures is given: one worker's, or that of all workers of the job together."""

    WORKER = "worker"
    JOB = "job"


@dataclass(frozen=True, slots=True)
class Change:
    """One line of a trace: a worker joins, or it is lost."""

    seconds: float
    joins: bool
    worker: str


@dataclass(frozen=True, slots=True)
class LiveWorkers:
    """The number of live workers from a time on, until the next level.

    Attributes:
        seconds: When it begins.
        workers: How many workers live.
        lost: How many were lost when it began; others may have joined at the same time.
    """

    seconds: float
    workers: int
    lost: int = 0


@dataclass(frozen=True)
class FailureTrace:
    """Which workers join and are lost, in the order of time.

    Attributes:
        changes: The changes, sorted by time.
        end: When the trace ends, in seconds.
    """

    changes: tuple[Change, ...]
    end: float

    def levels(self, most: int | None = None, join_delay: float = 0.0) -> tuple[LiveWorkers, ...]:
        """Return the live workers over time, one level for each time at which workers join or are lost.

        Args:
            most: The most workers that the job uses. Further ones count as live, but not in the levels.
            join_delay: Seconds from a worker's line to the time at which it can compute. One that is lost before never joins.
        """
        ready: set[str] = set()
        levels: list[LiveWorkers] = []
        for seconds, together in groupby(_delayed(self.changes, join_delay), key=lambda change: change.seconds):
            if seconds >= self.end:
                break
            changes = list(together)
            gone = {change.worker for change in changes if not change.joins} & ready
            ready -= gone
            ready |= {change.worker for change in changes if change.joins}
            workers = len(ready) if most is None else min(len(ready), most)
            if gone or not levels or levels[-1].workers != workers:
                levels.append(LiveWorkers(seconds, workers, len(gone)))
        return tuple(levels)


@dataclass(frozen=True, slots=True)
class TransitionCost:
    """What a change of the live workers costs: seconds in which no sample is computed.

    Attributes:
        lost: Seconds after workers are lost.
        joined: Seconds after workers join, if none are lost at the same time.
        samples_per_step: Samples of a step. If given, the step in which workers are lost is redone. Workers join between steps.
    """

    lost: float = 0.0
    joined: float = 0.0
    samples_per_step: float = 0.0


@dataclass(frozen=True)
class ThroughputOverTime:
    """The throughput of a job over a trace.

    Attributes:
        curve: Pairs of time in seconds and samples per second from then on. It is 0 during a transition.
        end: When the curve ends, in seconds.
        samples: The number of samples that count. Those of steps that are redone don't.
        transitions: How often the live workers changed.
        lost_seconds: Seconds of transitions and of steps that are redone.
    """

    curve: tuple[tuple[float, float], ...]
    end: float
    samples: float
    transitions: int
    lost_seconds: float

    @property
    def average(self) -> float:
        """The samples per second from the curve's beginning to its end."""
        seconds = self.end - self.curve[0][0]
        return self.samples / seconds if seconds > 0 else 0.0


def read_trace(path: str | Path) -> FailureTrace:
    """Read a trace: lines ``milliseconds,add|remove,name``, and lines of notes that begin with ``#``.

    The trace ends with its last line. Oobleck's published traces have this form.

    Raises:
        CaseError: The file can't be read, or a line has another form or contradicts those before it: names file and line.
    """
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text"
        raise CaseError(f"{path}: {reason}: expected lines 'milliseconds,add|remove,name'") from error
    changes: list[Change] = []
    live: set[str] = set()
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.startswith("#"):
            continue
        where = f"{path}, line {number}: {line!r}"
        match = _LINE.fullmatch(line.strip())
        if match is None:
            raise CaseError(f"{where}: expected 'milliseconds,add|remove,name', such as 601200,remove,node5")
        change = Change(int(match[1]) / 1000, match[2] == "add", match[3])
        if changes and change.seconds < changes[-1].seconds:
            raise CaseError(f"{where}: earlier than the line before: expected lines in the order of time")
        if change.joins == (change.worker in live):
            expected = "the name of a worker that is not live" if change.joins else "the name of a live worker"
            raise CaseError(f"{where}: expected {expected}")
        live ^= {change.worker}
        changes.append(change)
    if not changes:
        raise CaseError(f"{path}: no worker joins: expected lines 'milliseconds,add|remove,name'")
    return FailureTrace(tuple(changes), changes[-1].seconds)


def random_trace(workers: int, days: float, mtbf: float, mtbf_of: MtbfOf, repair: float, seed: int = 0) -> FailureTrace:
    """Draw a trace in which each live worker fails at random and returns once it is repaired.

    Times to failure have an exponential distribution. A mean of the job is that of all its workers live; with fewer live
    workers failures are as much rarer.

    Args:
        workers: How many workers there are. All live at the beginning.
        days: How long the trace is.
        mtbf: Mean time between failures in seconds.
        mtbf_of: Whether it is that of one worker or of the job.
        repair: Seconds from a failure to the worker's return.
        seed: Seed of all random choices.

    Raises:
        CaseError: A number is not positive, or the repair is negative.
    """
    for what, value in (("workers", workers), ("days", days), ("mtbf", mtbf)):
        if not 0 < value < math.inf:
            raise CaseError(f"{what}: {value:g}: expected a number above 0")
    if not 0 <= repair < math.inf:
        raise CaseError(f"repair: {repair:g} seconds: expected 0 or more")
    mean = mtbf if mtbf_of is MtbfOf.WORKER else mtbf * workers
    rng = random.Random(seed)
    end = days * DAY
    changes = [Change(0.0, True, f"worker{worker}") for worker in range(workers)]
    for worker in range(workers):
        seconds = rng.expovariate(1 / mean)
        while seconds < end:
            changes.append(Change(seconds, False, f"worker{worker}"))
            seconds += repair
            if seconds >= end:
                break
            changes.append(Change(seconds, True, f"worker{worker}"))
            seconds += rng.expovariate(1 / mean)
    return FailureTrace(tuple(sorted(changes, key=lambda change: change.seconds)), end)


def throughput_over(
    levels: Sequence[LiveWorkers], end: float, throughput: Callable[[int], float], cost: TransitionCost | None = None
) -> ThroughputOverTime:
    """Integrate a throughput over the levels of a trace.

    Each level after the first begins with a transition. If another level follows before the transition is over, it begins anew.

    Args:
        levels: The live workers over time, at least one level.
        end: When the run ends, in seconds.
        throughput: Samples per second by the number of live workers.
        cost: What a transition costs; nothing by default.

    Raises:
        CaseError: There is no level, or the end is before the last one.
    """
    if not levels or end < levels[-1].seconds:
        raise CaseError(f"{len(levels)} levels that end after {end:g} s: expected at least one, and an end after the last")
    cost = cost or TransitionCost()
    curve: list[tuple[float, float]] = []
    samples = lost_seconds = 0.0
    until = [level.seconds for level in levels[1:]] + [end]
    fails = [level.lost > 0 for level in levels[1:]] + [False]
    for index, (level, stop, redone) in enumerate(zip(levels, until, fails, strict=True)):
        pause = 0.0 if index == 0 else cost.lost if level.lost else cost.joined
        pause = min(pause, stop - level.seconds)
        if pause > 0:
            curve.append((level.seconds, 0.0))
        rate = throughput(level.workers)
        curve.append((level.seconds + pause, rate))
        done = rate * (stop - level.seconds - pause)
        if redone and cost.samples_per_step > 0 and rate > 0:
            unfinished = math.fmod(done, cost.samples_per_step)
            lost_seconds += unfinished / rate
            done -= unfinished
        samples += done
        lost_seconds += pause
    return ThroughputOverTime(tuple(curve), end, samples, len(levels) - 1, lost_seconds)


def _delayed(changes: Iterable[Change], delay: float) -> Iterable[Change]:
    """Return the changes in the order of time, joins after a delay, without the joins of workers that are lost before."""
    lost_at: dict[str, float] = {}
    kept: list[Change] = []
    for change in reversed(list(changes)):
        if not change.joins:
            lost_at[change.worker] = change.seconds
            kept.append(change)
        elif (ready := change.seconds + delay) < lost_at.pop(change.worker, math.inf):
            kept.append(Change(ready, True, change.worker))
    return sorted(kept, key=lambda change: change.seconds)
