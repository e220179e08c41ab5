"""What the runtime itself costs per op, and how close a measured step comes to the simulated one.

Four processes over gloo train a model so small that its computation hardly counts: what is left is dispatch, bookkeeping and
transport. torch.distributed.pipelining runs the same schedule (its own runtime, loaded from the exported CSV) in the same
processes, the two in turn. The cost per op is a step's time divided by the number of compute ops of a rank. A second part pads
every op to a stated duration (emulated devices) and compares the measured iteration with the simulator's makespan.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from _table import Row, print_rows
from torch import multiprocessing, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

import adaptra
from adaptra.simulate import simulate
from adaptra.torch_csv import to_csv

WIDTH = 16


def layer() -> nn.Module:
    """One stage: a few hundred multiplications, so that the runtime's own cost shows."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


def squared_error(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The loss of both sides."""
    return ((output - target) ** 2).mean()


def step_times(step: Any, count: int) -> list[float]:
    """Seconds of each of ``count`` steps, after a barrier each."""
    times: list[float] = []
    for _ in range(count):
        dist.barrier()
        started = time.perf_counter()
        step()
        dist.barrier()
        times.append(time.perf_counter() - started)
    return times


def measure(rank: int, ranks: int, port: int, arguments: argparse.Namespace, results: str) -> None:
    """One process: both runtimes in turn, then the emulated devices. Rank 0 writes the results."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(ranks))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    microbatches = arguments.microbatches
    program = adaptra.generate(arguments.schedule, ranks, microbatches)
    inputs = torch.randn(microbatches * 2, WIDTH, generator=torch.Generator().manual_seed(0))
    targets = torch.zeros_like(inputs)

    torch.manual_seed(0)
    model = nn.Sequential(*(layer() for _ in range(ranks)))
    with adaptra.compile(
        model,
        stages=ranks,
        microbatches=microbatches,
        example_inputs=(inputs, targets),
        loss=squared_error,
        split=[str(stage) for stage in range(1, ranks)],
        options=adaptra.Options(adapt=False, schedule=program),
    ) as pipe:
        stage = PipelineStage(layer(), rank, ranks, torch.device("cpu"))
        theirs = _PipelineScheduleRuntime([stage], microbatches, loss_fn=squared_error)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "schedule.csv"
            path.write_text(to_csv(program))
            theirs._load_csv(str(path))
        given = {"args": (inputs,) if rank == 0 else (), "target": targets if rank == ranks - 1 else None}

        def their_step() -> None:
            theirs.step(*given["args"], target=given["target"])

        def our_step() -> None:
            pipe.step(inputs, targets)

        step_times(our_step, 3), step_times(their_step, 3)
        pairs = [(step_times(our_step, 1)[0], step_times(their_step, 1)[0]) for _ in range(arguments.runs)]

    seconds = arguments.op_ms / 1e3
    device = adaptra.EmulatedDevice(seconds, seconds, seconds)
    with adaptra.compile(
        model,
        stages=ranks,
        microbatches=microbatches,
        example_inputs=(inputs, targets),
        loss=squared_error,
        split=[str(stage) for stage in range(1, ranks)],
        options=adaptra.Options(adapt=False, schedule=program, emulate=device),
    ) as pipe:
        step_times(lambda: pipe.step(inputs, targets), 1)
        emulated = step_times(lambda: pipe.step(inputs, targets), arguments.emulated_runs)

    if rank == 0:
        found = {"pairs": pairs, "emulated": emulated, "ops": len(program.orders[0])}
        Path(results).write_text(json.dumps(found))
    dist.destroy_process_group()


def main() -> int:
    """Start the processes and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--schedule", default="zb_h1", help="a schedule both runtimes execute")
    parser.add_argument("--runs", type=int, default=20, help="paired steps of the two runtimes")
    parser.add_argument("--emulated-runs", type=int, default=5)
    parser.add_argument("--op-ms", type=float, default=20.0, help="duration of every emulated op, milliseconds")
    parser.add_argument("--json", action="store_true", help="print rows {name, ours, baseline, ratio, unit, runs}")
    arguments = parser.parse_args()
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        results = str(Path(folder) / "results.json")
        multiprocessing.start_processes(
            measure, (arguments.ranks, port, arguments, results), nprocs=arguments.ranks, start_method="spawn"
        )
        found = json.loads(Path(results).read_text())
    ops = found["ops"]
    ours, theirs = ([1e6 * pair[side] / ops for pair in found["pairs"]] for side in (0, 1))
    program = adaptra.generate(arguments.schedule, arguments.ranks, arguments.microbatches)
    seconds = arguments.op_ms / 1e3
    predicted = simulate(program, adaptra.CostModel.uniform(arguments.ranks, seconds, seconds, seconds)).makespan
    rows = [
        Row("cost per op, gloo, small tensors", median(ours), median(theirs), "µs", arguments.runs),
        Row(
            "emulated iteration, measured : simulated",
            1e3 * median(found["emulated"]),
            1e3 * predicted,
            "ms",
            arguments.emulated_runs,
        ),
    ]
    baseline = "torch.distributed.pipelining, or the simulator"
    print_rows("runtime", rows, baseline=baseline, as_json=arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
