"""A loss that is a sum and its weight, as one tensor, so that both are broadcast like any loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from adaptra.errors import CaptureError


class WeightedLoss(nn.Module):
    """Calls a loss that returns (sum, weight), or takes the two from the model's outputs.

    Args:
        loss: ``loss(outputs, targets)``, or None if the two are the model's first outputs.
    """

    def __init__(self, loss: Callable[[Any, Any], Any] | None) -> None:
        super().__init__()
        self.loss = loss

    def __call__(self, outputs: Any, targets: Any) -> Tensor:
        """Return the sum and its weight, of shape (2,), in float32 or wider. An integer weight is exact up to 2^24.

        Hooks of all modules are not called: they are for the user's.

        Raises:
            CaptureError: The loss or the model returned something else.
        """
        returned = outputs if self.loss is None else self.loss(outputs, targets)
        pair = returned[:2] if isinstance(returned, tuple | list) else ()
        if len(pair) != 2 or not _is_scalar(pair[0]) or not (_is_scalar(pair[1]) or isinstance(pair[1], int | float)):
            who = "model" if self.loss is None else "loss function"
            raise CaptureError(
                f"reduction='weighted': the {who} returned {_shown(returned)}: expected (sum, weight), two scalar tensors: the "
                "sum of the losses and what to divide it by, such as the number of labels"
            )
        total, weight = pair
        if not total.is_floating_point():
            raise CaptureError(f"reduction='weighted': a sum of {total.dtype}: expected a floating-point dtype")
        if not isinstance(weight, Tensor):
            weight = torch.full((), weight, dtype=torch.float64, device=total.device)
        if weight.requires_grad:
            raise CaptureError(
                "reduction='weighted': the weight depends on trained parameters: expected a weight without gradient, such as "
                "the number of labels; detach it"
            )
        dtype = torch.float64 if total.dtype == torch.float64 else torch.float32
        return torch.stack([total.to(dtype), weight.to(total.device, dtype)])


def _is_scalar(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 0


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_shown, value))})"
    return f"a {type(value).__name__}"
