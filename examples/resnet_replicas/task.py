"""What both scripts share: a small ResNet, its images, and one process's steps."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

sys.path.append(str(Path(__file__).resolve().parent.parent))
import losses

CLASSES, ROWS, PARTS = 10, 64, 8
write_losses = losses.write_losses


def arguments() -> argparse.Namespace:
    """The arguments of both scripts."""
    parser = argparse.ArgumentParser(description="Train a small ResNet on replicas.")
    parser.add_argument("--losses", type=Path, help="where the losses are written, as JSON")
    parser.add_argument("--steps", type=int, default=12)
    return parser.parse_args()


class Residual(nn.Module):
    """Two convolutions around a residual, each with a BatchNorm."""

    def __init__(self, given: int, made: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(given, made, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(made)
        self.second = nn.Conv2d(made, made, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(made)
        self.relu = nn.ReLU(inplace=True)
        short = nn.Conv2d(given, made, 1, stride, bias=False)
        self.short = nn.Sequential(short, nn.BatchNorm2d(made)) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """``x`` is (rows, given, height, width), and the result has ``made`` channels."""
        out = self.norm2(self.second(self.relu(self.norm1(self.first(x)))))
        return self.relu(out + self.short(x))


class ResNet(nn.Module):
    """Images of (rows, 3, height, width) in, logits of (rows, CLASSES) out."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True))
        self.blocks = nn.Sequential(
            Residual(width, width, 1),
            Residual(width, 2 * width, 2),
            Residual(2 * width, 2 * width, 1),
            Residual(2 * width, 4 * width, 2),
        )
        self.head = nn.Linear(4 * width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Logits of the classes."""
        return self.head(self.blocks(self.stem(images)).mean((2, 3)))


def batches(steps: int, replicas: int = 1, replica: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """Noisy images of their class's pattern: of each batch the rows of a replica."""
    patterns = torch.rand(CLASSES, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    for step in range(steps):
        random = torch.Generator().manual_seed(step)
        labels = torch.randint(CLASSES, (ROWS,), generator=random)
        images = patterns[labels] + 0.3 * torch.randn(ROWS, 3, 16, 16, generator=random)
        yield images.chunk(replicas)[replica], labels.chunk(replicas)[replica]


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean cross entropy."""
    return functional.cross_entropy(logits, labels)


def accumulate(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Add up the gradients of a batch, a part at a time, and return its loss. A BatchNorm sees one part at a time."""
    return losses.accumulate_mean(model, loss_of, images, labels, PARTS)
