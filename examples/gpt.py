"""A small byte-level GPT in plain PyTorch, and real text for it: the Python standard library's own source.

Nothing in this file knows adaptra: it is what a user brings.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 256


class Block(nn.Module):
    """Causal self-attention and a two-layer perceptron, each behind a LayerNorm and around a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.before_mlp = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """``x`` is (batch, length, width), and so is the result."""
        batch, length, width = x.shape
        qkv = self.qkv(self.before_attention(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.narrow(functional.gelu(self.widen(self.before_mlp(x))))


class GPT(nn.Module):
    """Bytes in, logits of the next byte out: (batch, length) integers to (batch, length, vocabulary)."""

    def __init__(
        self, blocks: int = 8, width: int = 64, heads: int = 4, length: int = 64, vocabulary: int = VOCABULARY
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.randn(length, width) * 0.02)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(blocks)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for name, parameter in self.named_parameters():
            if name.endswith(("projection.weight", "narrow.weight")):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * blocks))

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the byte that follows each byte."""
        return self.head(self.norm(self.blocks(self.tokens(tokens) + self.positions)))


def next_byte_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy, in nats per byte."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def standard_library_text(limit: int = 2_000_000) -> Tensor:
    """The first ``limit`` bytes of the running Python's standard library, its modules in alphabetical order."""
    text = bytearray()
    for path in sorted(Path(os.__file__).parent.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= limit:
            break
    return torch.frombuffer(text[:limit], dtype=torch.uint8).long()


def batch_of(text: Tensor, step: int, rows: int, length: int) -> tuple[Tensor, Tensor]:
    """The inputs and targets of a step, (rows, length) each: random windows that depend on the step alone."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - length - 1, (rows,), generator=generator).tolist()
    windows = torch.stack([text[start : start + length + 1] for start in starts])
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
