"""Training over processes through episodes of injected faults: random ones, and what was made of each.

An episode is one fault, or two that overlap, on random edges or stages, of random kind, size and length. Then the pipeline is
healthy for a while. ``bench/reaction.py`` runs a hundred of them.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from models import Example, square_loss, vectors
from noisy_steps import best_plan, slower
from torch import nn
from training import Step

from adaptra.runtime.control.deciding.policy import ControllerOptions
from adaptra.runtime.control.plans.events import ControlEvent, EventKind
from adaptra.runtime.control.plans.plan import Plan
from adaptra.runtime.injection.faults import Effect, Fault
from adaptra.simulation.cost import CostModel
from adaptra.simulation.simulate import simulate

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
        place = dice.randrange(stages - 1)
        faults = [_random_fault(dice, place, first, op_seconds)]
        if stages > 3 and dice.random() < 1 / 3:
            faults.append(_random_fault(dice, (place + 2) % (stages - 1), first + dice.randint(1, 6), op_seconds))
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


def under(cost: CostModel, fault: Fault) -> CostModel:
    """The costs while a fault lasts."""
    for edge in ((fault.stage, fault.peer), (fault.peer, fault.stage)):
        match fault.effect, edge:
            case Effect.DELAY, (int(source), int(destination)) if fault.is_of_edge(source, destination):
                cost = cost.with_latency(source, destination, cost.latency(source, destination) + fault.amount)
            case Effect.RATE, (int(source), int(destination)) if fault.is_of_edge(source, destination):
                cost = cost.with_occupancy(source, destination, MESSAGE_BYTES / fault.amount)
            case _:
                pass
    return slower(cost, fault.stage, fault.amount) if fault.effect is Effect.FACTOR else cost


def matters(fault: Fault, running: Plan, healthy: CostModel, faults: Iterable[Fault]) -> bool:
    """Whether another plan than the one that runs when a fault begins would gain more than a switch is worth.

    A plan for an edge that is not yet believed to have healed may suit the next fault.
    """
    cost = healthy
    for one in faults:
        if one.is_on(fault.from_step):
            cost = under(cost, one)
    _, best = best_plan(running.case, cost, running.program)
    return best < (1 - ControllerOptions().switch_gain) * simulate(running.program, cost).makespan


def train_through(
    rank: int, seed: int, episodes: int, stages: int, microbatches: int, op_seconds: float
) -> tuple[list[str], list[dict[str, object]], list[bool]]:
    """One rank; the process group must be there.

    Returns:
        The parameters of this rank that differ at the end by any bit from those of plain torch in one process, without faults.
        Then what this rank's controller told, and of every fault whether it matters.
    """
    from training import adam, compiled, run_step, train_alone

    import adaptra

    planned = random_episodes(seed, episodes, stages, op_seconds)
    steps = max(end(fault) for fault in planned[-1]) + 8
    example, rows = layers(stages), ROWS * microbatches
    batches = [example.rows(rows, step) for step in range(steps)]
    told: list[ControlEvent] = []
    ran: list[Plan] = []
    steps_ran: list[Step] = []
    options = adaptra.Options(
        faults=[str(fault) for faults in planned for fault in faults],
        emulate=adaptra.EmulatedDevice(op_seconds, op_seconds, op_seconds),
        on_event=told.append,
    )
    with compiled(example, batches[0], stages=stages, microbatches=microbatches, options=options) as pipe:
        optimizer = adam(pipe.parameters())
        for batch in batches:
            steps_ran.append(run_step(pipe, optimizer, batch))
            ran.append(pipe.plan)
    (*_, expected) = train_alone(example, batches, microbatches)
    differing = [name for name, one in steps_ran[-1].state.items() if not torch.equal(one, expected.state[name])]
    healthy, every = ran[FIRST - 1].case.cost, [fault for faults in planned for fault in faults]
    important = [matters(fault, ran[fault.from_step], healthy, every) for fault in every] if rank == 0 else []
    return differing, [event.to_json() for event in told], important


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one fault, in steps; None where it did not happen.

    Attributes:
        detected: From its first step to the detection that names its place as slow, that step included.
        kind: Whether that says rightly if messages come late or slowly; of an edge alone.
        switched: From its first step to the first one under a plan for it, while the fault lasts.
        has_waited: Whether that plan waited, because something else that flaps had just healed and was doubted.
        back: From its end to the first step under a plan for what has healed, before the next episode.
        is_flapping: Whether its place had turned slow again soon after an earlier healing, and this one was doubted.
    """

    fault: Fault
    detected: int | None
    kind: bool | None
    switched: int | None
    has_waited: bool
    back: int | None
    is_flapping: bool


def judge(planned: Sequence[Sequence[Fault]], told: Sequence[ControlEvent]) -> list[Outcome]:
    """What the coordinator's events say of every fault. Switches are ascribed only where one fault is alone."""
    agreed = _named(told, EventKind.AGREED)
    named = [place for place in _named(told, EventKind.DETECTED) if not place.is_healed]
    waits = [event.step for event in told if event.kind is EventKind.KEPT and event.text.startswith("a flapping")]
    onsets = [faults[0].from_step for faults in planned[1:]] + [2**31]
    found: list[Outcome] = []
    for faults, following in zip(planned, onsets, strict=True):
        for fault in faults:
            mine = [place for place in named if fault.is_on(place.step) and place.is_of(fault)]
            for_it = [place for place in agreed if place.is_of(fault)]
            switched = [place.step for place in for_it if fault.from_step < place.step <= end(fault) and not place.is_healed]
            back = [place for place in for_it if end(fault) + 1 < place.step <= following and place.is_healed]
            is_alone = len(faults) == 1
            found.append(
                Outcome(
                    fault,
                    mine[0].step - fault.from_step + 1 if mine else None,
                    mine[0].is_occupied is (fault.effect is Effect.RATE) if mine and fault.peer is not None else None,
                    switched[0] - fault.from_step if switched and is_alone else None,
                    bool(switched) and any(fault.from_step <= step < switched[0] for step in waits),
                    back[0].step - end(fault) if back and is_alone else None,
                    bool(back) and back[0].is_flapping,
                )
            )
    return found


def misplaced(planned: Sequence[Sequence[Fault]], told: Sequence[ControlEvent]) -> list[str]:
    """What was told as slow while no fault was there."""
    faults = [fault for faults in planned for fault in faults]
    named = [place for place in _named(told, EventKind.DETECTED) if place.step >= FIRST and not place.is_better]
    return [place.text for place in named if not any(fault.is_on(place.step) and place.is_of(fault) for fault in faults)]


@dataclass(frozen=True, slots=True)
class _Named:
    """A place that an event names: an edge, or a stage where ``destination`` is None.

    A place told as faster is still slow: its fault follows a worse one from which it was not yet believed to have healed.
    """

    step: int
    text: str
    source: int
    destination: int | None
    word: str
    is_flapping: bool
    is_occupied: bool

    @property
    def is_healed(self) -> bool:
        return self.word == "healed"

    @property
    def is_better(self) -> bool:
        return self.word in ("healed", "faster")

    def is_of(self, fault: Fault) -> bool:
        if self.destination is None:
            return fault.peer is None and fault.stage == self.source
        return fault.is_of_edge(self.source, self.destination)


_CHANGE = re.compile(
    r"(?:edge (\d+)→(\d+)|stage (\d+)) (slow|lossy|faster|healed)( \(flapping\))?"
    r"(?:: ([\d.]+) ms \(was ([\d.]+) ms\), ([\d.]+) ms of it occupancy)?"
)


def _named(told: Sequence[ControlEvent], kind: EventKind) -> list[_Named]:
    """What events of a kind name, in order of time."""
    found: list[_Named] = []
    for event in sorted(told, key=lambda event: event.step):
        for change in event.text.split("; ") if event.kind is kind else ():
            if (told_of := _CHANGE.match(change)) is not None:
                source, destination = told_of[1] or told_of[3], None if told_of[2] is None else int(told_of[2])
                now, was, occupied = (float(told_of[group] or 0.0) for group in (6, 7, 8))
                is_occupied = occupied > 0.5 * abs(now - was)
                text, is_flapping = f"step {event.step}: {change}", told_of[5] is not None
                found.append(_Named(event.step, text, int(source), destination, told_of[4], is_flapping, is_occupied))
    return found
