"""Compilation for a shape of microbatch that is only trained on. No evaluation graph is captured or traced.

Most lengths of a training set are never evaluated, and the evaluation is a third of a compilation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from adaptra.errors import CaptureError
from adaptra.graph.backward.differentiate import differentiate
from adaptra.graph.backward.outputs_beside import OutputsBeside
from adaptra.graph.capture.batch import LossFunction
from adaptra.graph.compile import CompiledStages, require_state, require_trained
from adaptra.graph.microbatch import Microbatch
from adaptra.graph.modes import as_for_training
from adaptra.graph.partition.partition import find_cuts, pieces, places_of
from adaptra.progress import Progress, log_progress


@as_for_training()
def compile_training(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    like: CompiledStages,
    loss: LossFunction | None = None,
    targets: Any = None,
    same_state: bool = True,
    progress: Progress = log_progress,
) -> CompiledStages:
    """Compile a model with its loss into stages that only train, with the state of stages for another shape.

    The same model, microbatch and arguments give the same stages in every process.

    Args:
        model, args, kwargs, loss, targets, same_state, progress: As for :func:`adaptra.graph.compile.compile_stages`.
        like: Stages of the same model for another shape of microbatch, or before it changed. They are cut alike.

    Returns:
        Stages without those for evaluation.

    Raises:
        CaptureError: The model can't become one graph, or its stages would have other state. The text says which.
        BatchError: The microbatch is not a call that the model accepts.
    """
    own = like.captured
    assert own is not None, "stages given as modules are not captured"
    microbatch = Microbatch.of(model, args, kwargs, targets, loss, with_loss=True)
    flat, analysis, outputs = microbatch.captured(evaluation=False, changed=frozenset())
    progress("captured", 1, 1)
    require_trained(flat, analysis)

    cuts = find_cuts(flat, analysis)
    positions = like.positions_in(flat, analysis, cuts)
    parts = pieces(flat, analysis, cuts, positions, flat.results)
    if same_state:
        for piece in parts:
            require_state(like, piece, flat)
        if changed := sorted(analysis.changed_state ^ own.analysis.changed_state):
            raise CaptureError(
                f"{', '.join(changed[:3])}: training changes these buffers for one of two shapes: expected the same for all "
                "shapes; compile another pipeline for this shape"
            )
    # State that only evaluation uses has a stage too.
    holders = {name: like.names[name] for name in (*microbatch.names.parameters, *microbatch.names.buffers)}
    with microbatch.mode:
        train = differentiate(flat, analysis, parts, holders, microbatch.names, own.sizes, progress)
    beside = OutputsBeside(flat, analysis, parts[-1], train, outputs, microbatch.mode)
    training = replace(
        like,
        train=(*train[:-1], train[-1].with_outputs(beside)),
        eval=(),
        inputs=microbatch.inputs,
        targets=microbatch.targets,
        outputs_in_training=outputs,
        cut_points=places_of(flat, analysis, cuts, positions),
        captured=replace(
            own,
            names=microbatch.names,
            flat=flat,
            analysis=analysis,
            cuts=cuts,
            formats=(microbatch.inputs, microbatch.targets, own.formats[2], outputs),
            mode=microbatch.mode,
            difference=None,
        ),
    )
    if same_state:
        like.require_same_state(training)
    return training
