"""What an inner compiler brings: the same pipeline with its stage graphs run op by op and compiled, step by step in turn.

One process per stage over gloo, one processor core each, trains a GPT whose microbatches take tens of milliseconds. The two
pipelines take the same batches from the same weights; the largest difference of their losses is shown.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name all of torch uses
from _ranks import run_on_ranks, timed
from _table import Row, parser, print_rows
from torch import Tensor

import adaptra

sys.path.append(str(Path(__file__).resolve().parent.parent / "examples"))
from gpt import GPT


def measure(_: int, stages: int, microbatches: int, shape: dict[str, Any], rows: int, inner: str, runs: int) -> dict[str, Any]:
    """One rank: both pipelines in turn."""
    tokens = torch.randint(256, (rows * microbatches, shape["length"] + 1), generator=torch.Generator().manual_seed(0))
    batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    pipes: list[adaptra.Pipeline] = []
    took: list[float] = []
    losses: list[list[float]] = []
    for name in (inner, "eager"):
        torch.manual_seed(0)
        started = time.monotonic()
        options = adaptra.Options(inner=name, adapt=False)
        pipes.append(
            adaptra.compile(
                GPT(**shape), stages=stages, microbatches=microbatches, example_inputs=batch, loss=token_loss, options=options
            )
        )
        took.append(time.monotonic() - started)
    optimizers = [torch.optim.AdamW(pipe.parameters(), lr=1e-3) for pipe in pipes]
    pairs: list[list[tuple[float, float, float]]] = []
    for _ in range(runs + 2):
        pairs.append([timed(lambda pipe=pipe: pipe.step(*batch)) for pipe in pipes])
        losses.append([pipe.microbatch_losses.mean().item() for pipe in pipes])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for pipe in pipes:
        pipe.close()
    return {"pairs": pairs[2:], "took": took, "losses": losses}


def token_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """The mean of the tokens' cross entropies."""
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def main() -> int:
    """Start the ranks and print the table."""
    arguments = parser(__doc__)
    arguments.add_argument("--inner", default="inductor", help="the backend of torch.compile to compare with eager")
    arguments.add_argument("--stages", type=int, default=2)
    arguments.add_argument("--microbatches", type=int, default=4)
    arguments.add_argument("--rows", type=int, default=2, help="sequences per microbatch")
    arguments.add_argument("--blocks", type=int, default=4)
    arguments.add_argument("--width", type=int, default=256)
    arguments.add_argument("--length", type=int, default=256, help="tokens per sequence")
    arguments.add_argument("--runs", type=int, default=15, help="paired steps")
    given = arguments.parse_args()
    shape = {"blocks": given.blocks, "width": given.width, "length": given.length}
    found = run_on_ranks(measure, given.stages, given.stages, given.microbatches, shape, given.rows, given.inner, given.runs)

    def step(side: int, clock: int) -> float:
        return 1e3 * median(pair[side][clock] for pair in found["pairs"])

    off = max(abs(ours - eager) / eager for ours, eager in found["losses"])
    took, eager_took = found["took"]
    rows = [
        Row("step", step(0, 0), step(1, 0), "ms", given.runs),
        Row("processor time of a step, mean of ranks", step(0, 1), step(1, 1), "ms", given.runs),
        Row("adaptra.compile", took, eager_took, "s", 1),
        Row("largest relative difference of a loss", off, None, "", given.runs + 2),
    ]
    title = f"GPT of {given.blocks} blocks, width {given.width}, {given.length} tokens; {given.stages} stages by {given.inner}"
    print_rows(title, rows, baseline="eager", as_json=given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
