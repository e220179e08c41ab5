"""adaptra beside torch.distributed.pipelining, over the same real links that turn slow.

Every rank is a host of its own (``tests/links``; needs root), and every op lasts a stated time (emulated devices). Both sides
send by gloo, over TCP that keeps its windows (``linked_hosts.STEADY``). One training job per contender runs through all
situations. Links are changed between steps, and adaptra has to see that and to adapt by itself. Once its plan has run for
some steps, some steps in a row of every contender are measured.

adaptra takes part three times. Once it has as many microbatches in flight as 1F1B's first stage. Once it has the same limit
with two stages on each rank, placed as a V. Once it has no limit. GPipe, 1F1B, Interleaved1F1B, InterleavedZeroBubble and
ZBVZeroBubble are torch's own, unmodified.

There is one row per situation and contender:

- ``in flight`` is the most microbatches that a rank has in flight under adaptra's plan.
- The bound is a period that no order of stages placed so beats, whatever its memory.
- ``simulated`` is the plan's simulated period at the situation's own delays.
- N·c/T0 is by how much the messages of all microbatches are late, one way, in units of the bound without delay. Speed-ups are a
  function of that.

In the last situation links change every few steps. Its figure is the mean over all steps, adapting included.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import Any

import torch.distributed as dist
from _ranks import change_links, run_on_hosts, small_problem, timed_in_a_row
from _table import Row, parser, print_rows
from _torch_schedules import CHUNKS, SETTINGS, TorchSchedule, contender_named

import adaptra
from adaptra.planning.routes.steady_steps import PERIOD
from adaptra.program import Kind
from adaptra.program.placement import in_turn
from adaptra.simulation.case import Case
from adaptra.simulation.cost import CostModel

HEALTHY = "all delay=0"
STANDING, SETTLED = 10, 30
"""adaptra is measured once its plan has run for the first number of steps, or after the second in all."""

HOURS = 4
"""The most that all situations may take; a step of the slowest contender takes ten seconds."""


@dataclass(frozen=True, slots=True)
class Situation:
    """Links between neighbouring ranks and their one-way delay, both ways alike; seconds."""

    delays: tuple[tuple[int, float], ...]

    @property
    def name(self) -> str:
        """For people."""
        return ", ".join(f"{edge}-{edge + 1} {1e3 * delay:g} ms" for edge, delay in self.delays) or "no delay"

    def face(self) -> None:
        """Make the links so, whatever they were before; every rank calls it."""
        for change in (HEALTHY, *(f"{edge}-{edge + 1} delay={1e3 * delay:g}ms" for edge, delay in self.delays)):
            change_links(change)

    def case(self, placement: tuple[int, ...], microbatches: int, seconds: float) -> Case:
        """The planning problem of stages that share their rank's time evenly."""
        delays = {frozenset((rank, rank + 1)): delay for rank, delay in self.delays}
        share = seconds * len(set(placement)) / len(placement)
        cost = CostModel.uniform(len(placement), share, share, share)
        for stage, between in enumerate(pairwise(placement)):
            delay = delays.get(frozenset(between), 0.0)
            cost = cost.with_latency(stage, stage + 1, delay).with_latency(stage + 1, stage, delay)
        return Case(cost, microbatches, placement)


def situations(ranks: int, seconds: float, forwards: list[float]) -> list[Situation]:
    """No delay; the first, a middle and the last edge delayed by a number of forwards; two and three edges by the same."""
    middle, last = (ranks - 1) // 2, ranks - 2
    found = [Situation(())]
    for count in forwards:
        found += [Situation(((edge, count * seconds),)) for edge in (0, middle, last)]
        found.append(Situation(((0, count * seconds), (last, count * seconds))))
        found.append(Situation(((0, count * seconds), (middle, count * seconds), (last, count * seconds))))
    return found


def changing_ones(faced: list[Situation]) -> list[Situation]:
    """What links that change every few steps go through: one situation of each delay, at another place each time, then none."""
    per_count = 5
    delayed = faced[1:]
    turns = range(len(delayed) // per_count)
    return [*(delayed[per_count * turn + turn % per_count] for turn in turns), faced[0]]


@dataclass(frozen=True, slots=True)
class Side:
    """One way in which adaptra takes part: where stages are placed, and how many microbatches may be in flight."""

    placement: str
    memory: int | None

    def __str__(self) -> str:
        return f"adaptra{' as a V' if self.placement == 'v' else ''}, {self.memory or 'no limit'}"


def our_sides(ranks: int) -> list[Side]:
    """All of them."""
    return [Side("straight", ranks), Side("v", ranks), Side("straight", None)]


def held(program: adaptra.Program) -> int:
    """The most microbatches that a rank keeps, each from F to W, counted as the part of the rank's layers that keeps it."""
    most = 0.0
    for rank, order in enumerate(program.orders):
        now, share = 0.0, 1 / program.placement.count(rank)
        for op in order:
            now += {Kind.F: share, Kind.W: -share, Kind.B: -share}.get(op.kind, 0.0)
            most = max(most, now)
    return round(most)


class Adaptra:
    """Our side: a pipeline that adapts while it is measured."""

    def __init__(self, side: Side, ranks: int, microbatches: int, seconds: float) -> None:
        stages = 2 * ranks if side.placement == "v" else ranks
        device = adaptra.EmulatedDevice(*[seconds * ranks / stages] * 3)
        problem = small_problem(stages, microbatches)
        options = adaptra.Options(emulate=device)
        self.pipe = adaptra.compile(**problem, memory=side.memory, placement=side.placement, options=options)

    def step(self, inputs: Any, targets: Any) -> None:
        """One training step."""
        self.pipe.step(inputs, targets)

    def settle(self, inputs: Any, targets: Any) -> int | None:
        """Steps until the first one under another plan, once a plan stands; None where none was worth a switch."""
        switched: list[int] = []
        version = self.pipe.plan.version
        for step in range(SETTLED):
            if step == STANDING + (switched[-1] if switched else 0):
                break
            self.step(inputs, targets)
            if self.pipe.plan.version != version:
                switched.append(step)
                version = self.pipe.plan.version
        return next(iter(switched), None)


def measure(
    _rank: int, ranks: int, microbatches: int, seconds: float, places: list[Any], names: list[str], runs: int, episode: int
) -> dict[str, Any]:
    """One rank: per situation the seconds of every contender's steps, and what adaptra's plans were."""
    batch = small_problem(ranks, microbatches)["example_inputs"]
    theirs = {name: TorchSchedule(name, microbatches, seconds) for name in names}
    ours = {str(side): Adaptra(side, ranks, microbatches, seconds) for side in our_sides(ranks)}
    faced = [Situation(tuple(map(tuple, place))) for place in places]
    contenders = theirs | ours
    found: list[dict[str, Any]] = []
    for contender in contenders.values():
        contender.step(*batch)
    for index, situation in enumerate(faced):
        if dist.get_rank() == 0:
            print(f"{index + 1} of {len(faced)}: {situation.name}", file=sys.stderr, flush=True)
        situation.face()
        settled = {name: contender.settle(*batch) for name, contender in ours.items()}
        times = {
            name: timed_in_a_row(lambda contender=contender: contender.step(*batch), runs, before=2)
            for name, contender in contenders.items()
        }
        plans = {name: str(contender.pipe.plan.program) for name, contender in ours.items()}
        found.append({"times": times, "settled": settled, "plans": plans})
    changing: dict[str, list[float]] = {name: [] for name in contenders}
    for name, contender in contenders.items():
        for situation in changing_ones(faced) if episode else ():
            situation.face()
            changing[name] += timed_in_a_row(lambda contender=contender: contender.step(*batch), episode, before=0)
    dist.barrier()
    for contender in ours.values():
        contender.pipe.close()
    return {"situations": found, "changing": changing}


def rows_of(
    situation: Situation, found: dict[str, Any], ranks: int, microbatches: int, seconds: float, names: list[str], runs: int
) -> list[Row]:
    """Each of adaptra's sides beside every other contender."""
    healthy = PERIOD.bound(Situation(()).case(in_turn(ranks), microbatches, seconds))
    relative = microbatches * max((delay for _, delay in situation.delays), default=0.0) / healthy
    rows: list[Row] = []
    for name in map(str, our_sides(ranks)):
        ours = median(found["times"][name])
        program = adaptra.Program.parse(found["plans"][name])
        case = situation.case(program.placement, microbatches, seconds)
        settled = found["settled"][name]
        label = f"{situation.name} (N·c/T0 {relative:.2f}); {name}, {held(program)} in flight"
        rows.append(Row(f"{label}; bound", 1e3 * ours, 1e3 * PERIOD.bound(case), "ms", runs))
        rows.append(Row(f"{label}; simulated", 1e3 * ours, 1e3 * PERIOD.of(program, case.cost), "ms", runs))
        rows += [Row(f"{label}; {other}", 1e3 * ours, 1e3 * median(found["times"][other]), "ms", runs) for other in names]
        if settled is not None:
            rows.append(Row(f"{label}; steps until the new plan, bar 3", settled, 3, "steps", 1))
    return rows


def main() -> int:
    """Start the hosts and print the table."""
    arguments = parser(__doc__)
    arguments.add_argument("--ranks", type=int, default=4)
    arguments.add_argument("--microbatches", type=int, default=16)
    arguments.add_argument("--op-ms", type=float, default=20.0, help="duration of every op, milliseconds")
    arguments.add_argument("--forwards", type=float, nargs="*", default=[0.5, 1, 2, 3, 6], help="one-way delays, in forwards")
    against = f"which of torch's schedules: {', '.join(CHUNKS)}; with torch 2.15 followed by +{' or +'.join(SETTINGS)}"
    arguments.add_argument("--against", nargs="+", type=contender_named, default=list(CHUNKS), help=against)
    arguments.add_argument("--runs", type=int, default=3, help="steps of every contender per situation")
    arguments.add_argument("--episode", type=int, default=6, help="steps between changes at the end; 0 to leave that out")
    given = arguments.parse_args()
    seconds = given.op_ms / 1e3
    faced = situations(given.ranks, seconds, given.forwards)
    places = [list(situation.delays) for situation in faced]
    found = run_on_hosts(
        measure, given.ranks, [], given.ranks, given.microbatches, seconds, places, given.against, given.runs, given.episode,
        timeout=HOURS * 3600, steady=True,
    )  # fmt: skip
    rows: list[Row] = []
    for situation, measured in zip(faced, found["situations"], strict=True):
        rows += rows_of(situation, measured, given.ranks, given.microbatches, seconds, given.against, given.runs)
    if given.episode:
        for name in map(str, our_sides(given.ranks)):
            mean = 1e3 * fmean(found["changing"][name])
            rows += [
                Row(f"changing every {given.episode} steps; {name}; {other}", mean, 1e3 * fmean(found["changing"][other]), "ms",
                    len(found["changing"][other]))
                for other in given.against
            ]  # fmt: skip
    title = f"{given.ranks} ranks, {given.microbatches} microbatches, {given.op_ms:g} ms per op, hosts joined by links"
    print_rows(title, rows, baseline="bound; torch", as_json=given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
