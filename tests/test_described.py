"""What ranks compare of a user's function: the same everywhere, and different where the function is."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812 - the name all of torch uses
from torch import Tensor, nn

from adaptra.described import describe_function, describe_model

SCRIPT = """
import sys
import torch.nn.functional as F
from torch import nn
sys.path.insert(0, sys.argv[1])
from test_described import GIVEN
from adaptra.described import describe_function
print([describe_function(one) for one in GIVEN])
"""


def scaled(factor: float, weight: Tensor | None = None):
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        rest = [one for one in (outputs - targets).square() if one.numel() in {1, 8, 64}]
        return factor * sum(rest, torch.zeros(())).mean() * (1.0 if weight is None else weight.sum())

    return loss


class Smooth:
    def __init__(self, by: float) -> None:
        self.by = by

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.smooth_l1_loss(outputs, targets, beta=self.by)


GIVEN = (
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


def test_functions_that_compute_something_else_are_described_otherwise_and_the_same_in_every_process() -> None:
    described = [describe_function(one) for one in GIVEN]
    assert len(set(described)) == len(described)
    assert [describe_function(one) for one in (scaled(1.0), nn.CrossEntropyLoss(ignore_index=0), Smooth(2.0))] == [
        described[GIVEN.index(GIVEN[9])],
        described[6],
        described[16],
    ]
    again = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(Path(__file__).parent)], capture_output=True, text=True, check=True, timeout=150
    )
    assert again.stdout.strip() == str(described)


def test_a_model_is_described_by_its_class_and_size() -> None:
    assert describe_model(nn.Linear(2, 3)) == "Linear (9 parameters)"
    assert describe_model([nn.Linear(40, 50), nn.Tanh()]) == "Linear, Tanh (2,050 parameters)"
