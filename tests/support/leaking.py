"""What a job holds after it has done something over and over: two replicas of two stages, one process each."""

import gc
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from open_files import open_files
from torch import Tensor
from torch.distributed import distributed_c10d
from training import MIXED

import adaptra

RANKS, ROWS = 4, 16
ACTIONS = ("compile and close", "cut", "role", "timeline")


def held() -> dict[str, int]:
    """Descriptors, threads, keys in the store and process groups, once every rank has let go of what it can.

    Entries of a plan log don't count. How many a running pipeline keeps depends on how soon its ranks report a step.
    """
    assert dist.group.WORLD is not None
    store = dist.group.WORLD.get_group_store()
    for _ in range(2):
        gc.collect()
        dist.barrier()
        time.sleep(0.2)  # the store's host takes down connections that were closed
    found = {
        "descriptors": open_files(),
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "keys": sum("/log/" not in key for key in store.list_keys()),
        "groups": len(distributed_c10d._world.pg_map),
    }
    dist.barrier()
    return found


def compiled(inputs: Any, targets: Tensor) -> adaptra.Pipeline:
    return adaptra.compile(
        MIXED.make(), stages=2, microbatches=4, example_inputs=(inputs, targets), loss=MIXED.loss, split=["middle.1"],
        options=adaptra.Options(adapt=False, timeout=600.0),
    )  # fmt: skip


def repeat(rank: int, what: str, looks: Sequence[int]) -> list[dict[str, int]]:
    """The counts of descriptors, threads, groups and keys after each number of rounds in ``looks``."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    inputs, _, targets = MIXED.rows(ROWS, seed=0)
    found = []
    with compiled(inputs, targets) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters())
        pipe.step(inputs[0], targets)
        for count in range(1, max(looks) + 1):
            match what:
                case "compile and close":
                    with compiled(inputs, targets) as other:
                        other.step(inputs[0], targets)
                    del other
                case "cut":
                    pipe.take_split([["middle.1"], ["middle.4"]][count % 2], optimizer)
                    pipe.step(inputs[0], targets)
                case "role":
                    assert pipe.roles is not None
                    pipe.take_roles(pipe.roles.swapped(count % RANKS, (count + 1) % RANKS), optimizer)
                    pipe.step(inputs[0], targets)
                case _:
                    pipe.timeline()
            if count in looks:
                found.append(held())
    return found


def repeat_all(rank: int, looks: Sequence[int]) -> dict[str, list[dict[str, int]]]:
    return {what: repeat(rank, what, looks) for what in ACTIONS}
