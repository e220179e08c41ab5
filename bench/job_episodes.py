"""Training of several replicas through random slow workers, narrow and late links, and their ends; and simulated noise.

Ranks run over gloo; faults are injected and ops emulated. Detection, planning and switching are real. Afterwards losses,
parameters and buffers must be bitwise those of an undisturbed run. In simulated healthy steps that scatter, no microbatch may
leave home.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from _ranks import WIDTH, layer, layer_with_buffers, run_on_ranks, small_problem
from _table import Row, parser, print_rows

import adaptra
from adaptra.runtime.control.plans.events import ControlEvent, EventKind

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests" / "support"))
from job_world import SECONDS, job_world, measured

FIRST = 8
"""The step of the first episode: warm-up, calibration and the first switch come before."""

MESSAGE = 2 * WIDTH * 4
"""Bytes of a message between stages: two rows of a microbatch in float32."""

SHAPES = ((2, 4), (3, 3))
"""Replicas and stages of the jobs."""


def random_faults(seed: int, episodes: int, replicas: int, stages: int, seconds: float) -> tuple[list[str], int]:
    """Faults one after the other, with quiet steps between, and the number of steps of all."""
    rng = random.Random(seed)
    faults: list[str] = []
    step = FIRST
    for _ in range(episodes):
        end = step + rng.randint(6, 12)
        replica, stage, edge = rng.randrange(replicas), rng.randrange(stages), rng.randrange(stages - 1)
        where = f"{edge}-{edge + 1}@replica{replica}"
        kind = rng.choice(("slow", "late", "narrow"))
        if kind == "slow":
            faults.append(f"slow {replica}.{stage} {rng.uniform(1.4, 3.0):.2f}x @{step}..{end}")
        elif kind == "late":
            faults.append(f"delay {where} {1e3 * seconds * rng.uniform(1.0, 6.0):.1f}ms @{step}..{end}")
        else:
            faults.append(f"rate {where} {MESSAGE / (seconds * rng.uniform(1.5, 6.0)):.0f}B @{step}..{end}")
        step = end + rng.randint(2, 8)
    return faults, step + 6


def train(stages: int, microbatches: int, steps: int, with_buffers: bool, options: adaptra.Options) -> str:
    """Train, and return the digest of this rank's losses, parameters and buffers."""
    problem = small_problem(stages, microbatches, make=layer_with_buffers if with_buffers else layer)
    digest = hashlib.sha256()
    inputs, targets = problem["example_inputs"]
    with adaptra.compile(**problem, options=options) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-3)
        for step in range(steps):
            digest.update(pipe.step(inputs + pipe.replica + step, targets).numpy().tobytes())
            optimizer.step()
            optimizer.zero_grad()
        for value in pipe.state_dict().values():
            digest.update(value.detach().numpy().tobytes())
    return digest.hexdigest()


def measure(
    _rank: int, stages: int, microbatches: int, seconds: float, faults: Sequence[str], steps: int, with_buffers: bool
) -> tuple[int, list[str]]:
    """One rank: the number of ranks whose numbers differ from an undisturbed run, and the kinds of this rank's events."""
    told: list[ControlEvent] = []
    device = adaptra.EmulatedDevice(seconds, seconds, seconds)
    disturbed = adaptra.Options(schedule="1f1b", emulate=device, faults=list(faults), on_event=told.append)
    undisturbed = adaptra.Options(schedule="1f1b", adapt=False)
    digests = [train(stages, microbatches, steps, with_buffers, options) for options in (undisturbed, disturbed)]
    differing = torch.tensor(int(digests[0] != digests[1]))
    dist.all_reduce(differing)
    return int(differing), [event.kind.value for event in told]


def shares_without_cause(hours: float, seed: int) -> tuple[int, int]:
    """Proposals in simulated healthy training, of steps that scatter by two hundredths, to move microbatches; and the steps."""
    noise, world = random.Random(seed), job_world()
    steps = int(3600 * hours / SECONDS)
    for step in range(steps):
        world.step(measured(step, None, noise))
    return sum("microbatches of worker" in event.text for event in world.events(EventKind.AGREED, EventKind.PROPOSED)), steps


def main() -> int:
    """Measure and print."""
    arguments = parser(__doc__)
    arguments.add_argument("--episodes", type=int, default=100, help="of all shapes together")
    arguments.add_argument("--microbatches", type=int, default=6)
    arguments.add_argument("--op-ms", type=float, default=10.0, help="duration of every emulated op, milliseconds")
    arguments.add_argument("--hours", type=float, default=2.0, help="simulated hours of noise")
    arguments.add_argument("--buffers", action="store_true", help="train a model with BatchNorm in each stage")
    arguments.add_argument("--seed", type=int, default=0)
    given = arguments.parse_args()
    rows: list[Row] = []
    for replicas, stages in SHAPES:
        episodes = given.episodes // len(SHAPES)
        faults, steps = random_faults(given.seed, episodes, replicas, stages, given.op_ms / 1e3)
        setting = (stages, given.microbatches, given.op_ms / 1e3, faults, steps, given.buffers)
        differing, kinds = run_on_ranks(measure, replicas * stages, *setting)
        counted = Counter(kinds)
        name = f"{replicas} replicas of {stages} stages"
        rows += [
            Row(f"{name}: ranks with other losses, parameters or buffers", differing, 0, "ranks", episodes),
            Row(f"{name}: switches to a share", counted["shared"], None, "switches", steps),
            Row(f"{name}: switches to a detour", counted["detoured"], None, "switches", steps),
            Row(f"{name}: all switches", counted["switched"], None, "switches", steps),
        ]
    shares, steps = shares_without_cause(given.hours, given.seed)
    rows.append(Row(f"shares without cause in {given.hours:g} simulated hours", shares, 0, "proposals", steps))
    title = f"{given.episodes} episodes, {given.microbatches} microbatches, {given.op_ms:g} ms ops"
    print_rows(title, rows, baseline="bar", as_json=given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
