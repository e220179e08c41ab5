"""Compilation for a shape of microbatch that is only evaluated. No training graph is captured or differentiated.

Models may accept a microbatch in evaluation that they refuse in training, as BatchNorm does one row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from adaptra.errors import CaptureError, PartitionError
from adaptra.graph.backward.differentiate import evaluate
from adaptra.graph.capture.batch import LossFunction
from adaptra.graph.compile import CompiledStages, require_state
from adaptra.graph.microbatch import Microbatch
from adaptra.graph.modes import as_for_training
from adaptra.graph.partition.partition import align, find_cuts, pieces, state_uses
from adaptra.progress import Progress, log_progress
from adaptra.simulation.cut_points import positions_of


@as_for_training()
def compile_evaluation(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    like: CompiledStages,
    loss: LossFunction | None = None,
    targets: Any = None,
    with_loss: bool = True,
    progress: Progress = log_progress,
) -> CompiledStages:
    """Compile a model into stages that only evaluate, with the state of stages that train.

    The same model, microbatch and arguments give the same stages in every process.

    Args:
        model, args, kwargs, loss, targets, with_loss, progress: As for :func:`adaptra.graph.compile.compile_stages`.
        like: Stages of the same model for another shape of microbatch.

    Returns:
        Stages without those for training.

    Raises:
        CaptureError: The model can't become one graph, or its stages would have other state. The text says which.
        BatchError: The microbatch is not a call that the model accepts.
    """
    own = like.captured
    assert own is not None, "stages given as modules are not captured"
    microbatch = Microbatch.of(model, args, kwargs, targets, loss, with_loss=with_loss)
    flat, analysis, outputs = microbatch.captured(evaluation=True, changed=own.analysis.changed_state)
    progress("captured", 1, 1)

    positions = positions_of(like.cut_points.chosen)
    stage_of = {use: sum(cut <= index for cut in positions) for use, index in state_uses(own.flat, own.analysis).items()}
    cuts = find_cuts(flat, analysis)
    try:
        parts = pieces(flat, analysis, cuts, align(cuts, state_uses(flat, analysis), stage_of, own.stages), flat.results)
    except PartitionError as error:
        raise CaptureError(f"it can't be cut where the pipeline is cut: {error}") from error
    for piece in parts:
        require_state(like, piece, flat)
    if changed := sorted(analysis.changed_state - like.changing):
        raise CaptureError(
            f"{', '.join(changed[:3])}: evaluation would change these buffers, for the shape of the example it doesn't: "
            "expected the same for all shapes; compile another pipeline for this shape"
        )
    with microbatch.mode:
        stages = evaluate(flat, analysis, parts, progress)
    captured = replace(own, eval_flat=flat, eval_analysis=analysis, eval_cuts=cuts)
    return replace(
        like, train=(), eval=stages, inputs=microbatch.inputs, targets=microbatch.targets, outputs=outputs, captured=captured
    )
