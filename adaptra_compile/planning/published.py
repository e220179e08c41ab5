"""The published schedules of the Adaptra paper (arXiv 2504.19232), as it states them, to compare with and to start from.

Warm-up counts from its equation, then greedily the input gradient, the forward or the weight gradient whose input is there, in
this order of preference. The paper applies no memory limit; here a forward waits while its rank has no room for it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from adaptra.equations.warm_up import in_flight_limits, warm_up
from adaptra.errors import PlanError
from adaptra.program import Kind, Op, Program
from adaptra.simulation.case import Case
from adaptra.simulation.cost import MEMORY_TOLERANCE, CostModel

PAPER: Final = "paper"
"""Name of the programs of the paper's rule."""

UNIFORM_SLACK: Final = "uniform_slack"
"""Name of the program for unknown delays."""


def paper_rule(case: Case, *, in_flight: int | Sequence[int] | None = None) -> Program:
    """Plan by the paper's rule for a case with one stage per rank, with the case's delays.

    Args:
        case: Costs and microbatches. As in the paper, the rule assumes that communication does not block and that the
            directions of an edge do not share it.
        in_flight: The most microbatches in flight per stage. The case's own memory limits apply as well.

    Raises:
        PlanError: A rank has several stages, which the rule does not support, or a limit leaves no room for one microbatch.
    """
    return _greedy(case, PAPER, in_flight, warm_up(case.cost, case.microbatches).x)


def uniform_slack(case: Case, *, in_flight: int | Sequence[int] | None = None) -> Program:
    """Plan as the paper does for unknown delays: all memory becomes slackness, spread evenly over the edges.

    Stage 0 runs as many warm-up forwards as fit, the last stage one; in between the number falls evenly. No stage exceeds its
    number later. Arguments and errors are those of :func:`paper_rule`.
    """
    most, last = _reachable(case, in_flight)[0], case.cost.stages - 1
    counts = [1 + (most - 1) * (last - stage) // last if last else most for stage in range(case.cost.stages)]
    limits = in_flight_limits(in_flight, case.cost.stages, case.microbatches)
    return _greedy(case, UNIFORM_SLACK, list(map(min, limits, counts)), counts)


def _greedy(case: Case, name: str, in_flight: int | Sequence[int] | None, counts: Sequence[int]) -> Program:
    reachable, limits = _reachable(case, in_flight), in_flight_limits(in_flight, case.cost.stages, case.microbatches)
    stages = [
        _GreedyStage(
            case.cost, stage, limits[stage], min(counts[stage], reachable[stage]), _room(case, stage) + MEMORY_TOLERANCE
        )
        for stage in range(case.cost.stages)
    ]
    _play(stages, case)
    orders: list[tuple[Op, ...]] = [()] * len(stages)
    for stage in stages:
        orders[case.placement[stage.index]] = tuple(stage.order)
    return Program.of_pipeline(name, case.placement, case.microbatches, tuple(orders))


def _room(case: Case, stage: int) -> float:
    return math.inf if case.cost.memory_limit is None else case.cost.memory_limit[case.placement[stage]]


def _reachable(case: Case, in_flight: int | Sequence[int] | None) -> list[int]:
    """Return the most warm-up forwards of each stage: those that fit its memory and that the stages before it can send."""
    if len(set(case.placement)) < len(case.placement):
        placement = ",".join(map(str, case.placement))
        raise PlanError(f"{case.name}: placement {placement}: expected one stage per rank, as the paper's rule knows no other")
    limits = in_flight_limits(in_flight, case.cost.stages, case.microbatches)
    forwards: list[int] = []
    for stage, held in enumerate(case.cost.memory_forward):
        room = _room(case, stage)
        if held > room + MEMORY_TOLERANCE:
            rank = case.placement[stage]
            raise PlanError(f"memory limit of rank {rank} is {room:g}: one microbatch holds {held:g}, the smallest that works")
        fitting = case.microbatches if held == 0.0 else math.floor(min((room + MEMORY_TOLERANCE) / held, case.microbatches))
        forwards.append(min(fitting, limits[stage], forwards[-1] if forwards else case.microbatches))
    return forwards


@dataclass
class _GreedyStage:
    """State of one stage while the greedy rule runs."""

    cost: CostModel
    index: int
    limit: int
    warm_up: int
    room: float
    order: list[Op] = field(default_factory=list[Op])
    started: dict[Kind, int] = field(default_factory=lambda: {Kind.F: 0, Kind.I: 0, Kind.W: 0})
    inputs: dict[Kind, int] = field(default_factory=lambda: {Kind.F: 0, Kind.I: 0, Kind.W: 0})
    held: float = 0.0
    busy: bool = False

    def choose(self) -> Kind | None:
        """Return the kind of op to start now, or None to wait."""
        filling = self.started[Kind.I] == 0 and self.started[Kind.F] < self.warm_up and self._fits()
        for kind in (Kind.F,) if filling else (Kind.I, Kind.F, Kind.W):
            if self.started[kind] < self.inputs[kind] and (kind is not Kind.F or self._fits()):
                return kind
        return None

    def _fits(self) -> bool:
        in_flight = self.started[Kind.F] - self.started[Kind.I]
        return in_flight < self.limit and self.held + self.cost.memory_forward[self.index] <= self.room

    def start(self, kind: Kind) -> None:
        """Begin the next op of this kind."""
        self.order.append(Op(self.index, kind, self.started[kind]))
        self.started[kind] += 1
        self.busy = True
        if kind is Kind.F:
            self.held += self.cost.memory_forward[self.index]

    def end(self, kind: Kind) -> None:
        """End the running op and free the memory that it no longer needs."""
        self.busy = False
        freed = self.cost.memory_input_grad[self.index]
        if kind is Kind.I:
            self.held -= freed
            self.inputs[Kind.W] += 1
        elif kind is Kind.W:
            self.held -= self.cost.memory_forward[self.index] - freed


def _play(stages: Sequence[_GreedyStage], case: Case) -> None:
    """Simulate the rule. An event is (time, whether an op ends, stage, kind); if no op ends, an input arrives."""
    cost, last = case.cost, case.cost.stages - 1
    free = {True: [0.0] * last, False: [0.0] * last}
    events: list[tuple[float, bool, int, int]] = []
    kinds = (Kind.F, Kind.I, Kind.W)

    def send(now: float, source: int, destination: int, kind: Kind) -> None:
        forward, edge = destination > source, min(source, destination)
        occupancy = cost.occupancy_forward[edge] if forward else cost.occupancy_backward[edge]
        latency = cost.latency_forward[edge] if forward else cost.latency_backward[edge]
        free[forward][edge] = max(now, free[forward][edge]) + occupancy
        heapq.heappush(events, (free[forward][edge] + latency, False, destination, kinds.index(kind)))

    def end(now: float, stage: int, kind: Kind) -> None:
        stages[stage].end(kind)
        if kind is Kind.F and stage == last:
            stages[stage].inputs[Kind.I] += 1
        elif kind is Kind.F:
            send(now, stage, stage + 1, Kind.F)
        elif kind is Kind.I and stage > 0:
            send(now, stage, stage - 1, Kind.I)

    stages[0].inputs[Kind.F] = case.microbatches
    now = 0.0
    while True:
        for stage in stages:
            kind = None if stage.busy else stage.choose()
            if kind is not None:
                stage.start(kind)
                ends = now + cost.duration(stage.index, kind)
                heapq.heappush(events, (ends, True, stage.index, kinds.index(kind)))
        if not events:
            return
        now = events[0][0]
        while events and events[0][0] <= now:
            _, ends_op, index, number = heapq.heappop(events)
            if ends_op:
                end(now, index, kinds[number])
            else:
                stages[index].inputs[kinds[number]] += 1
