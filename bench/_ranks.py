"""Several ranks over gloo on this machine, for benchmarks: starts the processes, hands back what rank 0 found.

The ranks are processes of this machine, over loopback. Or each is on a host of its own, joined by links with a stated delay
and rate (``tests/links/``).
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing, nn

import adaptra

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests" / "links"))
import linked_hosts

WIDTH = 16
"""Width of the small model: a few hundred multiplications per layer, so that its arithmetic hardly counts."""


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def run_on_ranks(measure: Callable[..., Any], ranks: int, *arguments: Any) -> Any:
    """Run ``measure(rank, *arguments)`` on every rank of a gloo group, one process each, and return rank 0's result."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.json"
        multiprocessing.start_processes(
            _rank, (ranks, port, str(results), measure, arguments), nprocs=ranks, start_method="spawn"
        )
        return json.loads(results.read_text())


def run_on_hosts(
    measure: Callable[..., Any],
    ranks: int,
    links: list[str],
    *arguments: Any,
    timeout: float = 3600.0,
    steady: bool = False,
    own_group: bool = False,
) -> Any:
    """The same with each rank on a host of its own; ``links`` are changes as ``tests/links/link_changes.py`` reads them.

    Arguments are JSON values. :func:`change_links` changes links from within ``measure``. What rank 0 writes on standard error
    is shown at once. With ``steady`` TCP is ``linked_hosts.STEADY`` instead of the system's.
    With ``own_group`` it is ``measure`` that makes the default process group.
    """
    if (reason := linked_hosts.missing()) is not None:
        raise SystemExit(reason)
    with linked_hosts.LinkedHosts(ranks, *links, tcp=linked_hosts.STEADY if steady else None) as hosts:
        file, name = inspect.getfile(measure), measure.__name__
        return hosts.call(_on_host, str(Path(file).resolve()), name, own_group, arguments, timeout=timeout, shown=(0,))[0]


def change_links(*changes: str) -> None:
    """Change the links between the hosts of :func:`run_on_hosts`, at once on all ranks."""
    dist.barrier()
    for change in changes if dist.get_rank() == 0 else ():
        linked_hosts.change_links(os.environ[linked_hosts.CONTROL], change)
    dist.barrier()


def _on_host(rank: int, file: str, name: str, own_group: bool, arguments: list[Any]) -> Any:
    sys.path.append(str(Path(file).parent))
    measure = getattr(importlib.import_module(Path(file).stem), name)
    torch.set_num_threads(1)
    if not own_group:
        dist.init_process_group("gloo")
    found = measure(rank, *arguments)
    dist.barrier()
    dist.destroy_process_group()
    return found


def _rank(rank: int, ranks: int, port: int, results: str, measure: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(ranks))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = measure(rank, *arguments)
    if rank == 0:
        Path(results).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def timed(step: Callable[[], object]) -> tuple[float, float, float]:
    """Seconds of one step that all ranks begin at one moment, until the last of them ends it.

    Wall clock, then processor time as the mean of the ranks and of the busiest.
    """
    started, worked = _start_together(), time.process_time()
    step()
    ended = torch.tensor(time.monotonic(), dtype=torch.float64)
    mean = torch.tensor(time.process_time() - worked, dtype=torch.float64)
    busiest = mean.clone()
    dist.all_reduce(ended, op=dist.ReduceOp.MAX)
    dist.all_reduce(mean)
    dist.all_reduce(busiest, op=dist.ReduceOp.MAX)
    return ended.item() - started, mean.item() / dist.get_world_size(), busiest.item()


def timed_in_turn(
    pipes: Sequence[adaptra.Pipeline], batch: tuple[Any, ...], runs: int
) -> list[list[tuple[float, float, float]]]:
    """Steps of several pipelines in turn, as :func:`timed` tells of each; one round before these is not counted."""
    return [[timed(lambda pipe=pipe: pipe.step(*batch)) for pipe in pipes] for _ in range(runs + 1)][1:]


def timed_in_a_row(step: Callable[[], object], steps: int, before: int = 1) -> list[float]:
    """Seconds of each of some steps that follow each other as in training: from when all ranks have ended the step before.

    Nothing lies between them that TCP would take for a pause. After a pause TCP begins anew to find out how much a slow link
    takes. So the first steps, ``before`` of them, are not counted.
    """
    ends = [_start_together()]
    for _ in range(before + steps):
        step()
        ends.append(time.monotonic())
    latest = torch.tensor(ends, dtype=torch.float64)
    dist.all_reduce(latest, op=dist.ReduceOp.MAX)
    return latest.diff()[before:].tolist()


def _start_together() -> float:
    """Wait for a moment that every rank knows by then, however slow its links are, and return it.

    Ranks leave a barrier as far apart as their links are slow. All of them run on one machine and share its monotonic clock.
    """
    latest = torch.tensor(time.monotonic(), dtype=torch.float64)
    dist.all_reduce(latest, op=dist.ReduceOp.MAX)
    now = time.monotonic()
    both = torch.tensor([now, now - latest.item()], dtype=torch.float64)
    dist.all_reduce(both, op=dist.ReduceOp.MAX)
    start = both[0].item() + 2.0 * both[1].item() + 0.01
    time.sleep(max(0.0, start - time.monotonic()))
    return start


def layer(width: int = WIDTH) -> nn.Module:
    """One stage of the small model."""
    return nn.Sequential(nn.Linear(width, width), nn.Tanh())


def layer_with_buffers(width: int = WIDTH) -> nn.Module:
    """One stage whose forwards change buffers, which workers of several replicas hand over."""
    return nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Tanh())


def squared_error(output: Tensor, target: Tensor) -> Tensor:
    """The small model's loss."""
    return ((output - target) ** 2).mean()


def small_problem(
    stages: int, microbatches: int, width: int = WIDTH, rows: int = 2, make: Callable[[int], nn.Module] = layer
) -> dict[str, Any]:
    """The arguments of adaptra.compile for a model of one layer per stage, with ``rows`` rows in a microbatch."""
    torch.manual_seed(0)
    inputs = torch.randn(rows * microbatches, width)
    return {
        "model": nn.Sequential(*(make(width) for _ in range(stages))),
        "stages": stages,
        "microbatches": microbatches,
        "example_inputs": (inputs, torch.zeros_like(inputs)),
        "loss": squared_error,
        "split": [str(stage) for stage in range(1, stages)],
    }
