"""Train a GPT as two replicas of two stages, kill one of the four processes within a step, and go on without it.

    python examples/kill_worker.py

It starts the processes by `adaptra run`. They train twice: undisturbed, and with a fault that ends one process by SIGKILL. The
others do that step again, one of them hosts the lost worker, and training goes on. Every loss and every weight must be bitwise
that of the first run. Ops are padded by sleeping to a stated duration, so that few cores show the timeline of four devices.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from gpt import GPT, batch_of, next_byte_loss, standard_library_text
from rich.console import Console
from rich.table import Table
from torch import Tensor

import adaptra
from adaptra.report.perfetto import write as write_trace
from adaptra.report.picture import draw
from adaptra.simulation.timeline import Timeline

STAGES, REPLICAS = 2, 2
MICROBATCHES, ROWS, LENGTH = 8, 16, 64
VICTIM = "1.1"


@dataclass(frozen=True)
class Run:
    """One run as one process saw it: seconds and losses of its steps, its weights, a timeline on rank 0, and events."""

    seconds: list[float]
    losses: list[Tensor]
    weights: dict[str, Tensor]
    timeline: Timeline | None
    events: list[str]


def train(arguments: argparse.Namespace, **options: object) -> Run:
    """Train for some steps with these options."""
    torch.manual_seed(0)
    model, text = GPT(blocks=arguments.blocks, length=LENGTH), standard_library_text()
    duration = arguments.op_ms / 1e3
    pipe = adaptra.compile(
        model,
        stages=STAGES,
        microbatches=MICROBATCHES,
        replicas=REPLICAS,
        example_inputs=batch_of(text, 0, ROWS, LENGTH),
        loss=next_byte_loss,
        options=adaptra.Options(emulate=adaptra.EmulatedDevice(duration, duration, duration), **options),  # type: ignore[arg-type]
    )
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-3)
    seconds, losses = [], []
    with pipe:
        for step in range(arguments.steps):
            begun = time.perf_counter()
            pipe.step(*batch_of(text, step * REPLICAS + pipe.replica, ROWS, LENGTH))
            optimizer.step()
            optimizer.zero_grad()
            seconds.append(time.perf_counter() - begun)
            losses.append(pipe.microbatch_losses)
        timeline = pipe.timeline()
        weights = {name: value.clone() for name, value in pipe.state_dict().items()}
        return Run(seconds, losses, weights, timeline, [str(event) for event in pipe.events])


def report(arguments: argparse.Namespace, undisturbed: Run, killed: Run, *, is_equal: bool) -> None:
    """Print what rank 0 saw, draw the last step of both runs, and say whether all numbers are equal."""
    console = Console(width=None if sys.stdout.isatty() else 120)
    table = Table(title=f"worker {VICTIM} is killed in step {arguments.kill_at}", title_justify="left")
    for heading in ("step", "undisturbed, ms", "with the kill, ms", "loss", "equal bits"):
        table.add_column(heading, justify="right")
    for step, losses in enumerate(undisturbed.losses):
        table.add_row(
            str(step),
            f"{1e3 * undisturbed.seconds[step]:.0f}",
            f"{1e3 * killed.seconds[step]:.0f}",
            f"{losses.mean().item():.4f}",
            "yes" if torch.equal(losses, killed.losses[step]) else "NO",
        )
    console.print(table)
    for event in killed.events:
        console.print(event, highlight=False, markup=False)
    assert undisturbed.timeline is not None and killed.timeline is not None, "rank 0 gathers the timelines"
    named = [("undisturbed, four processes", undisturbed.timeline), ("after the kill, three processes", killed.timeline)]
    arguments.output.mkdir(parents=True, exist_ok=True)
    draw(
        named,
        arguments.output / "timeline.svg",
        title=f"One step, measured; ops sleep until {arguments.op_ms:g} ms have passed",
    )
    write_trace(named, arguments.output / "trace.json")
    console.print(
        f"bitwise equal to the undisturbed run on rank 0: {'all' if is_equal else 'NOT all'} losses and "
        f"{len(killed.weights)} weights\n"
        f"picture: {arguments.output}/timeline.svg; trace for ui.perfetto.dev: {arguments.output}/trace.json"
    )


def main() -> int:
    """Start the processes, or be one of them; exit status 1 if anything that is claimed did not happen."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--kill-at", type=int, default=6, help="the step in which the worker is killed")
    parser.add_argument("--op-ms", type=float, default=20.0, help="emulated duration of every op, milliseconds")
    parser.add_argument("--blocks", type=int, default=4, help="transformer blocks of the GPT")
    parser.add_argument("--output", type=Path, default=Path("out/demo-failure"), help="folder for pictures and verdicts")
    arguments = parser.parse_args()
    verdicts = [arguments.output / f"rank-{rank}.json" for rank in range(STAGES * REPLICAS)]
    if "RANK" not in os.environ:
        for verdict in verdicts:
            verdict.unlink(missing_ok=True)
        command = [sys.executable, "-m", "adaptra.cli", "run", "-n", str(len(verdicts)), __file__, *sys.argv[1:]]
        status = subprocess.run(command, check=False).returncode
        equal = [json.loads(one.read_text()) for one in verdicts if one.exists()]
        print(f"{len(equal)} of {len(verdicts)} processes lived, and {sum(equal)} of them had equal losses and weights")
        return int(status != 0 or equal != [True] * (len(verdicts) - 1))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    undisturbed = train(arguments)
    killed = train(arguments, survive=True, faults=[f"kill {VICTIM} @{arguments.kill_at}:{VICTIM[-1]}W3"])
    is_equal = all(map(torch.equal, undisturbed.losses, killed.losses)) and all(
        torch.equal(value, killed.weights[name]) for name, value in undisturbed.weights.items()
    )
    if dist.get_rank() == 0:
        report(arguments, undisturbed, killed, is_equal=is_equal)
    arguments.output.mkdir(parents=True, exist_ok=True)
    verdicts[dist.get_rank()].write_text(json.dumps(is_equal))
    return 0


if __name__ == "__main__":
    sys.exit(main())
