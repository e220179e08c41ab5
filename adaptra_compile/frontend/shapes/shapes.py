"""The shapes of a pipeline's batches: which are compiled, and how a batch splits into microbatches.

A batch may have other sizes than the one for which the pipeline was compiled: a longer sequence, or fewer rows. Its structure,
dtypes and constants stay. Each new shape is compiled once, with the same split and the same state.
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from adaptra.errors import BatchError, CaptureError, OptionError, PartitionError
from adaptra.frontend.shapes.kept import ShapesWarning
from adaptra.graph import CompiledStages
from adaptra.graph.ops.specs import MessageSpec
from adaptra.runtime.control.plans.events import EventKind
from adaptra.runtime.worker.batch import first_rows, microbatch_rows, rows_of_all, split_rows
from adaptra.runtime.worker.step.shapes import FIRST, StepShape
from adaptra.runtime.worker.step.step_parts import Batch

Given = tuple[tuple[Any, ...], Mapping[str, Any], Any]
"""The model's positional and keyword arguments, and the loss's targets."""

Sizes = tuple[tuple[int, ...], ...]
"""The sizes of all tensors of a batch, without the rows."""


@dataclass(frozen=True, slots=True)
class ShapedBatch:
    """A batch in microbatches.

    Attributes:
        number: The number of its shape.
        inputs, targets: The tensors per microbatch; empty where no stage of this process needs them.
        shares: The share of each microbatch in the rows; empty if all have the same.
        outputs_by: The stages whose format merges the outputs of microbatches.
    """

    number: int
    inputs: Batch
    targets: Batch
    shares: tuple[float, ...]
    outputs_by: CompiledStages


@dataclass(frozen=True, slots=True)
class PipelineShape:
    """One shape of batch that a pipeline has compiled, as :attr:`adaptra.frontend.api.Pipeline.shapes` returns it.

    Attributes:
        name: The sizes of the tensors of a batch.
        rows: The rows of each microbatch.
        seconds: The time that its compilation took; 0 for the one with which the pipeline was compiled.
        steps: The number of steps and evaluations that ran it.
    """

    name: str
    rows: tuple[int, ...]
    seconds: float
    steps: int


@dataclass(frozen=True, slots=True)
class NewShape:
    """A shape that is compiled but not planned yet; the fields are those of :class:`StepShape`, and texts for people.

    ``use`` is added to the name, and says what it is compiled for.
    """

    number: int
    code: int
    name: str
    rows: tuple[int, ...]
    larger: CompiledStages
    smaller: CompiledStages | None = None
    use: str = ""


@dataclass(slots=True)
class _Known:
    """A compiled shape of a batch, its name, the time it took, and its uses."""

    shape: StepShape
    name: str
    seconds: float
    steps: int = 0


class Workshop(Protocol):
    """Makes the shapes that :class:`Shapes` keeps. It holds them, so they don't hold it."""

    def compile_shape(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], targets: Any, with_loss: bool, training: bool
    ) -> CompiledStages:
        """Compile the model for a microbatch of :data:`Given`."""
        ...

    def add_shape(self, new: NewShape) -> StepShape:
        """Plan for a new shape, and have the workers prepare for it."""
        ...

    def drop_shape(self, number: int) -> None:
        """Have the workers forget a shape."""
        ...

    def tell_of_shape(self, kind: EventKind | None, text: str) -> None:
        """Tell people of a shape that comes or goes, by an event; with None it is a warning."""
        ...


class Shapes:
    """The shapes that a pipeline's workers have compiled, at most ``most`` beside the first.

    Args:
        can_vary: Whether batches of other shapes can be compiled.
        first: The stages for which the pipeline was compiled.
        microbatches: The number of microbatches of a batch with enough rows.
        most: The number of shapes that are kept. The least recently used one goes first.

    Attributes:
        can_vary: As given.
    """

    def __init__(self, can_vary: bool, first: CompiledStages, microbatches: int, most: int) -> None:
        self.can_vary = can_vary
        self._first = first
        self._microbatches = microbatches
        self._most = most
        self._warning = ShapesWarning(most)
        self._known: OrderedDict[tuple[Sizes, int], _Known] = OrderedDict()
        self._number = FIRST
        self._uses_of_first = 0

    def listed(self) -> tuple[PipelineShape, ...]:
        """Return the first shape, then the others, the most recently used last."""
        rows = self._rows_of_first * self._microbatches
        sizes = [(rows, *spec.shape[1:]) if spec.shape else () for spec in self._specs]
        name = _name(sizes, self._labels)
        first = PipelineShape(name, (self._rows_of_first,) * self._microbatches, 0.0, self._uses_of_first)
        others = [PipelineShape(one.name, one.shape.rows, one.seconds, one.steps) for one in self._known.values()]
        return (first, *others)

    def compiled(self) -> list[CompiledStages]:
        """Return the stages of all shapes beside the first."""
        found = [one for known in self._known.values() for one in (known.shape.larger, known.shape.smaller)]
        return list({id(one): one for one in found if one is not None and one is not self._first}.values())

    def trained(self) -> list[str]:
        """Return the names of shapes beside the first that steps have trained on."""
        return [known.name for known in self._known.values() if known.shape.trains]

    def use_first(self) -> None:
        """Count a use of the shape for which the pipeline was compiled."""
        self._uses_of_first += 1

    def is_first(self, inputs: Sequence[Tensor], targets: Sequence[Tensor]) -> bool:
        """Return whether a flat batch has the shape for which the pipeline was compiled."""
        for tensor, spec in zip((*inputs, *targets), self._specs, strict=False):  # an evaluation may have no targets
            if tuple(tensor.shape[1:]) != spec.shape[1:]:
                return False
            if spec.shape and tensor.shape[0] != spec.shape[0] * self._microbatches:
                return False
        return True

    @property
    def _rows_of_first(self) -> int:
        return next((spec.shape[0] for spec in self._specs if spec.shape), 1)

    @property
    def _labels(self) -> tuple[str, ...]:
        return (*self._first.inputs.labels, *self._first.targets.labels)

    @property
    def _specs(self) -> MessageSpec:
        return (*self._first.inputs.specs, *self._first.targets.specs)

    def find(
        self,
        workshop: Workshop,
        inputs: Sequence[Tensor],
        targets: Sequence[Tensor],
        arguments: Given,
        *,
        with_loss: bool,
        training: bool,
    ) -> ShapedBatch:
        """Return a batch of another shape in microbatches; a new shape is compiled first.

        A shape that was only evaluated has no training graphs, and none of the loss if only outputs were wanted. One that was
        only trained has no evaluation graphs. It is compiled again once these are needed, and then has both.

        Args:
            workshop: Makes a new shape.
            inputs, targets: The batch's tensors in flat order.
            arguments: The same as the user gave them.
            with_loss: Whether the loss is wanted, and not the outputs.
            training: Whether a step trains on the batch.

        Raises:
            BatchError: Rows differ between tensors, there are none, or the model can't be compiled for this shape.
        """
        tensors = (*inputs, *targets)
        labels = self._labels[: len(tensors)]
        rows = rows_of_all(tensors, labels)
        sizes = tuple(tuple(one.shape[1:]) for one in tensors)
        known = self._known.get((sizes, rows))
        if known is None or not _serves(known.shape, with_loss, training):
            name = _name([one.shape for one in tensors], labels)
            known = self._compiled(workshop, sizes, rows, name, arguments, with_loss, training)
        self._known.move_to_end((sizes, rows))
        known.steps += 1
        shape = known.shape
        split = split_rows(inputs, shape.rows), split_rows(targets, shape.rows)
        return ShapedBatch(shape.number, *split, shape.shares, shape.larger)

    def _compiled(
        self, workshop: Workshop, sizes: Sizes, rows: int, name: str, arguments: Given, with_loss: bool, training: bool
    ) -> _Known:
        began = time.monotonic()
        split = microbatch_rows(rows, self._microbatches)
        earlier = self._known.get((sizes, rows))
        trained = earlier is not None and earlier.shape.trains
        if trained and not with_loss:
            # The sizes are those of a step's, so the targets have no tensors, and what is given suffices for the loss.
            arguments, with_loss = (arguments[0], arguments[1], self._first.targets.unflatten(())), True
        try:
            several = sorted(set(split), reverse=True)
            compiled = [self._stages_for(workshop, sizes, one, arguments, with_loss, training) for one in several]
            if earlier is not None:
                before = (earlier.shape.larger, earlier.shape.smaller)
                compiled = [_joined(one, other) for one, other in zip(compiled, before, strict=False)]
        except (CaptureError, PartitionError, OptionError) as error:
            raise BatchError(f"a batch of {name}: the model can't be compiled for this shape: {error}") from error
        digest = hashlib.blake2b(repr((sizes, rows)).encode(), digest_size=4).digest()
        use = " for evaluation too" if trained else "" if all(one.trains for one in compiled) else " for evaluation only"
        new = NewShape(self._number + 1, max(1, int.from_bytes(digest, "little")), name, split, *compiled, use=use)
        shape = workshop.add_shape(new)
        self._number = new.number
        known = self._known[sizes, rows] = _Known(shape, name, time.monotonic() - began)
        workshop.tell_of_shape(EventKind.COMPILED, f"batches of {name}{new.use} in {known.seconds:.2f} s")
        if earlier is not None:  # the same shape, and so none more
            known.steps, known.seconds = earlier.steps, earlier.seconds + known.seconds
            workshop.drop_shape(earlier.shape.number)
        elif (warning := self._warning.after(known.seconds)) is not None:
            workshop.tell_of_shape(None, warning)
        while len(self._known) > self._most:
            _, dropped = self._known.popitem(last=False)
            workshop.drop_shape(dropped.shape.number)
            workshop.tell_of_shape(EventKind.FORGOTTEN, f"batches of {dropped.name}: {self._most} shapes are kept")
        return known

    def _stages_for(
        self, workshop: Workshop, sizes: Sizes, rows: int, arguments: Given, with_loss: bool, training: bool
    ) -> CompiledStages:
        """Return the stages for microbatches of this many rows, which another shape of batch may have already.

        Stages with a loss serve evaluations without targets too.
        """
        specs = self._specs[: len(sizes)]
        if sizes == tuple(spec.shape[1:] for spec in specs) and all(spec.shape[:1] in ((), (rows,)) for spec in specs):
            return self._first
        for (others, _), known in self._known.items():
            if others[: len(sizes)] == sizes and _serves(known.shape, with_loss, training):
                for stages, size in ((known.shape.larger, known.shape.rows[0]), (known.shape.smaller, known.shape.rows[-1])):
                    if stages is not None and size == rows:
                        return stages
        args, kwargs, targets = first_rows((arguments[0], dict(arguments[1]), arguments[2]), rows)
        return workshop.compile_shape(args, kwargs, targets, with_loss, training)


def _serves(shape: StepShape, with_loss: bool, training: bool) -> bool:
    """Return whether such a call can run the stages of a shape."""
    return shape.trains if training else shape.evaluates and (shape.with_loss or not with_loss)


def _joined(new: CompiledStages, before: CompiledStages | None) -> CompiledStages:
    """Return new stages with what they lack of those that the shape had before: either kind may be missing."""
    if before is None or (new.trains and new.evaluates):
        return new
    if not new.trains:
        return before.with_evaluation_of(new) if before.trains else new
    return new.with_evaluation_of(before) if before.evaluates and before.with_loss else new


def _name(sizes: Sequence[Sequence[int]], labels: Sequence[str]) -> str:
    return ", ".join(f"{label} {list(one)}" for label, one in zip(labels, sizes, strict=True))
