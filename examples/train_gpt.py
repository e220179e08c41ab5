"""Train a GPT over four ranks through a link that turns slow, and watch adaptra absorb it.

    torchrun --nproc-per-node=4 examples/train_gpt.py

The model, the text, the gradients and the messages are real. Two things are emulated, and the output says so. Every op is
padded by sleeping to a stated duration, so that four ranks on a few cores have the timeline of four devices. And at a stated
step a fault delays all messages between stages 1 and 2. adaptra has to find that out: it measures, re-plans and switches. At
the end one process trains the same model without a pipeline. Every loss and every weight must be bitwise the same.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from gpt import GPT, batch_of, next_byte_loss, standard_library_text
from rich.console import Console
from rich.table import Table
from torch import Tensor

import adaptra
from adaptra.report.live import LiveTable
from adaptra.report.perfetto import write as write_trace
from adaptra.report.picture import draw
from adaptra.report.run_page import draw_run
from adaptra.report.run_records import load_run
from adaptra.runtime.control.plans.plan import Plan
from adaptra.simulation.simulate import simulate
from adaptra.simulation.timeline import Timeline

STAGES = 4
MICROBATCHES = 16
ROWS, LENGTH = 32, 64
SLOW_EDGE = (1, 2)
SETTLING = 2
"""Steps at the beginning of the run and after a switch that the medians leave out."""


@dataclass(frozen=True)
class Step:
    """One step as rank 0 saw it: from its start to the next one's, so that nothing is left out."""

    seconds: float
    losses: Tensor
    plan: Plan


def build(arguments: argparse.Namespace) -> tuple[GPT, Tensor]:
    """The model, the same on every rank and in the reference, and its text."""
    torch.manual_seed(0)
    return GPT(blocks=arguments.blocks, length=LENGTH), standard_library_text()


def optimizer_of(parameters: object) -> torch.optim.Optimizer:
    """Both runs' optimizer."""
    return torch.optim.AdamW(parameters, lr=1e-3)  # type: ignore[arg-type]  # any iterable of parameters


def digests(state: Mapping[str, Tensor]) -> dict[str, str]:
    """A fingerprint of every weight's bits."""
    return {name: hashlib.sha256(value.detach().numpy().tobytes()).hexdigest() for name, value in state.items()}


def train(arguments: argparse.Namespace, console: Console) -> tuple[list[Step], dict[str, Timeline], dict[str, str]]:
    """The pipeline's run. Returns the steps, a timeline of each phase (only on rank 0), and fingerprints of all weights."""
    rank = dist.get_rank()
    model, text = build(arguments)
    example = batch_of(text, 0, ROWS, LENGTH)
    started = time.perf_counter()
    seconds = arguments.op_ms / 1e3
    pipe = adaptra.compile(
        model,
        stages=STAGES,
        microbatches=MICROBATCHES,
        example_inputs=example,
        loss=next_byte_loss,
        memory=arguments.memory,
        options=adaptra.Options(
            faults=[f"delay {SLOW_EDGE[0]}-{SLOW_EDGE[1]} {arguments.delay_ms}ms @{arguments.slow_at}"],
            emulate=adaptra.EmulatedDevice(seconds, seconds, seconds),
            telemetry=adaptra.Telemetry(folder=arguments.output / "run"),
        ),
    )
    del model  # the pipeline keeps this rank's stage; the other stages' parameters are freed
    if rank == 0:
        console.print(f"compiled in {time.perf_counter() - started:.1f} s\n{pipe.report()}")
        console.print(
            f"[bold]emulated:[/] every op is padded to {arguments.op_ms:g} ms by sleeping; from step {arguments.slow_at} on "
            f"messages between stages {SLOW_EDGE[0]} and {SLOW_EDGE[1]} are {arguments.delay_ms:g} ms late"
        )
    optimizer = optimizer_of(pipe.parameters())
    steps: list[Step] = []
    timelines: dict[str, Timeline] = {}
    # The steps to draw are the same on every rank, since all ranks take part in gathering a timeline.
    drawn = {arguments.slow_at - 1: "healthy", arguments.slow_at + 1: "slow", arguments.steps - 1: "adapted"}
    with pipe, LiveTable() as live:
        begun = time.perf_counter()
        for step in range(arguments.steps):
            loss = pipe.step(*batch_of(text, step, ROWS, LENGTH))
            optimizer.step()
            optimizer.zero_grad()
            now = time.perf_counter()
            steps.append(Step(now - begun, pipe.microbatch_losses, pipe.plan))
            begun = now
            live.update(
                step=step,
                loss=loss.item(),
                tokens_per_second=ROWS * LENGTH / steps[-1].seconds,
                iteration_seconds=steps[-1].seconds,
                bubble=1 - 3 * MICROBATCHES * seconds / steps[-1].seconds,
                plan_version=steps[-1].plan.version,
                slow_edges=pipe.slow_edges,
                note="; ".join(event.kind.value for event in pipe.events if event.step == step),
            )
            if step in drawn:
                timeline = pipe.timeline()
                if timeline is not None:
                    timelines[drawn[step]] = timeline
                begun = time.perf_counter()
        gathered: list[dict[str, str]] = [{} for _ in range(STAGES)]
        dist.all_gather_object(gathered, digests(pipe.state_dict()), pipe.group)
    return steps, timelines, {name: digest for one in gathered for name, digest in one.items()}


def train_alone(arguments: argparse.Namespace) -> tuple[list[Tensor], dict[str, str]]:
    """The reference: the same steps in one process, without a pipeline and without adaptra."""
    model, text = build(arguments)
    optimizer = optimizer_of(model.parameters())
    losses: list[Tensor] = []
    for step in range(arguments.steps):
        inputs, targets = (part.chunk(MICROBATCHES) for part in batch_of(text, step, ROWS, LENGTH))
        of_step = [next_byte_loss(model(x), y) for x, y in zip(inputs, targets, strict=True)]
        for loss in of_step:
            (loss / MICROBATCHES).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(torch.stack(of_step).detach())
    return losses, digests(model.state_dict())


def phases(steps: list[Step], slow_at: int) -> dict[str, list[Step]]:
    """The steps of each phase: healthy, slow under the old plan, slow under the last plan."""
    healthy, adapted = steps[slow_at - 1].plan, steps[-1].plan
    first = next(index for index, step in enumerate(steps) if step.plan.version == adapted.version)
    return {
        "healthy": [step for step in steps[:slow_at] if step.plan.version == healthy.version][SETTLING:],
        "slow": [step for step in steps[slow_at:] if step.plan.version == healthy.version],
        "adapted": steps[max(first, slow_at) + SETTLING :],
    }


def main() -> int:
    """Train, compare, draw; exit status 1 if anything that is claimed did not happen."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--slow-at", type=int, default=10, help="the step from which on the link is slow")
    parser.add_argument("--delay-ms", type=float, default=125.0, help="one-way delay of the slow link, milliseconds")
    parser.add_argument("--op-ms", type=float, default=25.0, help="emulated duration of every op, milliseconds")
    parser.add_argument("--blocks", type=int, default=8, help="transformer blocks of the GPT")
    parser.add_argument("--memory", type=int, default=10, help="for how many microbatches a stage may hold activations")
    parser.add_argument("--output", type=Path, default=Path("out/demo"), help="folder for pictures and traces")
    parser.add_argument("--json", action="store_true", help="print the results as one JSON object at the end")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    console = Console(stderr=arguments.json, width=None if sys.stdout.isatty() else 120)
    steps, timelines, weights = train(arguments, console)
    if dist.get_rank() != 0:
        dist.destroy_process_group()
        return 0
    dist.destroy_process_group()

    with console.status("training the same model in one process, without a pipeline"):
        losses, expected = train_alone(arguments)
    equal_losses = sum(torch.equal(step.losses, reference) for step, reference in zip(steps, losses, strict=True))
    equal_weights = weights == expected

    by_phase = phases(steps, arguments.slow_at)
    measured = {phase: median(step.seconds for step in found) for phase, found in by_phase.items()}
    old, new = by_phase["healthy"][-1].plan, steps[-1].plan
    slow_cost = new.case.cost
    predicted = {
        "healthy": old.predicted,
        "slow": simulate(old.program, slow_cost).period,
        "adapted": new.predicted,
    }
    bound = {"healthy": old.bound, "slow": new.bound, "adapted": new.bound}

    titles = {"healthy": "healthy", "slow": "slow link, not adapted", "adapted": "slow link, adapted"}
    table = Table(title=f"iteration time, ms (median; plan {old.version} → {new.version})", title_justify="left")
    for heading in ("phase", "steps", "measured", "simulated", "measured ÷ simulated", "lower bound"):
        table.add_column(heading, justify="left" if heading == "phase" else "right")
    for phase, title in titles.items():
        table.add_row(
            title,
            str(len(by_phase[phase])),
            f"{1e3 * measured[phase]:.0f}",
            f"{1e3 * predicted[phase]:.0f}",
            f"{measured[phase] / predicted[phase]:.3f}",
            f"{1e3 * bound[phase]:.0f}",
        )
    console.print(table)
    speed_up = measured["slow"] / measured["adapted"]
    console.print(f"adapting makes the slow iteration {speed_up:.2f}× faster")
    console.print(
        f"bitwise equal to one process: losses of {equal_losses} of {arguments.steps} steps "
        f"({MICROBATCHES} microbatches each), final weights {'all' if equal_weights else 'NOT all'} ({len(expected)} tensors)"
    )

    arguments.output.mkdir(parents=True, exist_ok=True)
    named = [(titles[phase], timelines[phase]) for phase in titles]
    source, destination = SLOW_EDGE
    slow_edges = [(source, destination), (destination, source)]
    title = f"One training step, measured; every op sleeps until {arguments.op_ms:g} ms have passed"
    for suffix in ("svg", "png"):
        draw(named, arguments.output / f"timeline.{suffix}", slow_edges=slow_edges, title=title)
    write_trace(named, arguments.output / "trace.json")
    draw_run(load_run(arguments.output / "run"), arguments.output / "run.svg", title="A GPT over 4 ranks, a link turns slow")
    console.print(
        f"pictures: {arguments.output}/timeline.svg and .png; the whole run: {arguments.output}/run.svg; "
        f"trace for ui.perfetto.dev: {arguments.output}/trace.json"
    )

    succeeded = equal_losses == arguments.steps and equal_weights and new.version > old.version
    if arguments.json:
        result = {"measured": measured, "predicted": predicted, "bound": bound, "speed_up": speed_up}
        print(json.dumps(result | {"equal_losses": equal_losses, "equal_weights": equal_weights, "succeeded": succeeded}))
    return 0 if succeeded else 1


if __name__ == "__main__":
    sys.exit(main())
