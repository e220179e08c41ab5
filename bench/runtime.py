"""What the runtime itself costs per op, and how close a measured step comes to the simulated one.

Four processes over gloo train a model so small that its arithmetic hardly counts: what is left is dispatch, bookkeeping and
transport. torch.distributed.pipelining runs the same schedule (its own runtime, loaded from the exported CSV) in the same
processes, the two in turn.

Costs per op are those of a step divided by the compute ops of a rank. Processor time is that of all threads, the model's own
arithmetic included, as the mean of the ranks and for the busiest one. Wall clock with fewer cores than ranks mostly shows how
the ranks share the cores. The last row pads every op to a stated duration (emulated devices). It compares the measured
iteration with the simulator's makespan.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import torch
from _ranks import layer, run_on_ranks, small_problem, squared_error, timed
from _table import Row, parser, print_rows
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

import adaptra
from adaptra.program import Program
from adaptra.program.torch_csv import to_csv
from adaptra.simulation.simulate import simulate


def torch_runtime(rank: int, program: Program) -> _PipelineScheduleRuntime:
    """torch's runtime with the same schedule and a stage of the same size."""
    stage = PipelineStage(layer(), rank, program.ranks, torch.device("cpu"))
    runtime = _PipelineScheduleRuntime([stage], program.microbatches, loss_fn=squared_error)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "schedule.csv"
        path.write_text(to_csv(program))
        runtime._load_csv(str(path))
    return runtime


def measure(rank: int, program: Program, runs: int, emulated_runs: int, seconds: float) -> dict[str, Any]:
    """One rank: both runtimes in turn, then the emulated devices."""
    problem = small_problem(program.ranks, program.microbatches)
    inputs, targets = problem["example_inputs"]
    with adaptra.compile(**problem, options=adaptra.Options(adapt=False, schedule=program)) as pipe:
        theirs = torch_runtime(rank, program)
        args, target = (inputs,) if rank == 0 else (), targets if rank == program.ranks - 1 else None

        def our_step() -> None:
            pipe.step(inputs, targets)

        def their_step() -> None:
            theirs.step(*args, target=target)

        for _ in range(3):
            timed(our_step)
            timed(their_step)
        pairs = [(timed(our_step), timed(their_step)) for _ in range(runs)]
    device = adaptra.EmulatedDevice(seconds, seconds, seconds)
    with adaptra.compile(**problem, options=adaptra.Options(adapt=False, schedule=program, emulate=device)) as pipe:
        timed(lambda: pipe.step(inputs, targets))
        emulated = [timed(lambda: pipe.step(inputs, targets))[0] for _ in range(emulated_runs)]
    return {"pairs": pairs, "emulated": emulated}


def main() -> int:
    """Start the ranks and print the table."""
    arguments = parser(__doc__)
    arguments.add_argument("--ranks", type=int, default=4)
    arguments.add_argument("--microbatches", type=int, default=16)
    arguments.add_argument("--schedule", default="zb_h1", help="a generator's name; both runtimes execute it")
    arguments.add_argument("--runs", type=int, default=30, help="paired steps of the two runtimes")
    arguments.add_argument("--emulated-runs", type=int, default=5)
    arguments.add_argument("--op-ms", type=float, default=20.0, help="duration of every emulated op, milliseconds")
    given = arguments.parse_args()
    program = adaptra.generate(given.schedule, given.ranks, given.microbatches)
    seconds = given.op_ms / 1e3
    found = run_on_ranks(measure, given.ranks, program, given.runs, given.emulated_runs, seconds)
    predicted = simulate(program, adaptra.CostModel.uniform(given.ranks, seconds, seconds, seconds)).makespan

    def per_op(side: int, clock: int) -> float:
        return 1e6 * median(pair[side][clock] for pair in found["pairs"]) / len(program.orders[0])

    rows = [
        Row("processor time per op, mean of ranks", per_op(0, 1), per_op(1, 1), "µs", given.runs),
        Row("processor time per op, busiest rank", per_op(0, 2), per_op(1, 2), "µs", given.runs),
        Row("wall clock per op", per_op(0, 0), per_op(1, 0), "µs", given.runs),
        Row("emulated iteration", 1e3 * median(found["emulated"]), 1e3 * predicted, "ms", given.emulated_runs),
    ]
    title = f"{given.schedule}, {given.ranks} ranks, {given.microbatches} microbatches, gloo, small tensors"
    print_rows(title, rows, baseline="torch; simulator", as_json=given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
