"""What pairs of scripts share: gradients that add up over the parts of a batch, and the file of losses.

Nothing in this file knows adaptra.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn


def accumulate_mean(
    model: nn.Module, loss_of: Callable[[Tensor, Tensor], Tensor], inputs: Tensor, targets: Tensor, parts: int
) -> Tensor:
    """Add up the gradients of a batch, a part at a time, and return its loss: the mean of its parts'."""
    losses: list[Tensor] = []
    for some, wanted in zip(inputs.chunk(parts), targets.chunk(parts), strict=True):
        loss = loss_of(model(some), wanted)
        (loss / parts).backward()
        losses.append(loss.detach())
    return torch.stack(losses).mean()


def write_losses(path: Path | None, losses: list[float]) -> None:
    """Write the losses on the first rank, or print them."""
    if os.environ.get("RANK", "0") != "0":
        return
    if path is None:
        print(losses)
    else:
        path.write_text(json.dumps(losses))
