"""The reduction of microbatches' losses to that of the batch, and checks that a loss fits it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from adaptra.errors import BatchError, CaptureError
from adaptra.graph import CompiledStages, TensorSpec

MOST_ELEMENTS: Final = 2**20
"""The largest output, in elements, on which a loss is tried; of a larger one only the rows that fit are used."""

NUMBER_OF_ITEMS: Final = "num_items_in_batch"
"""The name that transformers use for the number of labels in a batch."""


class Reduction(StrEnum):
    """The reduction of the losses of microbatches and replicas to that of the batch: ``reduction=`` of
    :func:`adaptra.compile`.
    """

    MEAN = "mean"
    SUM = "sum"
    WEIGHTED = "weighted"

    def start(self, scale: float, loss: TensorSpec, microbatches: int, share: float | None = None) -> Tensor:
        """Return the gradient that the backward pass of a microbatch begins with.

        Args:
            scale: The factor of the loss.
            loss: The loss of one microbatch.
            microbatches: Microbatches per step.
            share: The microbatch's share of the batch's rows, if microbatches have different numbers of rows.
        """
        # As autograd computes it for scale * (loss / microbatches): the scale is float32, and the quotient is rounded in the
        # loss's own dtype.
        start = torch.tensor(scale, dtype=torch.float32).to(loss.dtype)
        if self is Reduction.WEIGHTED:
            return torch.stack([start, torch.zeros_like(start)])
        if self is Reduction.MEAN and share is not None:
            return start.expand(loss.shape) * share
        return start.expand(loss.shape) / (microbatches if self is Reduction.MEAN else 1)

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


def sum_of_shares(losses: Tensor, shares: Sequence[float]) -> Tensor:
    """Return the mean loss over the rows of microbatches with different numbers of rows: each loss times its share."""
    return torch.stack([loss * share for loss, share in zip(losses.unbind(), shares, strict=True)]).sum()


def total_weight(losses: Tensor) -> float:
    """Return the weight of a batch, from the sums and weights of its microbatches, (microbatches, 2)."""
    return losses[:, 1].double().sum().item()


def looks_like_sum(whole: Tensor, mean: Tensor, parts: int) -> bool:
    """Return True if the loss of a whole batch is nearer to the sum of its parts' losses than to their mean."""
    return bool((whole - mean * parts).abs() < (whole - mean).abs())


def refuse_sum(loss: Callable[..., Any], compiled: CompiledStages, targets: Any, rows: int) -> None:
    """Refuse a loss that sums over the rows if the mean of microbatches is taken.

    It is tried on random outputs and the example's targets: a mean is unchanged if each row is doubled. A loss that can't be
    run on these is accepted.

    Args:
        loss: The user's loss.
        compiled: The stages, which define the model's outputs for a microbatch.
        targets: The targets of a microbatch.
        rows: The rows of a microbatch.

    Raises:
        CaptureError: Says what to give instead.
    """
    random = torch.Generator().manual_seed(0)
    largest = max((one.elements for one in compiled.eval[-1].outputs), default=0)
    taken = max(1, min(rows, MOST_ELEMENTS * rows // max(1, largest)))
    try:
        outputs = [_made_up(one, taken, rows, random) for one in compiled.eval[-1].outputs]
        given = pytree.tree_map_only(Tensor, lambda one: _first(one.cpu(), taken, rows), targets)
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            called = copy.deepcopy(loss).cpu() if isinstance(loss, nn.Module) else loss
            once = called(compiled.outputs.unflatten(outputs), given)
            twice = called(compiled.outputs.unflatten(_doubled(outputs)), pytree.tree_map_only(Tensor, _double, given))
        is_sum = looks_like_sum(twice, once, 2)
    except Exception:
        return
    if is_sum:
        raise CaptureError(
            f"loss=: it is {once:g} of some rows and {twice:g} of the same rows twice, so it looks like a sum: expected a mean "
            "over the rows, as reduction='mean' takes that of the microbatches; give reduction='sum', or reduction='weighted' "
            "with a loss that returns (sum, weight)"
        )


def refuse_number_of_items(given: Mapping[str, Any], reduction: Reduction) -> None:
    """Refuse the number of labels in a batch, by which models of transformers divide, if the result would be wrong.

    Args:
        given: The model's keyword arguments.
        reduction: The reduction of the losses of microbatches.

    Raises:
        BatchError: It is a constant, or losses that are divided by it would be averaged.
    """
    number = given.get(NUMBER_OF_ITEMS)
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


def _double(tensor: Tensor) -> Tensor:
    return torch.cat([tensor, tensor]) if tensor.dim() else tensor


def _doubled(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [_double(one) for one in tensors]
