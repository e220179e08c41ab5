"""A sharded optimizer beside one without shards: memory of a rank, seconds of a step, and bits.

Replicas of one stage are processes of this machine over gloo. Both sides train in the same processes, one step of each in turn.
A step includes the optimizer's, and what brings parameters to all replicas. Both sides have buckets of one size, and replicas
that keep their rows: by measured links and speeds each side would choose its own. Memory is counted from tensors, on the rank
with the most: the parameters, the step's gradients before they have owners, and the optimizer's state.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from _ranks import run_on_ranks
from _table import Row, parser, print_rows
from torch import nn

import adaptra

Make = Callable[..., torch.optim.Optimizer]


def model_of(width: int, blocks: int) -> nn.Module:
    """Layers of a transformer's sizes, without attention."""
    torch.manual_seed(0)
    layers = (
        nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        for _ in range(blocks)
    )
    return nn.Sequential(*layers)


def adamw(make: Make, parameters: Iterable[nn.Parameter]) -> list[torch.optim.Optimizer]:
    """AdamW of all parameters."""
    return [make(torch.optim.AdamW, parameters, lr=1e-3)]


def muon(make: Make, parameters: Iterable[nn.Parameter]) -> list[torch.optim.Optimizer]:
    """Muon of the matrices, and AdamW of the others."""
    found = [*parameters]
    of_matrices = make(torch.optim.Muon, [one for one in found if one.dim() == 2], lr=1e-3)
    return [of_matrices, make(torch.optim.AdamW, [one for one in found if one.dim() != 2], lr=1e-3)]


OPTIMIZERS = {"AdamW": adamw, "Muon": muon}
STATE_BYTES = {"AdamW": 8, "Muon": 4}
"""Of a parameter in float32."""
BUCKET = 4 << 20


def without_shards(kind: Callable[..., torch.optim.Optimizer], parameters: Any, **settings: Any) -> torch.optim.Optimizer:
    """An optimizer as torch makes it."""
    return kind(parameters, **settings)


def bytes_of_parameter(pipe: adaptra.Pipeline, optimizers: Sequence[torch.optim.Optimizer]) -> float:
    """Bytes that a rank holds for each of its parameters at the end of a step."""
    parameters = [*pipe.parameters()]
    held = 2 * sum(one.nbytes for one in parameters)
    for optimizer in optimizers:
        held += sum(one.nbytes for state in optimizer.state.values() for one in state.values() if isinstance(one, torch.Tensor))
    return held / sum(one.numel() for one in parameters)


def measure(rank: int, name: str, steps: int, width: int, blocks: int, rows: int) -> dict[str, Any]:
    """Seconds of a step and bytes of a parameter, with shards and without, and the number of tensors that differ."""
    make = OPTIMIZERS[name]
    generator = torch.Generator().manual_seed(rank)
    batch = torch.randn(rows, width, generator=generator), torch.randn(rows, width, generator=generator)
    with contextlib.ExitStack() as opened:
        pipes = [
            opened.enter_context(
                adaptra.compile(
                    model_of(width, blocks),
                    stages=1,
                    microbatches=2,
                    loss=nn.functional.mse_loss,
                    example_inputs=batch,
                    options=adaptra.Options(adapt=False, reduce=adaptra.Reduce(bucket=BUCKET)),
                )
            )
            for _ in range(2)
        ]
        sides = [
            (pipe, make(how, pipe.parameters())) for pipe, how in zip(pipes, (pipes[0].shard, without_shards), strict=True)
        ]
        seconds: list[list[float]] = [[], []]
        for step in range(steps + 2):
            for side in (0, 1) if step % 2 else (1, 0):
                pipe, optimizers = sides[side]
                dist.barrier()
                began = time.monotonic()
                pipe.step(*batch)
                for one in optimizers:
                    one.step()
                    one.zero_grad()
                dist.barrier()
                seconds[side].append(time.monotonic() - began)
        held = torch.tensor([bytes_of_parameter(*side) for side in sides], dtype=torch.float64)
        pairs = zip(pipes[0].parameters(), pipes[1].parameters(), strict=True)
        different = torch.tensor(sum(not torch.equal(*pair) for pair in pairs))
        dist.all_reduce(held, op=dist.ReduceOp.MAX)
        dist.all_reduce(different)
    ours, theirs = (one[2:] for one in seconds)
    quotient = statistics.median(one / other for one, other in zip(ours, theirs, strict=True))
    return {
        "seconds": [statistics.median(ours), statistics.median(theirs)],
        "quotient": quotient,
        "bytes": held.tolist(),
        "different": int(different),
    }


def main() -> int:
    """Measure and print the table."""
    arguments = parser(__doc__)
    arguments.add_argument("--replicas", type=int, nargs="+", default=[2, 4, 8])
    arguments.add_argument("--optimizers", nargs="+", default=[*OPTIMIZERS], choices=[*OPTIMIZERS])
    arguments.add_argument("--steps", type=int, default=20, help="of each side")
    arguments.add_argument("--width", type=int, default=256)
    arguments.add_argument("--blocks", type=int, default=12)
    arguments.add_argument("--rows", type=int, default=256, help="of a replica's batch")
    given = arguments.parse_args()
    rows: list[Row] = []
    for name in given.optimizers:
        for replicas in given.replicas:
            found = run_on_ranks(measure, replicas, name, given.steps, given.width, given.blocks, given.rows)
            (ours, plain), (seconds, without) = found["bytes"], found["seconds"]
            what = f"{name}, {replicas} replicas"
            rows.append(Row(f"{what}: bytes of a parameter, and the bar", ours, 8 + STATE_BYTES[name] / replicas, "B", 1))
            rows.append(Row(f"{what}: bytes of a parameter, and without shards", ours, plain, "B", 1))
            rows.append(Row(f"{what}: step, and without shards", seconds * 1e3, without * 1e3, "ms", given.steps))
            rows.append(Row(f"{what}: step ÷ step, by pairs", found["quotient"], 1.01, "", given.steps))
            rows.append(Row(f"{what}: tensors that differ", found["different"], 0, "", given.steps + 2))
    print_rows("replicas of one stage over gloo", rows, baseline="without, or bar", as_json=given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
