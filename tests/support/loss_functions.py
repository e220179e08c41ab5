"""Loss functions that compute different things, as users write them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812 - the name all of torch uses
from torch import Tensor, nn


def scaled(factor: float, weight: Tensor | None = None) -> Callable[[Tensor, Tensor], Tensor]:
    """A function that closes over what it was made of."""

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        rest = [one for one in (outputs - targets).square() if one.numel() in {1, 8, 64}]
        return factor * sum(rest, torch.zeros(())).mean() * (1.0 if weight is None else weight.sum())

    return loss


class Smooth:
    """A loss that is an object with a number of its own."""

    def __init__(self, by: float) -> None:
        self.by = by

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.smooth_l1_loss(outputs, targets, beta=self.by)


GIVEN: tuple[Callable[..., Tensor], ...] = (
    F.mse_loss,
    F.l1_loss,
    torch.nn.functional.cross_entropy,
    partial(F.cross_entropy, label_smoothing=0.1),
    partial(F.cross_entropy, label_smoothing=0.2),
    nn.CrossEntropyLoss(),
    nn.CrossEntropyLoss(ignore_index=0),
    nn.CrossEntropyLoss(weight=torch.arange(3.0)),
    nn.CrossEntropyLoss(weight=torch.ones(3)),
    scaled(1.0),
    scaled(2.0),
    scaled(1.0, torch.ones(3)),
    scaled(1.0, torch.zeros(3)),
    lambda outputs, targets: (outputs - targets).abs().mean(),
    lambda outputs, targets: (outputs - targets).square().mean(),
    Smooth(1.0),
    Smooth(2.0),
    Smooth(1.0).__call__,
)
