"""What a step costs that returns the model's outputs too: logits of a whole batch, on the rank of the last stage alone.

A language model with a large vocabulary, whose logits are the largest tensors of a step. One pipeline runs steps with and
without outputs in turn, so both have the same plan and the same machine. Memory is the peak of the last stage's process.
"""

from __future__ import annotations

import sys
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - the name all of torch uses
from _memory import peak_bytes, reset_peak
from _ranks import run_on_ranks, timed
from _table import Row, parser, print_rows
from torch import Tensor, nn

import adaptra


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean over all tokens."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def model_of(words: int, width: int, layers: int) -> nn.Module:
    """Transformer layers between an embedding and a head."""
    torch.manual_seed(0)
    made = [nn.TransformerEncoderLayer(width, width // 64, 4 * width, 0.0, batch_first=True) for _ in range(layers)]
    return nn.Sequential(nn.Embedding(words, width), *made, nn.Linear(width, words))


def measure(rank: int, ranks: int, tokens: int, words: int, width: int, layers: int, microbatches: int, runs: int) -> Any:
    """One rank: seconds of each step and the last rank's peak bytes, without and with outputs in turn."""
    torch.manual_seed(0)
    inputs, targets = torch.randint(words, (2, 2 * microbatches, tokens // (2 * microbatches)))
    found: list[tuple[float, float]] = []
    with adaptra.compile(
        model_of(words, width, layers),
        stages=ranks,
        microbatches=microbatches,
        example_inputs=(inputs, targets),
        loss=loss_of,
        options=adaptra.Options(adapt=False),
    ) as pipe:
        for number in range(2 * runs + 4):
            asks = number % 2 == 1 and rank == ranks - 1
            reset_peak()
            took, *_ = timed(lambda asks=asks: pipe.step(inputs, targets, outputs=asks))
            peak = torch.tensor(float(peak_bytes()) if rank == ranks - 1 else 0.0, dtype=torch.float64)
            dist.all_reduce(peak)
            found.append((took, peak.item()))
            for one in pipe.parameters():
                one.grad = None
    return found[4:]


def main() -> int:
    """Measure and print the table."""
    arguments = parser(__doc__)
    arguments.add_argument("--ranks", type=int, default=2)
    arguments.add_argument("--tokens", type=int, default=1024, help="of a batch")
    arguments.add_argument("--words", type=int, default=32000)
    arguments.add_argument("--width", type=int, default=256)
    arguments.add_argument("--layers", type=int, default=6)
    arguments.add_argument("--microbatches", type=int, default=8)
    arguments.add_argument("--runs", type=int, default=15, help="pairs of steps")
    given = arguments.parse_args()
    sizes = (given.ranks, given.tokens, given.words, given.width, given.layers, given.microbatches, given.runs)
    found = run_on_ranks(measure, given.ranks, *sizes)

    def of(asks: bool, which: int) -> float:
        return median(one[which] for one in found[int(asks) :: 2])

    rows = [
        Row("step", 1e3 * of(True, 0), 1e3 * of(False, 0), "ms", given.runs),
        Row("peak memory of the last stage's rank", of(True, 1) / 1e6, of(False, 1) / 1e6, "MB", given.runs),
    ]
    title = f"outputs beside the loss: {given.tokens} tokens x {given.words} words on {given.ranks} ranks"
    print_rows(title, rows, baseline="loss alone", as_json=given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
