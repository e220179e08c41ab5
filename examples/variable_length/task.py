"""What both scripts share: sentences of varying length, their loader with padding, a small transformer and its loss."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

sys.path.append(str(Path(__file__).resolve().parent.parent))
import losses
from gpt import VOCABULARY, standard_library_text

ROWS, PARTS, LONGEST, MULTIPLE, NO_LABEL = 8, 4, 40, 8, -100
write_losses = losses.write_losses


def arguments() -> argparse.Namespace:
    """The arguments of both scripts."""
    parser = argparse.ArgumentParser(description="Train a transformer with text of varying length.")
    parser.add_argument("--losses", type=Path, help="where the losses are written, as JSON")
    parser.add_argument("--sentences", type=int, default=86)
    return parser.parse_args()


class Transformer(nn.Module):
    """Bytes in, logits of the next byte out: (rows, length) to (rows, length, 256), for any length up to LONGEST."""

    def __init__(self, width: int = 32, layers: int = 2) -> None:
        super().__init__()
        self.bytes = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Parameter(torch.randn(LONGEST, width) * 0.02)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True, norm_first=True) for _ in range(layers)
        )
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, given: Tensor) -> Tensor:
        """Logits of the byte that follows each byte. Padding is at the end, where no earlier byte sees it."""
        length = given.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        x = self.bytes(given) + self.positions[:length]
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return self.head(x)


def collate(sentences: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Pad the sentences of a batch to the longest of them, rounded up; labels are the next bytes, and NO_LABEL."""
    longest = max(len(one) for one in sentences) - 1
    length = -(-longest // MULTIPLE) * MULTIPLE
    given, labels = (
        functional.pad(one, (0, length - longest), value=value)
        for one, value in (
            (pad_sequence([one[:-1] for one in sentences], batch_first=True), 0),
            (pad_sequence([one[1:] for one in sentences], batch_first=True, padding_value=NO_LABEL), NO_LABEL),
        )
    )
    return given, labels


def loader(count: int) -> DataLoader[Any]:
    """Batches of pieces of real text, in the same order in every process; the last batch is short."""
    text, random = standard_library_text(100_000), torch.Generator().manual_seed(0)
    starts, lengths = (
        torch.randint(len(text) - LONGEST, (count,), generator=random),
        torch.randint(4, LONGEST + 2, (count,), generator=random),
    )
    sentences = [text[start : start + length] for start, length in zip(starts.tolist(), lengths.tolist(), strict=True)]
    return DataLoader(sentences, ROWS, shuffle=True, drop_last=False, collate_fn=collate, generator=random)  # pyright: ignore[reportArgumentType]


def sum_and_count(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of the losses of all labels, and their number: parts of a batch have unequally many."""
    total = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=NO_LABEL, reduction="sum")
    return total, (labels != NO_LABEL).sum()


def accumulate(model: nn.Module, given: Tensor, labels: Tensor) -> Tensor:
    """Add up the gradients of a batch, a part at a time, divide them by its labels, and return its loss."""
    parts = min(PARTS, len(given))
    sums: list[Tensor] = []
    for some, wanted in zip(given.tensor_split(parts), labels.tensor_split(parts), strict=True):
        total, _ = sum_and_count(model(some), wanted)
        total.backward()
        sums.append(total.detach())
    count = (labels != NO_LABEL).sum().item()
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad /= count
    return (torch.stack(sums).double().sum() / count).float()
