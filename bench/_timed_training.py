"""Real training whose updates and moments the simulated clock says: which microbatches are in each, how old, and when."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, islice

import torch
from _text_lanes import STAGE_ENDS, LaneOptimizer, TextTask
from torch import Tensor

from adaptra.planning.synchrony.clock import ReplicaPart, TimedUpdate

_SMOOTHED = 5
"""Losses in a row that are averaged, since each of them goes up and down with the last batch."""
OUTER_RATE, OUTER_MOMENTUM = 0.7, 0.9
"""DiLoCo's published outer optimizer: SGD with Nesterov momentum."""


@dataclass(frozen=True)
class Recipe:
    """How all lanes train.

    Attributes:
        task: The text and the model.
        seed: Of the first parameters and of the data.
        rates: The learning rates, one lane each.
        replicas: The number of replicas.
        whole: The microbatches of an update that has all of them.
        all_divide: Whether a sum is divided by all replicas, as in STAR's code, or by those that are in it.
        momentum: Of SGD.
        adam: Adam in place of SGD.
        fragments: Into how many parts an exchange of local steps is divided. Each has its turn, so that they spread.
        outer: Learning rate and momentum of local steps' outer optimizer.
        every: Microbatches after which the loss is taken, at the next update with an exchange.
        most: Microbatches after which training ends.
        target: The loss at which it ends before. Lanes that take much longer than the first are left out.
        start: The first parameters, unless they are those of the seed.
    """

    task: TextTask
    seed: int
    rates: tuple[float, ...]
    replicas: int
    whole: int
    all_divide: bool = True
    momentum: float = 0.0
    adam: bool = False
    fragments: int = 1
    outer: tuple[float, float] = (OUTER_RATE, OUTER_MOMENTUM)
    every: int = 256
    most: int = 50_000
    target: float = 0.0
    start: Tensor | None = None

    @property
    def first(self) -> Tensor:
        """The first parameters of each lane."""
        return (self.task.start([self.seed]) if self.start is None else self.start).repeat(len(self.rates), 1)


@dataclass(frozen=True)
class Curve:
    """How the losses of all lanes fall.

    Attributes:
        updates: The updates until each loss was taken.
        moments: The simulated seconds until then.
        microbatches: The microbatches that were in updates until then.
        losses: (moments, lanes).
    """

    updates: tuple[int, ...]
    moments: tuple[float, ...]
    microbatches: tuple[int, ...]
    losses: Tensor

    def at_moments_of(self, updates: Iterable[TimedUpdate]) -> Curve:
        """Return the curve of another clock whose updates have the same microbatches."""
        moments = [update.moment for update in islice(updates, self.updates[-1])]
        return replace(self, moments=tuple(moments[count - 1] if count else 0.0 for count in self.updates))

    def times_to(self, target: float) -> list[float]:
        """Return when each lane's loss reaches the target; infinite if it doesn't."""
        return [self._crossing(lane, target, self.moments) for lane in range(self.losses.shape[1])]

    def updates_to(self, target: float) -> list[float]:
        """Return how many updates each lane takes to the target; infinite if it doesn't reach it."""
        return [self._crossing(lane, target, self.updates) for lane in range(self.losses.shape[1])]

    def loss_after(self, microbatches: int) -> list[float]:
        """Return each lane's smoothed loss once so many microbatches were in updates."""
        where = next((index for index, count in enumerate(self.microbatches) if count >= microbatches), len(self.losses) - 1)
        begin = max(0, where - _SMOOTHED + 1)
        return self.losses[begin : where + 1].mean(0).tolist()

    def _crossing(self, lane: int, target: float, axis: Sequence[float]) -> float:
        losses = self.losses[:, lane].tolist()
        before: tuple[float, float] | None = None
        for end in range(_SMOOTHED, len(losses) + 1):
            place = sum(axis[end - _SMOOTHED : end]) / _SMOOTHED
            loss = sum(losses[end - _SMOOTHED : end]) / _SMOOTHED
            if loss <= target:
                if before is None:
                    return place
                return before[0] + (place - before[0]) * (before[1] - target) / (before[1] - loss)
            if math.isfinite(loss):
                before = place, loss
        return math.inf


class Ledger:
    """Checks what is in updates: each microbatch once, in the order of its replica, with gradients as old as is said.

    Args:
        replicas: The number of replicas.
        limit: The largest age; None is no limit.
    """

    def __init__(self, replicas: int, limit: int | None) -> None:
        self._limit = limit
        self._taken = [0] * replicas
        self._began = [0] * replicas
        self.updates = self.microbatches = self.most_age = 0

    @property
    def oldest(self) -> int:
        """The number of the oldest parameters that a replica computes with."""
        return min(self._began)

    def add(self, update: TimedUpdate) -> None:
        """Take in the next update.

        Raises:
            ValueError: Something of it is not as it must be.
        """
        for one, microbatches, age in update.parts:
            if microbatches.start != self._taken[one] or not microbatches:
                raise ValueError(
                    f"update {self.updates}: replica {one} has {microbatches}, expected {self._taken[one]} to be first"
                )
            if age != self.updates - self._began[one] or (self._limit is not None and age > self._limit):
                raise ValueError(f"update {self.updates}: gradients of replica {one} have age {age}, at most {self._limit}")
            self._taken[one], self._began[one] = microbatches.stop, self.updates + 1
            self.most_age = max(self.most_age, age)
        self.updates, self.microbatches = self.updates + 1, self.microbatches + update.microbatches


def train(recipe: Recipe, updates: Iterable[TimedUpdate], ledger: Ledger) -> Curve:
    """Train one model in each lane: all gradients of an update change the same parameters.

    Raises:
        ValueError: An update has what it must not have.
    """
    rates = torch.tensor(recipe.rates)[:, None]
    parameters = recipe.first
    optimizer = LaneOptimizer(rates, recipe.momentum, adam=recipe.adam)
    versions = {0: parameters}
    record = _Record(recipe, ledger)
    record.take(0.0, parameters)
    for number, update in enumerate(updates):
        ledger.add(update)
        gradient = update_gradient(recipe, update.parts, number, versions)
        scale = update.microbatches / recipe.whole if recipe.all_divide else 1.0
        parameters = optimizer.change(parameters, gradient * scale if scale != 1 else gradient)
        versions[number + 1] = parameters
        for old in [one for one in versions if one < ledger.oldest]:
            del versions[old]
        if record.take(update.moment, parameters):
            break
    return record.curve


def update_gradient(recipe: Recipe, parts: Iterable[ReplicaPart], number: int, versions: dict[int, Tensor]) -> Tensor:
    """Return the mean gradient of all rows of an update, each by the parameters that its replica had."""
    ordered = sorted(parts, key=lambda part: (part.age, part.replica))
    rows = sum(len(part.microbatches) for part in ordered) * recipe.task.rows
    weight, total = 0.0, torch.zeros(())
    for age, of_age in groupby(ordered, key=lambda part: part.age):
        inputs, targets = _rows_of(recipe, of_age)
        weight += len(targets) / rows
        total = total + recipe.task.gradient(versions[number - age], inputs[None], targets[None]) / rows
    if abs(weight - 1) > 1e-9:
        raise ValueError(f"update {number}: weights add up to {weight}, expected 1")
    return total


def train_locally(recipe: Recipe, updates: Iterable[TimedUpdate], ledger: Ledger) -> Curve:
    """Train a model of each replica in each lane. In an exchange one fragment's mean change is a step of the outer optimizer.

    Raises:
        ValueError: An update has what it must not have.
    """
    task, lanes, replicas = recipe.task, len(recipe.rates), recipe.replicas
    shared = recipe.first
    local = shared.repeat_interleave(replicas, 0)
    inner = LaneOptimizer(torch.tensor(recipe.rates).repeat_interleave(replicas)[:, None], recipe.momentum, adam=recipe.adam)
    pieces = _fragments(recipe.fragments)
    rate, momentum = recipe.outer
    outers = [LaneOptimizer(torch.tensor(rate), momentum, nesterov=momentum > 0) for _ in pieces]
    record = _Record(recipe, ledger)
    record.take(0.0, shared)
    exchanges = 0
    for update in updates:
        ledger.add(update)
        batches = [_rows_of(recipe, [part]) for part in update.parts]
        inputs = torch.stack([one for one, _ in batches]).repeat(lanes, 1, 1)
        targets = torch.stack([one for _, one in batches]).repeat(lanes, 1)
        local = inner.change(local, task.gradient(local, inputs, targets) / targets.shape[1])
        if not update.exchanged:
            continue
        piece = exchanges % len(pieces)
        exchanges += 1
        of_replicas = local.unflatten(0, (lanes, replicas))
        part, shared = pieces[piece], shared.clone()
        shared[:, part] = outers[piece].change(shared[:, part], shared[:, part] - of_replicas[..., part].mean(1))
        of_replicas[..., part] = shared[:, None, part]
        if record.take(update.moment, shared):
            break
    return record.curve


def _fragments(count: int) -> list[slice]:
    """Return the parameters of each fragment: all, or those of each stage."""
    if count == 1:
        return [slice(0, STAGE_ENDS[-1])]
    if count != len(STAGE_ENDS):
        raise ValueError(f"{count} fragments: expected 1, or {len(STAGE_ENDS)}, one for each stage")
    return [slice(begin, end) for begin, end in zip((0, *STAGE_ENDS), STAGE_ENDS, strict=False)]


def _rows_of(recipe: Recipe, parts: Iterable[ReplicaPart]) -> tuple[Tensor, Tensor]:
    """Return the inputs and targets of some parts. Each replica has its own share of the text."""
    numbers = [one * recipe.replicas + part.replica for part in parts for one in part.microbatches]
    return recipe.task.batch(recipe.seed, torch.tensor(numbers))


class _Record:
    """Takes losses every so many microbatches, and says when all lanes that count are there."""

    def __init__(self, recipe: Recipe, ledger: Ledger) -> None:
        self._recipe, self._ledger = recipe, ledger
        self._rows: list[tuple[int, float, int, Tensor]] = []
        self._next = 0
        self._most = recipe.most

    def take(self, moment: float, parameters: Tensor) -> bool:
        """Take the loss if it is time to. Returns whether training ends."""
        done = self._ledger.microbatches
        if done < self._next:
            return False
        self._next = done - done % self._recipe.every + self._recipe.every
        self._rows.append((self._ledger.updates, moment, done, self._recipe.task.loss(parameters)))
        losses = torch.stack([row[3] for row in self._rows[-_SMOOTHED:]]).mean(0)
        if len(self._rows) >= _SMOOTHED and bool((losses <= self._recipe.target).any()):
            self._most = min(self._most, int(1.5 * done) + _SMOOTHED * self._recipe.every)
        return done >= self._most

    @property
    def curve(self) -> Curve:
        """All that was taken."""
        updates, moments, microbatches, losses = zip(*self._rows, strict=True)
        return Curve(updates, moments, microbatches, torch.stack(losses))
