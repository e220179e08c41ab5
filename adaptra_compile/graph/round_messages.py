"""Messages between stages rounded to bfloat16, for ``Options(lossy_bf16=...)``."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch

from adaptra.errors import OptionError
from adaptra.graph.compile import CompiledStages
from adaptra.graph.ops.specs import MessageSpec
from adaptra.graph.stages.stages import TrainStage


def round_messages(compiled: CompiledStages) -> CompiledStages:
    """Return the same stages with activations and gradients sent as bfloat16.

    Losses and the gradients of shared parameters stay exact.

    Raises:
        OptionError: A message contains another dtype than float32. The text names the edge and the dtype.
    """
    last = len(compiled.eval or compiled.train) - 1  # there may be none of either kind
    evaluated = tuple(
        stage if stage.index == last else replace(stage, outputs=_rounded(stage.outputs, stage.index, stage.index + 1))
        for stage in compiled.eval
    )
    everywhere = {(stage, peer) for stage in range(last + 1) for peer in (stage - 1, stage + 1) if 0 <= peer <= last}
    return replace(compiled, train=round_edges(compiled.train, everywhere), eval=evaluated)


def round_edges(train: tuple[TrainStage, ...], edges: Collection[tuple[int, int]]) -> tuple[TrainStage, ...]:
    """Return the training stages with messages over these directed edges sent as bfloat16.

    Raises:
        OptionError: As :func:`round_messages`.
    """
    last = len(train) - 1

    def over(message: MessageSpec, source: int, destination: int) -> MessageSpec:
        return _rounded(message, source, destination) if (source, destination) in edges else message

    return tuple(
        replace(
            stage,
            outputs=stage.outputs if stage.index == last else over(stage.outputs, stage.index, stage.index + 1),
            grad_inputs=over(stage.grad_inputs, stage.index, stage.index - 1),
        )
        for stage in train
    )


def _rounded(message: MessageSpec, source: int, destination: int) -> MessageSpec:
    for spec in message:
        if spec.dtype != torch.float32:
            held = f"{str(spec.dtype).removeprefix('torch.')}{list(spec.shape)}"
            raise OptionError(
                f"lossy_bf16: the message from stage {source} to {destination} holds {held}: expected float32 alone, "
                "which can be rounded; cut the model elsewhere by split=, or send messages as they are"
            )
    return tuple(replace(spec, lossy_bf16=True) for spec in message)
