"""Training over processes through episodes of injected faults: random ones, and what was made of each.

An episode is one fault, or two that overlap, on random edges or stages, of random kind, size and length; then the pipeline is
healthy for a while. ``bench/reaction.py`` runs a hundred of them.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from models import Example, square_loss, vectors
from torch import nn

from adaptra.runtime.events import ControlEvent, EventKind
from adaptra.runtime.faults import Effect, Fault

WIDTH = 8
ROWS = 2
"""Of a microbatch."""

MESSAGE_BYTES = 4 * ROWS * WIDTH

FIRST = 10
"""The first step that may be slow: by then all levels are calibrated and the plan for them runs."""


def layers(stages: int) -> Example:
    """A model of one layer per stage, whose messages are all of one size."""

    def build() -> nn.Module:
        return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(stages)))

    return Example("layers", build, vectors(WIDTH), square_loss)


def random_episodes(seed: int, episodes: int, stages: int, op_seconds: float) -> list[list[Fault]]:
    """The faults of every episode, in order of time."""
    dice = random.Random(seed)
    found: list[list[Fault]] = []
    first = FIRST
    for _ in range(episodes):
        faults = [_random_fault(dice, dice.randrange(stages - 1), first, op_seconds)]
        if stages > 3 and dice.random() < 1 / 3:
            elsewhere = (faults[0].stage + 2) % (stages - 1)
            faults.append(_random_fault(dice, elsewhere, first + dice.randint(1, 6), op_seconds))
        found.append(faults)
        first = max(end(fault) for fault in faults) + dice.randint(8, 10)
    return found


def _random_fault(dice: random.Random, stage: int, first: int, op_seconds: float) -> Fault:
    until, is_both_ways = first + dice.randint(8, 12), dice.random() < 0.5
    source, destination = dice.choice(((stage, stage + 1), (stage + 1, stage)))
    match dice.choice((Effect.DELAY, Effect.RATE, Effect.FACTOR)):
        case Effect.DELAY:
            seconds = dice.uniform(2.0, 5.0) * op_seconds
            return Fault(Effect.DELAY, seconds, source, destination, is_both_ways, first, until)
        case Effect.RATE:
            rate = MESSAGE_BYTES / (dice.uniform(1.5, 3.0) * op_seconds)
            return Fault(Effect.RATE, rate, source, destination, is_both_ways, first, until)
        case _:
            return Fault(Effect.FACTOR, dice.uniform(1.5, 2.5), stage, None, False, first, until)


def end(fault: Fault) -> int:
    """The first step that the fault does not affect any more."""
    assert fault.until_step is not None, "the faults of an episode end"
    return fault.until_step


def train_through(
    rank: int, seed: int, episodes: int, stages: int, microbatches: int, op_seconds: float
) -> tuple[list[str], list[dict[str, object]]]:
    """One rank; the process group must be there.

    Returns:
        The parameters of this rank that differ at the end by any bit from those of plain torch in one process, without faults,
        and what this rank's controller told.
    """
    from training import adam, compiled, run_step, train_alone

    import adaptra

    planned = random_episodes(seed, episodes, stages, op_seconds)
    steps = max(end(fault) for fault in planned[-1]) + 8
    example, rows = layers(stages), ROWS * microbatches
    batches = [example.rows(rows, step) for step in range(steps)]
    told: list[ControlEvent] = []
    options = adaptra.Options(
        faults=[str(fault) for faults in planned for fault in faults],
        emulate=adaptra.EmulatedDevice(op_seconds, op_seconds, op_seconds),
        on_event=told.append,
    )
    with compiled(example, batches[0], stages=stages, microbatches=microbatches, options=options) as pipe:
        optimizer = adam(pipe.parameters())
        for batch in batches:
            last = run_step(pipe, optimizer, batch)
    (*_, expected) = train_alone(example, batches, microbatches)
    differing = [name for name, one in last.state.items() if not torch.equal(one, expected.state[name])]
    return differing, [event.to_json() for event in told]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one fault, in steps; None where it did not happen.

    Attributes:
        detected: From its first step to the detection that names its place as slow, that step included.
        switched: From its first step to the first one under another plan, while the fault lasts.
        back: From its end to the first step under another plan, before the next episode.
    """

    fault: Fault
    detected: int | None
    switched: int | None
    back: int | None


def judge(planned: Sequence[Sequence[Fault]], told: Sequence[ControlEvent]) -> list[Outcome]:
    """What the coordinator's events say of every fault. Switches are ascribed only where one fault is alone."""
    agreed = sorted(event.step for event in told if event.kind is EventKind.AGREED)
    detections = [event for event in told if event.kind is EventKind.DETECTED]
    onsets = [faults[0].from_step for faults in planned[1:]] + [2**31]
    found: list[Outcome] = []
    for faults, following in zip(planned, onsets, strict=True):
        for fault in faults:
            named = [event.step for event in detections if fault.is_on(event.step) and _is_named(fault, event.text)]
            switched = [step for step in agreed if fault.from_step < step <= end(fault)]
            back = [step for step in agreed if end(fault) + 1 < step <= following]
            is_alone = len(faults) == 1
            found.append(
                Outcome(
                    fault,
                    named[0] - fault.from_step + 1 if named else None,
                    switched[0] - fault.from_step if switched and is_alone else None,
                    back[0] - end(fault) if back and is_alone else None,
                )
            )
    return found


def _is_named(fault: Fault, text: str) -> bool:
    for change in text.split("; "):
        edge = re.match(r"edge (\d+)→(\d+) slow", change)
        stage = re.match(r"stage (\d+) slow", change)
        if edge is not None and fault.is_of_edge(int(edge[1]), int(edge[2])):
            return True
        if stage is not None and fault.peer is None and fault.stage == int(stage[1]):
            return True
    return False
