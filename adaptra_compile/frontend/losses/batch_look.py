"""A look at each batch: whether the mean over its microbatches' losses is its own, as it isn't where labels are padding."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from adaptra.frontend.losses.label_weights import LabelPlaces, WeightGraph, Weights, weights_of
from adaptra.frontend.shapes.shapes import ShapedBatch
from adaptra.graph import CompiledStages
from adaptra.runtime.devices.read_later import ReadLater
from adaptra.runtime.worker.stages.loss_reduction import UNEQUAL

logger = logging.getLogger(__name__)

MOST_LABELS: Final = 2**20
"""The most labels that each step counts. Of larger batches every second, third, … one is looked at."""

_MOST_SHAPES: Final = 128


@dataclass(frozen=True, slots=True)
class _Counted:
    """What was counted of a batch: a value for each row or for each microbatch, which may not be computed yet."""

    values: ReadLater
    rows: tuple[int, ...]
    counts_labels: bool

    def weights(self) -> Weights:
        values = self.values.wait()
        if len(values) != len(self.rows):
            values = torch.stack([one.sum() for one in values.split(list(self.rows))])
        return Weights(tuple(float(one) for one in values.tolist()), self.rows, self.counts_labels)


class BatchLook:
    """Looks at batches until one has microbatches of unequal weights, and then warns once.

    Counts on a GPU are read in a later step, once they have arrived, so that no step waits for them.

    Args:
        compiled: The stages of the first shape, which say how many inputs a batch has.
    """

    def __init__(self, compiled: CompiledStages) -> None:
        self._inputs = len(compiled.inputs.specs)
        self._done = False
        self._seen = 0
        self._parts: dict[int, tuple[LabelPlaces | WeightGraph, ...]] = {}
        self._waiting: list[_Counted] = []

    def end(self) -> None:
        """Look at no further batch."""
        self._done = True

    def at(self, batch: ShapedBatch) -> None:
        """Look at a batch of a step. What this process doesn't have of it is not looked at."""
        if self._done:
            return
        try:
            self._waiting += self._counted(batch)
            self._read()
        except Exception as error:  # a look is no reason to end a step
            logger.debug("batches are not looked at: %s", error)
            self._done = True

    def _counted(self, batch: ShapedBatch) -> list[_Counted]:
        parts = self._parts.get(batch.number)
        if parts is None:
            if len(self._parts) >= _MOST_SHAPES:
                self._parts.clear()
            parts = self._parts[batch.number] = weights_of(batch.outputs_by)
        if not parts:
            return []
        count = max(len(batch.inputs), len(batch.targets))
        inputs: Sequence[Sequence[Any]] = batch.inputs or ((None,) * self._inputs,) * count
        targets: Sequence[Sequence[Any]] = batch.targets or ((),) * count
        microbatches = [(*one, *other) for one, other in zip(inputs, targets, strict=True)]
        self._seen += 1
        return [one for part in parts if (one := _count(part, microbatches, self._seen)) is not None]

    def _read(self) -> None:
        counted = [one for one in self._waiting if one.values.is_there]
        self._waiting = [one for one in self._waiting if one not in counted]
        unequal = next((one for one in (each.weights() for each in counted) if not one.are_alike), None)
        if unequal is not None:
            self._done = True
            logger.warning("reduction='mean': microbatches of a batch %s, %s; this is said once", unequal, UNEQUAL)


def _count(part: LabelPlaces | WeightGraph, microbatches: Sequence[tuple[Any, ...]], number: int) -> _Counted | None:
    """Count one weight. None if a tensor isn't here, or if it isn't the turn of so large a batch.

    Args:
        part: What computes the weight.
        microbatches: Flat inputs and targets of each microbatch; None where they aren't here.
        number: The number of the batch, of which large ones have their turn; 0 for every batch.
    """
    wanted = part.tensors
    here = [microbatches[0][index] for index in wanted if index < len(microbatches[0])] if microbatches else []
    if len(microbatches) < 2 or len(here) < len(wanted) or any(one is None for one in here):
        return None
    turns = max(one.numel() for one in here) * len(microbatches) // MOST_LABELS + 1
    if number % turns:
        return None
    rows = tuple(next((one[index].shape[0] for index in wanted if one[index].dim()), 1) for one in microbatches)
    if isinstance(part, LabelPlaces):
        return _Counted(ReadLater(part.of(microbatches)), rows, counts_labels=True)
    alike = [one for one, size in zip(microbatches, rows, strict=True) if size == rows[0]]  # the graph is of this size
    if len(alike) < 2:
        return None
    values = torch.stack([part.of(one).reshape(()) for one in alike])
    return _Counted(ReadLater(values), rows[: len(alike)], part.counts_labels)


def example_weights(compiled: CompiledStages, microbatches: Sequence[tuple[Tensor, ...]]) -> list[Weights]:
    """Return the weights of these microbatches in the means of the loss; nothing if all rows count alike or none is known."""
    try:
        return [made.weights() for part in weights_of(compiled) if (made := _count(part, microbatches, 0)) is not None]
    except Exception as error:  # a look is no reason to refuse a model
        logger.debug("the example is not looked at: %s", error)
        return []
