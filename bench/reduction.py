"""Sums without a pipeline: DDP with the hook beside DDP, FSDP2 beside its own collectives, and how soon a lost rank is known.

Ranks are processes of this machine over gloo. Both sides train in the same processes, one step of each in turn, either one
first every other time, from several starts. A late rank sleeps before its backward pass. For losses rank 1 is killed or stopped
in the middle of a sum.
"""

from __future__ import annotations

import hashlib
import os
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _ranks import run_on_ranks
from _table import Row, parser, print_rows
from torch import nn

import adaptra
from adaptra import reduction
from adaptra.collectives.rounds import ALGORITHMS

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests" / "support"))
from processes import run_processes

_LATE = 0.3
"""Of a step."""
_STARTS = 5
"""Of DDP: from start to start, one of two equal sides takes up to 3 % longer, by where its memory lies."""


def residual_net(width: int, blocks: int) -> nn.Module:
    """A residual network over small pictures."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolutions = nn.Sequential(
                nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1)
            )

        def forward(self, pictures: torch.Tensor) -> torch.Tensor:
            return torch.relu(pictures + self.convolutions(pictures))

    pooled = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))
    return nn.Sequential(nn.Conv2d(3, width, 3, padding=1), *[Block() for _ in range(blocks)], pooled)


def stepper(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, *shape: int) -> Callable[[float], float]:
    """A function that trains one step on a new batch after a pause in seconds, and returns the seconds of the step."""
    generator = torch.Generator().manual_seed(rank)

    def step(pause: float) -> float:
        batch = torch.randn(*shape, generator=generator)
        dist.barrier()
        began = time.monotonic()
        loss = model(batch).square().mean()
        time.sleep(pause)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return time.monotonic() - began

    return step


def in_turn(rank: int, steps: int, late: int | None, *sides: Callable[[float], float]) -> list[float]:
    """The median seconds of a step of each side, on the slowest rank."""
    usual = torch.tensor([side(0.0) for side in sides for _ in range(3)]).median().reshape(1)
    dist.all_reduce(usual, op=dist.ReduceOp.MAX)
    pause = _LATE * usual.item() if rank == late else 0.0
    rows = [[side(pause) for side in sides[:: 1 - 2 * (step % 2)]][:: 1 - 2 * (step % 2)] for step in range(steps)]
    times = torch.tensor(rows)
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    return times.median(dim=0).values.tolist()


def weights_of(model: nn.Module) -> str:
    """A digest of a model's weights."""
    whole: list[Any] = [getattr(one, "full_tensor", lambda one=one: one)() for one in model.parameters()]
    return hashlib.sha256(b"".join(one.detach().numpy().tobytes() for one in whole)).hexdigest()


def measure_ddp(rank: int, steps: int, late: int | None, width: int, blocks: int, size: int) -> tuple[list[float], str]:
    """Seconds of a step with the hook and without, and a digest of the weights with it."""
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    models = [residual_net(width, blocks) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    ours, theirs = map(DistributedDataParallel, models)
    with reduction.HookState() as state:
        ours.register_comm_hook(state, reduction.hook)
        sides = [stepper(one, torch.optim.SGD(one.parameters(), lr=0.01), rank, 4, 3, size, size) for one in (ours, theirs)]
        times = in_turn(rank, steps, late, *sides)
        return times, weights_of(models[0])


def measure_fsdp(rank: int, steps: int, width: int) -> tuple[list[float], str]:
    """The same of FSDP2, over layers of a transformer."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    models: list[nn.Module] = []
    for _ in range(2):
        torch.manual_seed(0)
        layers = [nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True) for _ in range(4)]
        models.append(nn.Sequential(*layers))
        for module in [*layers, models[-1]]:
            fully_shard(module, mesh=mesh)
    reduction.use_in(models[0])
    sides = [stepper(one, torch.optim.AdamW(one.parameters(), lr=1e-3), rank, 4, 32, width) for one in models]
    return in_turn(rank, steps, None, *sides), weights_of(models[0])


def measure_loss(rank: int, sent: int, algorithm: Any) -> float:
    """Seconds from the end of rank 1 in the middle of a sum until all others have an error that names it."""
    from adaptra.errors import PeerLostError

    dist.init_process_group("gloo")
    tensor, how = torch.ones(2**20), adaptra.Reduce(algorithm=algorithm)
    reduction.all_reduce(tensor, how=how)
    dist.barrier()
    if rank == 1:
        threading.Timer(0.05, os.kill, (os.getpid(), sent)).start()
    began = time.monotonic() + 0.05
    try:
        while True:
            reduction.all_reduce(tensor, how=how)
    except PeerLostError as error:
        seconds = time.monotonic() - began
        if error.rank != 1:
            raise
    if rank == 0:
        time.sleep(1.0)  # the others still ask the store, which is here
    return seconds


def main() -> int:
    """Measure and print the table."""
    arguments = parser(__doc__)
    arguments.add_argument("--ranks", type=int, default=4, help="ranks of DDP; FSDP2 has one less")
    arguments.add_argument("--steps", type=int, default=20, help="of each side")
    arguments.add_argument("--width", type=int, default=64)
    arguments.add_argument("--blocks", type=int, default=8)
    arguments.add_argument("--size", type=int, default=16, help="of a picture")
    arguments.add_argument("--losses", type=int, default=5, help="of each kind")
    given = arguments.parse_args()
    rows: list[Row] = []
    for name, late in (("nobody late", None), (f"one rank late by {_LATE:.0%} of a step", given.ranks - 1)):
        of_ddp = [
            run_on_ranks(measure_ddp, given.ranks, given.steps, late, given.width, given.blocks, given.size)
            for _ in range(_STARTS)
        ]
        ours, theirs = (statistics.median(one[0][side] for one in of_ddp) * 1e3 for side in (0, 1))
        rows.append(Row(f"DDP step with the hook, {name}", ours, theirs, "ms", _STARTS * given.steps))
        others = sum(digest != of_ddp[0][1] for _, digest in of_ddp)
        rows.append(Row(f"other bits in another run, {name}", others, 0, "", _STARTS))
    of_fsdp = [run_on_ranks(measure_fsdp, given.ranks - 1, given.steps, 128) for _ in range(2)]
    ours, theirs = (statistics.median(one[0][side] for one in of_fsdp) * 1e3 for side in (0, 1))
    rows.append(Row("FSDP2 step", ours, theirs, "ms", 2 * given.steps))
    rows.append(Row("other bits in a second run of FSDP2", int(of_fsdp[0][1] != of_fsdp[1][1]), 0, "", 2))
    for sent, bar in ((signal.SIGKILL, 1.0), (signal.SIGSTOP, 3.0)):
        for algorithm in ALGORITHMS:
            told = [run_processes(measure_loss, given.ranks, sent, algorithm, may_die=(1,)) for _ in range(given.losses)]
            longest = [max(seconds for seconds in one if seconds is not None) for one in told]
            if longest:
                name = f"{sent.name}, {algorithm}"
                median = statistics.median(longest)
                rows.append(Row(f"{name}: until all others name it, median", median, bar, "s", len(longest)))
                rows.append(Row(f"{name}: longest", max(longest), bar, "s", len(longest)))
    print_rows(f"{given.ranks} ranks over gloo", rows, baseline="torch's, or bar", as_json=given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
