"""What it costs a step to measure the norms of its gradients: the same job with and without, in turns on the same processes.

Two replicas train a small GPT on CPUs. A turn of one is followed by a turn of the other, which first changes each time. So the
load of the machine is on both alike. A row has the median step of each, another one the median of their ratios turn by turn.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _ranks import run_on_ranks
from _table import Row, parser, print_rows
from torch import nn
from torch.nn import functional

import adaptra

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests" / "support"))

REPLICAS, MICROBATCHES, ROWS = 2, 2, 8


def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The cross entropy over all tokens."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def steps(_rank: int, width: int, blocks: int, turns: int, each: int) -> list[list[float]]:
    """The seconds of a step without and with norms, turn by turn."""
    from models import GPT

    torch.set_num_threads(1)
    drawn = torch.randint(0, 256, (ROWS, 65))
    inputs, targets = drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()
    pipes: list[adaptra.Pipeline] = []
    for measures in (False, True):
        torch.manual_seed(0)
        model: nn.Module = GPT(blocks=blocks, width=width, length=64)
        options = adaptra.Options(adapt=False, noise_scale=measures)
        shape: dict[str, Any] = {"stages": 1, "microbatches": MICROBATCHES}
        pipes.append(adaptra.compile(model, **shape, example_inputs=((inputs,), targets), loss=loss, options=options))
    optimizers = [torch.optim.SGD(pipe.parameters(), lr=1e-3) for pipe in pipes]
    seconds: list[list[float]] = [[], []]
    for turn in range(turns + 1):
        for one in (0, 1) if turn % 2 else (1, 0):
            dist.barrier()
            began = time.perf_counter()
            for _ in range(each):
                pipes[one].step((inputs,), targets)
                optimizers[one].step()
                optimizers[one].zero_grad()
            if turn:  # the first one warms up
                seconds[one].append((time.perf_counter() - began) / each)
    count = sum(parameter.numel() for parameter in pipes[0].parameters())
    for pipe in pipes:
        pipe.close()
    return [*seconds, [float(count)]]


def main() -> int:
    """Measure and print."""
    arguments = parser(__doc__)
    arguments.add_argument("--width", type=int, default=256, help="of the model")
    arguments.add_argument("--blocks", type=int, default=4, help="of the model")
    arguments.add_argument("--turns", type=int, default=20, help="of each")
    arguments.add_argument("--each", type=int, default=5, help="steps in a turn")
    given = arguments.parse_args()
    without, with_norms, (count,) = run_on_ranks(steps, REPLICAS, given.width, given.blocks, given.turns, given.each)
    ratios = [one / other for one, other in zip(with_norms, without, strict=True)]
    medians = statistics.median(with_norms), statistics.median(without)
    more = 1e9 * (statistics.median(ratios) - 1) * medians[1] / count
    rows = [
        Row("a step with norms", 1e3 * medians[0], 1e3 * medians[1], "ms", given.turns),
        Row("the same, turn by turn", statistics.median(ratios), 1.0, "of a step without", given.turns),
        Row("what norms cost", more, None, "ns per parameter", given.turns),
    ]
    title = f"{REPLICAS} replicas, {count / 1e6:.3g} million parameters, {ROWS * 64} tokens each a step"
    print_rows(title, rows, baseline="without norms", as_json=given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
