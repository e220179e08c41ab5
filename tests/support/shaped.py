"""A model of any sequence length, its losses, and batches of any size."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name all of torch uses
from torch import Tensor, nn

import adaptra

CLASSES, MICROBATCHES = 13, 4


class Tagger(nn.Module):
    """Embeds, mixes along the sequence and drops out; the embedding is also the output's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.norm = nn.LayerNorm(8)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden + hidden.mean(1, keepdim=True)))
        return self.norm(hidden) @ self.embedding.weight.T


def mean(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def summed(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def weighted(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return summed(logits, labels), (labels > 0).sum()


LOSSES: dict[str, Any] = {"mean": mean, "sum": summed, "weighted": weighted}


def batch(rows: int, length: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * seed + 100 * rows + length)
    tokens, labels = (torch.randint(CLASSES, (rows, length), generator=generator) for _ in range(2))
    return tokens, labels


def make() -> Tagger:
    torch.manual_seed(0)
    return Tagger()


def gradients(pipe: adaptra.Pipeline | nn.Module) -> dict[str, Tensor]:
    return {name: one.grad.clone() for name, one in pipe.named_parameters() if one.grad is not None}
