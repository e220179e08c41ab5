"""Train by DistributedDataParallel with adaptra's sums: the same bits in every run, and a lost rank is named on all others.

torchrun --nproc-per-node=2 examples/ddp_hook.py [--steps 10] [--lose-at 5]
"""

from __future__ import annotations

import argparse
import hashlib
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from adaptra import reduction


def main() -> None:
    """Train, and print a digest of the weights."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--lose-at", type=int, help="the last rank ends before this step, as one that was killed")
    arguments = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
    ddp = DistributedDataParallel(model)
    state = reduction.HookState()
    ddp.register_comm_hook(state, reduction.hook)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    rows = torch.Generator().manual_seed(dist.get_rank())
    for step in range(arguments.steps):
        if step == arguments.lose_at and dist.get_rank() == dist.get_world_size() - 1:
            os._exit(1)
        loss = ddp(torch.randn(16, 32, generator=rows)).square().mean()
        optimizer.zero_grad()
        try:
            loss.backward()
        except RuntimeError:
            raise state.error or RuntimeError("not by the hook")  # noqa: B904 - DDP's own has the text of ours
        optimizer.step()
    state.close()
    weights = b"".join(one.detach().numpy().tobytes() for one in model.parameters())
    print(f"rank {dist.get_rank()}: {hashlib.sha256(weights).hexdigest()[:16]}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
