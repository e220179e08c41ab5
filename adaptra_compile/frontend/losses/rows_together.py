"""A try on the example whether a loss takes rows together, as losses over pairs of rows do."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn

from adaptra.frontend.losses.batch_look import example_weights
from adaptra.graph import CompiledStages
from adaptra.graph.capture.batch import loss_of
from adaptra.graph.ops.ops import is_random
from adaptra.runtime.worker.stages.loss_reduction import IN_BATCH, NEEDS, UNEQUAL, adds_up

logger = logging.getLogger(__name__)

_NEAR: Final = 1e-2
_NEAR_IN_LOW_PRECISION: Final = 5e-2


def rows_together(
    model: nn.Module,
    loss: Callable[..., Any] | None,
    compiled: CompiledStages,
    inputs: Sequence[Tensor],
    targets: Sequence[Tensor],
    microbatches: int,
) -> str | None:
    """Return a warning if the loss of two microbatches is not the mean of their losses, though both have the same weight.

    The model runs in evaluation mode, without gradients, on the example's first two microbatches. Random models, those on the
    meta device, those that change buffers and lists of stages are not tried. Nor is a model that can't run these.

    Args:
        model: The whole model.
        loss: The user's loss, or None if the model returns it.
        compiled: The stages.
        inputs, targets: The flat example, a whole batch.
        microbatches: Microbatches per step.
    """
    tensors = (*inputs, *targets)
    if microbatches == 1 or not _can_run(model, compiled, tensors):
        return None
    rows = next((one.shape[0] for one in tensors if one.dim()), 1) // microbatches
    first, second = ([one[at : at + rows] if one.dim() else one for one in tensors] for at in (0, rows))

    def of(*parts: Sequence[Tensor]) -> Tensor:
        joined = [torch.cat(of_parts) if of_parts[0].dim() else of_parts[0].clone() for of_parts in zip(*parts, strict=True)]
        outputs = compiled.inputs.call(model, joined[: len(inputs)])
        return loss_of(outputs, loss, compiled.targets, joined[len(inputs) :])

    try:
        if any(not one.are_alike for one in example_weights(compiled, [tuple(first), tuple(second)])):
            second = first  # as much weight in each
        with _evaluating(model), torch.no_grad(), torch.random.fork_rng(devices=_devices(tensors)):
            once, again, other, whole = of(first), of(first), of(second), of(first, second)
            mean = (once.double() + other.double()) / 2
            if not torch.equal(once, again) or not torch.isfinite(whole) or _is_near(whole, mean):
                return None
            twice, four = of(first, first), of(first, first, first, first)
    except Exception as error:  # the try runs the user's code on other sizes than its own
        logger.debug("whether the loss takes rows together is not known: %s", error)
        return None
    difference = (
        f"reduction='mean': the loss of two microbatches of the example is {whole:.5g}, the mean of their losses {mean:.5g}"
    )
    if adds_up(once, twice, four):
        return f"{difference}, so it looks like a sum over rows; give reduction='sum'"
    if not _is_near(twice, once):
        return f"{difference}, {IN_BATCH}"
    # Rows may just have weights. The gradients of a loss= tell.
    return None if loss is not None else f"{difference}, {UNEQUAL}; if it takes several rows together, {NEEDS}"


def _is_near(found: Tensor, expected: Tensor) -> bool:
    one, other = found.double(), expected.double()
    near = _NEAR_IN_LOW_PRECISION if torch.finfo(found.dtype).eps > 1e-4 else _NEAR
    return bool((one - other).abs() <= near * torch.maximum(one.abs(), other.abs()))


def _can_run(model: nn.Module, compiled: CompiledStages, tensors: Sequence[Tensor]) -> bool:
    captured = compiled.captured
    if captured is None or captured.eval_analysis.changed_state:
        return False
    if any(is_random(node.target, node.args, node.kwargs) for node in captured.eval_analysis.nodes):
        return False
    return not any(one.is_meta for one in (*model.parameters(), *model.buffers(), *tensors))


def _devices(tensors: Sequence[Tensor]) -> list[torch.device]:
    return list({one.device for one in tensors if one.device.type == "cuda"})


@contextmanager
def _evaluating(model: nn.Module) -> Generator[None]:
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in before:
            module.training = training
