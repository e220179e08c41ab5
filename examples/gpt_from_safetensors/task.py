"""The model, its batches and its loss, of both scripts. ``python task.py`` writes a checkpoint to begin from."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_model
from torch import Tensor, nn

sys.path.append(str(Path(__file__).resolve().parent.parent))
import losses
from gpt import GPT, batch_of, standard_library_text
from gpt import next_byte_loss as loss_of

WEIGHTS, LENGTH, ROWS, PARTS = "model.safetensors", 64, 16, 8
write_losses = losses.write_losses


def arguments() -> argparse.Namespace:
    """The arguments of both scripts."""
    parser = argparse.ArgumentParser(description="Train a GPT that begins with a safetensors checkpoint.")
    parser.add_argument("--losses", type=Path, help="where the losses are written, as JSON")
    parser.add_argument("--steps", type=int, default=5)
    return parser.parse_args()


def batches(steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows of real text, and the byte that follows each byte."""
    text = standard_library_text(100_000)
    for step in range(steps):
        yield batch_of(text, step, ROWS, LENGTH)


EXAMPLE = next(batches(1))


def accumulate(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Add up the gradients of a batch, a part at a time, and return its loss."""
    return losses.accumulate_mean(model, loss_of, inputs, targets, PARTS)


if __name__ == "__main__":
    torch.manual_seed(0)
    save_model(GPT(), WEIGHTS)
