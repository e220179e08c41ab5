"""The batches of a running pipeline: checked against its stages, in microbatches, and compiled where their shape is new."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from adaptra.errors import BatchError, OptionError
from adaptra.frontend.arguments.call_batches import CallBatch
from adaptra.frontend.planned.stage_planning import PipelineSpec
from adaptra.frontend.running.local_workers import LocalWorkers
from adaptra.frontend.shapes.agreement import agree_on_shape
from adaptra.frontend.shapes.kept import most_shapes
from adaptra.frontend.shapes.recompile import Recompile
from adaptra.frontend.shapes.shapes import Given, NewShape, ShapedBatch, Shapes
from adaptra.graph import CompiledStages
from adaptra.graph.capture.batch import all_beside
from adaptra.graph.inner_compiler import prepare
from adaptra.program.placement import stages_of
from adaptra.runtime.control.plans.events import EventKind
from adaptra.runtime.worker.batch import split_batch
from adaptra.runtime.worker.step.shapes import FIRST, StepShape
from adaptra.runtime.worker.worker import Batch, Worker

logger = logging.getLogger(__name__)


class Batches:
    """Splits batches into microbatches for the stages of this process, and compiles for shapes that none had before.

    Args:
        spec: Plans for other shapes.
        local: The workers of this process.
        guest: The replica whose batches these are, if it is not the home of this process.
        recompile: Compiles the model for batches of other shapes; None if it can't be.

    Attributes:
        recompile: Compiles the model as it is now.
        shapes: The shapes that are compiled.
    """

    def __init__(self, spec: PipelineSpec, local: LocalWorkers, guest: int | None, recompile: Recompile | None) -> None:
        self._spec = spec
        self._local = local
        self._guest = guest
        self.recompile = recompile
        self.begin()

    def begin(self) -> None:
        """Begin with the shape of the stages that the workers run now, and no other."""
        self._new_shapes = 0
        most = most_shapes(self._spec.options.shapes, self._compiled)
        self.shapes = Shapes(self.recompile is not None, self._compiled, self._spec.microbatches, most)

    @property
    def _compiled(self) -> CompiledStages:
        return self._local.compiled

    def of(
        self,
        args: tuple[Any, ...],
        targets: Any,
        kwargs: Mapping[str, Any],
        *,
        with_loss: bool = True,
        training: bool = True,
    ) -> ShapedBatch:
        """Return a batch in microbatches. A shape that no batch had before is compiled first.

        Args:
            args, kwargs: The model's arguments.
            targets: The loss's targets.
            with_loss: Whether the loss is wanted, and with it the targets.
            training: Whether a step trains on it. A shape that is only evaluated gets no training graphs.

        Raises:
            BatchError: The batch is not one that this pipeline takes.
        """
        formats = self._compiled.inputs, self._compiled.targets
        needs_targets = with_loss and bool(formats[1].specs)
        is_whole = bool(args or kwargs) and (targets is not None or not needs_targets)
        if self.shapes.can_vary and is_whole:
            inputs = formats[0].flatten(args, kwargs, any_size=True)
            wanted = formats[1].flatten(targets, any_size=True) if with_loss else []
            nest = args, kwargs, targets if with_loss else None
            return self.of_flat(inputs, wanted, nest, with_loss=with_loss, training=training)
        split = self.split_inputs(args, kwargs), self.split_targets(targets) if with_loss else ()
        self.shapes.use_first()
        return ShapedBatch(FIRST, *split, (), self._compiled)

    def of_flat(
        self, inputs: Sequence[Tensor], targets: Sequence[Tensor], nest: Given, *, with_loss: bool, training: bool
    ) -> ShapedBatch:
        """Return a whole batch in microbatches, as :meth:`of`.

        Args:
            inputs, targets: Its tensors in flat order.
            nest: The same as the user gave them.
            with_loss, training: As of :meth:`of`.

        Raises:
            BatchError: As :meth:`of`. Or a step that has a deadline would have another shape than that of compilation.
        """
        if self.shapes.can_vary and not self.shapes.is_first(inputs, targets):
            if training and (deferral := self._workers[0].updates.deferral) is not None:
                raise BatchError(
                    f"a batch of {', '.join(str(tuple(one.shape)) for one in inputs)}: expected batches of the shape for which "
                    "the pipeline was compiled, as those that were deferred to a step are computed with its own under "
                    f"synchrony={deferral.deadline}"
                )
            whole = all_beside(nest, self._local.launched.device, "a batch of another shape")
            found = self.shapes.find(self, inputs, targets, whole, with_loss=with_loss, training=training)
            here = found.inputs if self._has(0) else (), found.targets if self._has(-1) else ()
            return replace(found, inputs=here[0], targets=here[1])
        split = self._split_inputs(inputs), self._split_targets(targets) if with_loss else ()
        self.shapes.use_first()
        return ShapedBatch(FIRST, *split, (), self._compiled)

    def require_one_shape(self, what: str, batches: Sequence[CallBatch]) -> None:
        """Refuse a deadline for training batches of other shapes than that of compilation.

        Args:
            what: The deadline, and where it was given.
            batches: Those of steps to come. What the pipeline has trained on counts beside them.

        Raises:
            OptionError: Names the shape.
        """
        if not self.shapes.can_vary:  # then no step has another one
            return
        formats = self._compiled.inputs, self._compiled.targets
        others = [f"batches of {one}, on which this job has trained" for one in self.shapes.trained()]
        for number, batch in enumerate(batches):
            if not (batch.args or batch.kwargs):  # those of a rank that gives targets alone
                continue
            inputs = formats[0].flatten(batch.args, batch.kwargs, any_size=True)
            targets = [] if batch.targets is None else formats[1].flatten(batch.targets, any_size=True)
            if not self.shapes.is_first(inputs, targets):
                others.append(f"batch {number} of {', '.join(str(tuple(one.shape)) for one in inputs)}")
        if others:
            raise OptionError(
                f"{what} with {others[0]}: expected training batches of the shape for which the pipeline was compiled, as "
                "those that are deferred to a step are computed with its own"
            )

    @property
    def replica(self) -> int:
        """The replica whose batches these are."""
        return self._local.launched.replica if self._guest is None else self._guest

    @property
    def _workers(self) -> list[Worker]:
        """This replica's workers in this process."""
        return [worker for worker in self._local.workers if worker.replica == self.replica]

    def _has(self, stage: int) -> bool:
        """Return whether one of them has a stage."""
        return self._spec.placement[stage] in {worker.rank for worker in self._workers}

    def compile_shape(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], targets: Any, with_loss: bool, training: bool
    ) -> CompiledStages:
        """Return the stages for a microbatch of another shape."""
        assert self.recompile is not None, "the model can be compiled again"
        how = {"with_loss": with_loss, "training": training}
        return self._spec.lowered(self.recompile.stages(self._compiled, args, kwargs, targets, **how))

    def add_shape(self, new: NewShape) -> StepShape:
        """Plan for a new shape of batch, and have the workers prepare for it.

        Raises:
            BatchError: Another rank of the replica has a batch of another shape.
        """
        self._new_shapes += 1
        agree_on_shape(
            new, self._new_shapes, self._local.launched, self._workers[0], self._local.calls, self._spec.options.timeout
        )
        larger, smaller = new.larger, new.smaller
        # Where nothing trains, no program is asked for: forwards run in their own order.
        programs = self._spec.programs_of(self._compiled, larger if larger.trains else self._compiled, len(new.rows))
        shape = StepShape(new.number, new.code, new.rows, larger, smaller, programs, programs.relative)
        for worker in self._workers:
            for stage in stages_of(worker.rank, self._spec.placement) if shape.trains else ():
                for compiled in filter(None, (larger, smaller)):
                    prepare(compiled.train[stage])
            worker.add_shape(shape)
        return shape

    def tell_of_shape(self, kind: EventKind | None, text: str) -> None:
        """Tell people of a shape that comes or goes, by an event of rank 0; with None it is a warning."""
        (worker, *_) = self._workers
        if worker.rank != 0:
            return
        if kind is None:
            logger.warning(text)
        else:
            worker.controller.recorder.emit_now(kind, text)

    def drop_shape(self, number: int) -> None:
        """Have the workers forget a shape."""
        for worker in self._workers:
            worker.drop_shape(number)

    def split_inputs(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Batch:
        """Return the microbatches of a batch's inputs, or nothing if the first stage is not in this process."""
        return self._split_inputs(self._compiled.inputs.flatten(args, kwargs)) if self._has(0) else ()

    def _split_inputs(self, flat: Sequence[Tensor]) -> Batch:
        return split_batch(flat, self._compiled.inputs.specs, self._spec.microbatches, "inputs") if self._has(0) else ()

    def split_targets(self, targets: Any) -> Batch:
        """Return the microbatches of a batch's targets, or nothing if the last stage is not in this process."""
        return self._split_targets(self._compiled.targets.flatten(targets)) if self._has(-1) else ()

    def _split_targets(self, flat: Sequence[Tensor]) -> Batch:
        return split_batch(flat, self._compiled.targets.specs, self._spec.microbatches, "targets") if self._has(-1) else ()

    def prepare_outputs(self, batch: ShapedBatch) -> None:
        """Make the graph that returns the model's outputs of such a batch, if the last stage is in this process.

        Raises:
            OptionError: An output is not there on the last stage. The text names it.
        """
        if self._has(-1):
            batch.outputs_by.train[-1].forward_with_outputs()

    def compare_rows(self, call: str, rows: Mapping[str, Any]) -> None:
        """Start a comparison of this call's rows with those of other processes' ranks.

        Args:
            call: The user's method.
            rows: What it was given, by argument name.
        """
        if not self._local.launched.in_threads:
            for worker in self._workers:
                worker.compare_rows(call, rows)
