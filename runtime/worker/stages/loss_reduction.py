"""The reduction of microbatches' losses to that of the batch, and checks that a loss fits it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from adaptra.errors import BatchError, CaptureError
from adaptra.graph import CompiledStages, TensorSpec
from adaptra.graph.capture.containers import closed

MOST_ELEMENTS: Final = 2**20
"""The largest output, in elements, on which a loss is tried; of a larger one only the rows that fit are used."""

MOST_ELEMENTS_OF_BATCH: Final = 2**24
"""The largest outputs of a whole batch, in elements, on which the weights of its microbatches are compared."""

NO_LABEL: Final = -100
"""The label that torch's losses leave out by default."""

UNEQUAL: Final = (
    "but a mean gives all the same weight, so loss and gradients differ from those of the whole batch; where labels are "
    "padding, return (sum, number of labels) and give reduction='weighted'"
)
"""What a warning says of microbatches of unequal weights."""

NEEDS: Final = (
    "it needs all rows at once: give microbatches=1, or let torch.compile(backend='adaptra') compile the model without its "
    "loss, and compute that from all rows' outputs"
)
"""What a loss needs that takes several rows together."""

IN_BATCH: Final = f"so it takes several rows together, as losses over pairs of rows do, and depends on microbatches=: {NEEDS}"
"""What a warning says of such a loss."""

NUMBER_OF_ITEMS: Final = "num_items_in_batch"
"""The name that transformers use for the number of labels in a batch."""


class Reduction(StrEnum):
    """The reduction of the losses of microbatches and replicas to that of the batch: ``reduction=`` of
    :func:`adaptra.compile`.
    """

    MEAN = "mean"
    SUM = "sum"
    WEIGHTED = "weighted"

    def of_batch(self, losses: Tensor, shares: Sequence[float] = ()) -> Tensor:
        """Return the loss of the batch, a scalar.

        Args:
            losses: The loss of each microbatch: (microbatches,), or if weighted (microbatches, 2), each a sum and its weight.
            shares: Each microbatch's share of the batch's rows, if they have different numbers of rows.

        Raises:
            BatchError: The weights of all microbatches together are not above zero.
        """
        match self:
            case Reduction.MEAN:
                return sum_of_shares(losses, shares) if shares else losses.mean()
            case Reduction.SUM:
                return losses.sum()
            case Reduction.WEIGHTED:
                weight = total_weight(losses)
                if not 0 < weight < torch.inf:
                    raise BatchError(
                        f"reduction='weighted': the weights of all microbatches and replicas add up to {weight:g}: expected "
                        "more than 0, such as one label; the gradients are as before this step"
                    )
                return (losses[:, 0].double().sum() / weight).to(losses.dtype)


@dataclass(frozen=True, slots=True)
class RootGradient:
    """The gradient with which the backward pass of a microbatch begins.

    Attributes:
        reduction: The reduction of the microbatches' losses to the step's.
        microbatches: Microbatches per step.
        device: The device of the loss.
        share: The microbatch's share of the batch's rows, if microbatches have different numbers of rows.
    """

    reduction: Reduction
    microbatches: int
    device: torch.device
    share: float | None = None

    def of(self, loss: TensorSpec, scale: float) -> Tensor:
        """Return the gradient of one microbatch's loss, for a factor of the loss."""
        # As autograd computes it for scale * (loss / microbatches): the scale is float32, and the quotient is rounded in the
        # loss's own dtype.
        start = torch.full((), scale, dtype=torch.float32, device=self.device).to(loss.dtype)
        if self.reduction is Reduction.WEIGHTED:
            return torch.stack([start, torch.zeros_like(start)])
        if self.reduction is Reduction.MEAN and self.share is not None:
            return start.expand(loss.shape) * self.share
        return start.expand(loss.shape) / (self.microbatches if self.reduction is Reduction.MEAN else 1)


def sum_of_shares(losses: Tensor, shares: Sequence[float]) -> Tensor:
    """Return the mean loss over the rows of microbatches with different numbers of rows: each loss times its share."""
    return torch.stack([loss * share for loss, share in zip(losses.unbind(), shares, strict=True)]).sum()


def total_weight(losses: Tensor) -> float:
    """Return the weight of a batch, from the sums and weights of its microbatches, (microbatches, 2)."""
    return losses[:, 1].double().sum().item()


def looks_like_sum(whole: Tensor, mean: Tensor, parts: int) -> bool:
    """Return True if the loss of a whole batch is nearer to the sum of its parts' losses than to their mean."""
    return bool((whole - mean * parts).abs() < (whole - mean).abs())


def adds_up(once: Tensor, twice: Tensor, four: Tensor) -> bool:
    """Return True if a loss of some rows grows like a sum when they are given twice and four times.

    A loss over pairs of rows grows too, but less with each copy.
    """
    return looks_like_sum(twice, once, 2) and bool((four + once * 2 - twice * 3).abs() <= 2e-2 * (four - twice).abs())


def refuse_sum(loss: Callable[..., Any], compiled: CompiledStages, targets: Any, rows: int, device: torch.device) -> None:
    """Refuse a loss that sums over the rows if the mean of microbatches is taken.

    It is tried on random outputs and the example's targets: a mean is unchanged if each row is doubled. A loss that can't be
    run on these is accepted.

    Args:
        loss: The user's loss.
        compiled: The stages, which define the model's outputs for a microbatch.
        targets: The targets of a microbatch.
        rows: The rows of a microbatch.
        device: The device of the model, on which a loss may hold tensors.

    Raises:
        CaptureError: Says what to give instead.
    """
    random = torch.Generator().manual_seed(0)
    largest = max((one.elements for one in compiled.eval[-1].outputs), default=0)
    taken = max(1, min(rows, MOST_ELEMENTS * rows // max(1, largest)))
    try:
        outputs = [_made_up(one, taken, rows, random).to(device) for one in compiled.eval[-1].outputs]
        first_targets: Any = pytree.tree_map_only(Tensor, lambda one: _first(one.to(device), taken, rows), targets)
        with torch.no_grad(), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            called = copy.deepcopy(loss).to(device) if isinstance(loss, nn.Module) else loss
            once, twice, four = (
                called(
                    compiled.outputs.unflatten([_copies(one, count) for one in outputs]),
                    closed(pytree.tree_map_only(Tensor, lambda one, count=count: _copies(one, count), first_targets)),
                )
                for count in (1, 2, 4)
            )
        is_sum = adds_up(once, twice, four)
    except Exception:
        return
    if is_sum:
        raise CaptureError(
            f"loss=: it is {once:g} of some rows and {twice:g} of the same rows twice, so it looks like a sum: expected a mean "
            "over the rows, as reduction='mean' takes that of the microbatches; give reduction='sum', or reduction='weighted' "
            "with a loss that returns (sum, weight)"
        )


def unequal_weights(
    loss: Callable[..., Any] | None, compiled: CompiledStages, targets: Any, microbatches: int, rows: int, device: torch.device
) -> str | None:
    """Return a warning if the mean over the example's microbatches is not its batch's, as where labels are padding.

    The loss is differentiated with respect to random outputs, for each microbatch alone and for all of them together. In a mean
    over the rows the gradients of all microbatches are the same part of the batch's. A loss that can't be run, one that the
    model returns, and one of large outputs are not looked at.

    Args:
        loss: The user's loss, or None if the model returns it.
        compiled: The stages, which define the model's outputs for a microbatch.
        targets: The targets of the whole batch.
        microbatches: Microbatches per step.
        rows: The rows of a microbatch.
        device: The device of the model, on which a loss may hold tensors.
    """
    elements = sum(one.elements for one in compiled.eval[-1].outputs) * microbatches
    if microbatches == 1 or loss is None or elements > MOST_ELEMENTS_OF_BATCH:
        return None
    try:
        with torch.enable_grad(), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            weights, turned = _weights_in_mean(loss, compiled, targets, microbatches, rows, device)
    except Exception:
        return None
    is_low = any(one.dtype in (torch.float16, torch.bfloat16) for one in compiled.eval[-1].outputs)
    if turned > (2e-2 if is_low else 1e-3):
        return f"reduction='mean': a microbatch's gradients have another direction in the loss of the whole example, {IN_BATCH}"
    if all(abs(one - 1) < (2e-2 if is_low else 1e-3) for one in weights):
        return None
    found = f"microbatches of the example count {min(weights):.3g} to {max(weights):.3g} times a mean part of its loss"
    return f"reduction='mean': {found}, {UNEQUAL}"


def refuse_number_of_items(arguments: Mapping[str, Any], reduction: Reduction) -> None:
    """Refuse the number of labels in a batch, by which models of transformers divide, if the result would be wrong.

    Args:
        arguments: The model's keyword arguments.
        reduction: The reduction of the losses of microbatches.

    Raises:
        BatchError: It is a constant, or losses that are divided by it would be averaged.
    """
    number = arguments.get(NUMBER_OF_ITEMS)
    if number is None:
        return
    is_scalar = isinstance(number, Tensor) and number.dim() == 0
    if not is_scalar or reduction is not Reduction.SUM:
        shown = f"a tensor of shape {tuple(number.shape)}" if isinstance(number, Tensor) else repr(number)
        raise BatchError(
            f"inputs: {NUMBER_OF_ITEMS} is {shown} with reduction='{reduction}': expected each batch's own number as a tensor "
            "without dimensions, and reduction='sum', since each microbatch's loss is a part of the batch's; or none, and a "
            "loss= that returns (sum, weight), with reduction='weighted'"
        )


def _made_up(spec: TensorSpec, taken: int, rows: int, random: torch.Generator) -> Tensor:
    """Return a random output of this shape; numbers from 0 to 1 are also valid probabilities."""
    if not spec.dtype.is_floating_point:
        return _first(torch.zeros(spec.shape, dtype=spec.dtype, device="cpu"), taken, rows)
    shape = (spec.shape[0] * taken // rows, *spec.shape[1:]) if spec.shape else ()
    return torch.rand(shape, generator=random).to(spec.dtype)


def _first(tensor: Tensor, taken: int, rows: int) -> Tensor:
    return tensor[: tensor.shape[0] * taken // rows] if tensor.dim() else tensor


def _copies(tensor: Tensor, count: int) -> Tensor:
    return torch.cat([tensor] * count) if tensor.dim() else tensor


def _weights_in_mean(
    loss: Callable[..., Any], compiled: CompiledStages, targets: Any, microbatches: int, rows: int, device: torch.device
) -> tuple[list[float], float]:
    """Return for each microbatch how much larger its gradient is in the whole batch's loss than in the mean of all losses.

    Returns that, and by how much a gradient turns at most: one minus the cosine.
    """
    random = torch.Generator().manual_seed(0)
    called = copy.deepcopy(loss).to(device) if isinstance(loss, nn.Module) else loss
    specs = compiled.eval[-1].outputs
    parts = [[_made_up(spec, rows, rows, random).to(device) for spec in specs] for _ in range(microbatches)]
    differentiated = [[one.requires_grad_() for one in part if one.is_floating_point() and one.dim()] for part in parts]
    whole = [torch.cat(of_parts) if of_parts[0].dim() else of_parts[0] for of_parts in zip(*parts, strict=True)]
    all_targets = pytree.tree_map_only(Tensor, lambda one: one.to(device), targets)
    in_whole = _gradients(called(compiled.outputs.unflatten(whole), closed(all_targets)), differentiated)
    weights: list[float] = []
    turned = 0.0
    for index, (part, leaves) in enumerate(zip(parts, differentiated, strict=True)):
        own = pytree.tree_map_only(Tensor, lambda one, index=index: _part(one, index, microbatches), all_targets)
        (gradient,) = _gradients(called(compiled.outputs.unflatten(part), closed(own)), [leaves])
        alone, together = gradient.norm().item(), in_whole[index].norm().item()
        # The mean of no label is nan, its part of the whole batch's loss 0.
        weights.append(float(alone == 0) if together == 0 else together * microbatches / max(alone, 1e-30))
        if alone > 0 and together > 0:
            turned = max(turned, 1 - (gradient @ in_whole[index]).item() / (alone * together))
    return weights, turned


def _gradients(loss: Tensor, groups: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Return the gradient for each group of tensors, as one vector."""
    flat = [one for group in groups for one in group]
    found = iter(torch.autograd.grad(loss, flat, retain_graph=True, materialize_grads=True))
    return [torch.cat([next(found).double().flatten() for _ in group]) for group in groups]


def _part(tensor: Tensor, index: int, microbatches: int) -> Tensor:
    return tensor.chunk(microbatches)[index] if tensor.dim() else tensor
