"""What tests of training over the delegate train, and what their ranks count together."""

from __future__ import annotations

import torch
import torch.distributed as dist
from models import Example, square_loss, vectors
from torch import nn

# A microbatch's message is 8 KiB: a link corrupts none that is smaller than a page.
ROWS, MICROBATCHES, WIDTH = 128, 4, 64


def example(stages: int) -> Example:
    """A layer and dropout per stage."""

    def build() -> nn.Module:
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.1)) for _ in range(stages)]
        return nn.Sequential(*layers)

    return Example("layers", build, vectors(WIDTH), square_loss)


def sum_over_ranks(count: int) -> int:
    """The sum of what every rank gives; it waits for all of them."""
    total = torch.tensor(count)
    dist.all_reduce(total)
    return int(total)
