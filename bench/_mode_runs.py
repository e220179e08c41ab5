"""Runs of synchronisation modes over seeds and learning rates: times to a loss, and the best rate of each mode."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from statistics import fmean

from _table import Row, half_interval
from _text_lanes import TextTask
from _timed_training import Curve, Ledger, Recipe, train, train_locally
from rich.progress import Progress
from torch import Tensor

from adaptra.planning.synchrony.case import SynchronyCase
from adaptra.planning.synchrony.clock import StepTimes, capacity, draw_times, updates_of
from adaptra.planning.synchrony.modes import Local, Mode, Synchronous, XOrder

GRID = (0.57, 0.8, 1.13, 1.6, 2.26, 3.2)
"""Learning rates, each √2 times the one before."""


@dataclass(frozen=True)
class Contender:
    """A mode to train in.

    Attributes:
        name: What rows call it.
        mode: The mode.
        all_divide: Whether sums are divided by all replicas.
        fragments: Of local steps: the parts of an exchange, each with its turn.
    """

    name: str
    mode: Mode
    all_divide: bool = True
    fragments: int = 1


@dataclass(frozen=True)
class Setting:
    """What is slow, and what is trained.

    Attributes:
        name: What rows call it.
        case: What the clock sees.
        rows: The rows of a microbatch.
        target: The loss.
        noise: The share of rows whose next byte is drawn at random.
        grid: The learning rates, unless they are the usual ones.
        start: The first parameters, unless they are those of the seed.
        most: The most updates, in units of those with all microbatches.
    """

    name: str
    case: SynchronyCase
    rows: int
    target: float
    noise: float = 0.0
    grid: Sequence[float] = ()
    start: Tensor | None = None
    most: int = 1500

    @property
    def whole(self) -> int:
        """The microbatches of an update with all of them."""
        return self.case.replicas * self.case.microbatches


@dataclass
class Times:
    """Curves of all contenders in a setting, by seed.

    Attributes:
        setting: The setting.
        rates: The learning rates of the curves' lanes.
        curves: By contender, one curve for each seed.
        drawn: The times of steps, for each seed.
        oldest: The age of the oldest gradient.
        updates: How many updates were checked.
    """

    setting: Setting
    rates: tuple[float, ...]
    drawn: list[StepTimes]
    curves: dict[Contender, list[Curve]] = field(default_factory=dict[Contender, list[Curve]])
    oldest: int = 0
    updates: int = 0

    def at(self, one: Contender, rate: float) -> list[float]:
        """Return the time to the loss at a rate, for each seed."""
        lane = self.rates.index(rate)
        return [curve.times_to(self.setting.target)[lane] for curve in self.curves[one]]

    def best_rates(self) -> dict[Contender, float]:
        """Return the rate at which each contender takes least, in the mean over seeds."""
        return {one: min(self.rates, key=lambda rate: fmean(self.at(one, rate))) for one in self.curves}

    def losses_at(self, one: Contender, rate: float, other: Contender, other_rate: float) -> list[float]:
        """Return the loss after the tokens with which another contender reaches its loss; infinite where it doesn't."""
        lane, of_other = self.rates.index(rate), self.rates.index(other_rate)
        counts = [curve.updates_to(self.setting.target)[of_other] * self.setting.whole for curve in self.curves[other]]
        pairs = zip(self.curves[one], counts, strict=True)
        return [curve.loss_after(round(count))[lane] if math.isfinite(count) else math.inf for curve, count in pairs]

    def capacities(self) -> list[float]:
        """Return the seconds of an update if all were busy all the time, for each seed."""
        return [capacity(self.setting.case, self._used(times)) for times in self.drawn]

    def seconds(self, one: Contender) -> list[float]:
        """Return the mean seconds of an update, for each seed."""
        steps = [len(self._used(times)) for times in self.drawn]
        clocks = (updates_of(one.mode, self.setting.case, times) for times in self.drawn)
        return [next(islice(clock, count - 1, None)).moment / count for clock, count in zip(clocks, steps, strict=True)]

    def _used(self, times: StepTimes) -> StepTimes:
        """Return the times of those steps that training took."""
        return times[: max(curve.updates[-1] for one in self.curves for curve in self.curves[one] if is_whole(one.mode))]


class Runs:
    """Trains, and keeps what has been trained.

    Args:
        seeds: The number of seeds.
        rates: The usual grid of learning rates.
        momentum: Of SGD.
        adam: Adam in place of SGD.
        progress: Where to show how far it is.
    """

    def __init__(self, seeds: int, rates: tuple[float, ...], momentum: float, adam: bool, progress: Progress) -> None:
        self.seeds, self.rates, self.momentum, self.adam, self.progress = seeds, rates, momentum, adam, progress
        self.grids: list[str] = []
        self._tasks = dict[tuple[int, float], TextTask]()
        self._whole = dict[tuple[object, ...], tuple[Curve, Ledger]]()

    def task(self, rows: int, noise: float) -> TextTask:
        """Return the text with so many rows in a microbatch."""
        if (rows, noise) not in self._tasks:
            self._tasks[rows, noise] = TextTask(rows, noise)
            self._tasks[rows, noise].check_gradient()
        return self._tasks[rows, noise]

    def times(self, setting: Setting, contenders: Sequence[Contender]) -> Times:
        """Train in each mode with each seed and at each rate."""
        rates = tuple(setting.grid or self.rates)
        found = Times(setting, rates, [draw_times(setting.case, seed) for seed in range(self.seeds)])
        shown = self.progress.add_task(setting.name, total=len(contenders) * self.seeds)
        for one in contenders:
            found.curves[one] = []
            for seed in range(self.seeds):
                curve, ledger = self.train(setting, one, seed, found.drawn[seed], rates)
                found.curves[one].append(curve)
                found.oldest = max(found.oldest, ledger.most_age)
                found.updates += ledger.updates
                self.progress.advance(shown)
            if len(rates) == 1:
                continue
            means = (f"{rate:.3g}: {fmean(found.at(one, rate)):.4g}" for rate in rates)
            self.grids.append(f"{setting.name}: {one.name}: seconds by learning rate: {', '.join(means)}")
        self.progress.remove_task(shown)
        return found

    def train(
        self, setting: Setting, one: Contender, seed: int, times: StepTimes, rates: tuple[float, ...]
    ) -> tuple[Curve, Ledger]:
        """Train in one mode. Modes whose updates have the same microbatches of the same parameters are trained once."""
        key = (setting.rows, setting.noise, setting.target, setting.whole, setting.most, seed, rates)
        keeps = is_whole(one.mode) and setting.start is None
        if keeps and key in self._whole:
            curve, ledger = self._whole[key]
            check_whole(setting, one.mode, times, curve.updates[-1])
            return curve.at_moments_of(updates_of(one.mode, setting.case, times)), ledger
        limit = one.mode.staleness if isinstance(one.mode, XOrder) else None
        ledger = Ledger(setting.case.replicas, limit)
        recipe = Recipe(
            self.task(setting.rows, setting.noise),
            seed,
            rates,
            setting.case.replicas,
            setting.whole,
            all_divide=one.all_divide,
            momentum=self.momentum,
            adam=self.adam,
            fragments=one.fragments,
            every=(2 if setting.start is not None else 4) * setting.whole,
            most=setting.most * setting.whole,
            start=setting.start,
            target=setting.target,
        )
        if isinstance(one.mode, Local):
            # Exchanges of fragments spread over the interval: each takes its part of the time, and all meet for it.
            clock = updates_of(Local(one.mode.every // one.fragments), _spread(setting.case, one.fragments), times)
            return train_locally(recipe, clock, ledger), ledger
        curve = train(recipe, updates_of(one.mode, setting.case, times), ledger)
        if keeps:
            self._whole[key] = curve, ledger
            check_whole(setting, one.mode, times, curve.updates[-1])
        return curve, ledger


def is_whole(mode: Mode) -> bool:
    """Return whether all updates of a mode have all microbatches, of the newest parameters."""
    return isinstance(mode, Synchronous) or (isinstance(mode, XOrder) and mode.x is not None and mode.staleness is None)


def check_whole(setting: Setting, mode: Mode, times: StepTimes, count: int) -> None:
    """Check that all updates have all microbatches of the newest parameters.

    Raises:
        ValueError: One has not.
    """
    each = setting.case.microbatches
    for number, update in enumerate(islice(updates_of(mode, setting.case, times), count)):
        wanted = [(one, range(number * each, number * each + each), 0) for one in range(setting.case.replicas)]
        if sorted(update.parts) != wanted:
            raise ValueError(f"{mode}: update {number} has {update.parts}, expected all microbatches of the newest parameters")


def _spread(case: SynchronyCase, fragments: int) -> SynchronyCase:
    return (
        case
        if fragments == 1
        else SynchronyCase(
            case.replicas,
            case.phi,
            case.slow,
            case.jitter,
            case.pauses,
            case.batch,
            case.microbatches,
            case.seconds,
            case.exchange / fragments,
        )
    )


def interval(name: str, ours: Sequence[float], theirs: Sequence[float], bar: float | None) -> Row:
    """Return the row of a ratio: its mean over seeds, and how far Student's t reaches to both sides."""
    ratios = [one / other for one, other in zip(ours, theirs, strict=True)]
    if missed := sum(not math.isfinite(ratio) for ratio in ratios):
        return Row(f"{name}: the loss is not reached", missed, None if bar is None else 0, "seeds", len(ratios))
    half = half_interval(ratios)
    return Row(name, fmean(ratios), bar, "" if half is None else f"± {half:.3f}", len(ratios))
