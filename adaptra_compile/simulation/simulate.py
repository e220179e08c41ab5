"""The simulator: the exact times of a program's ops under a cost model, and the makespan bound of all orders.

It is event-driven, without time steps. Each rank executes its ops strictly in order. An op starts as soon as the one before it
has ended and its needs by :data:`adaptra.program.dependencies.RULE` are met. Messages follow
:class:`adaptra.simulation.cost.CostModel`. The hot loop is in C++. It adds and compares the same doubles in the same order
everywhere, so equal inputs give equal digits.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any

from adaptra import _C
from adaptra.errors import CaseError
from adaptra.program import Kind, Program
from adaptra.program.dependencies import RULE
from adaptra.simulation.case import Case
from adaptra.simulation.cost import MEMORY_TOLERANCE, CostModel
from adaptra.simulation.critical_path import Interval, critical_path
from adaptra.simulation.timeline import MessageInterval, OpInterval, Source, Timeline


@dataclass(frozen=True)
class Simulation:
    """Time and memory of one step of a program. Times are in the cost model's unit and start at zero.

    Attributes:
        program: The program, as given.
        cost: The cost model, with no time for messages between stages of one rank.
        makespan: The end of the last op.
        peak_in_flight: Per stage, the most microbatches whose F has started and whose I or B has not ended. In a forward-only
            program, the most microbatches whose F has started and not ended.
        peak_memory: Peak memory per rank.
        busy: Per rank, the time that its device works.
        first_start: Per rank, the start of its first op; zero for a rank without ops.
        last_end: Per rank, the end of its last op; zero for a rank without ops.
    """

    program: Program
    cost: CostModel
    makespan: float
    peak_in_flight: tuple[int, ...]
    peak_memory: tuple[float, ...]
    busy: tuple[float, ...]
    first_start: tuple[float, ...]
    last_end: tuple[float, ...]
    _simulated: _C.Simulated = field(repr=False, compare=False)

    @property
    def bubble(self) -> tuple[float, ...]:
        """The time per rank that its device idles within the makespan."""
        return tuple(self.makespan - busy for busy in self.busy)

    @property
    def bubble_ratio(self) -> float:
        """Idle time of all ranks as a fraction of ranks × makespan; zero if the step takes no time."""
        time = self.makespan * self.program.ranks
        return (time - sum(self.busy)) / time if time > 0 else 0.0

    @property
    def over_memory(self) -> tuple[int, ...]:
        """The ranks that exceed the cost model's memory limit; none if it has no limit."""
        limits = self.cost.memory_limit or ()
        return tuple(
            rank
            for rank, (peak, limit) in enumerate(zip(self.peak_memory, limits, strict=False))
            if peak > limit + MEMORY_TOLERANCE
        )

    @cached_property
    def timeline(self) -> Timeline:
        """Return the timeline of all ops and of all messages between ranks."""
        placement = self.program.placement
        crossing = tuple(message for message in self._messages if placement[message.source] != placement[message.destination])
        return Timeline(self.program, Source.SIMULATED, self._ops, crossing)

    @cached_property
    def critical_path(self) -> tuple[Interval, ...]:
        """Return the chain of ops and messages that makes up the makespan; see :mod:`adaptra.simulation.critical_path`."""
        return critical_path(self._ops, self._messages, self.program.placement, self.cost)

    def to_json(self) -> dict[str, Any]:
        """Return the figures as JSON values, without the times of single ops."""
        return {
            "makespan": self.makespan,
            "peak_in_flight": list(self.peak_in_flight),
            "peak_memory": list(self.peak_memory),
            "over_memory": list(self.over_memory),
            "busy": list(self.busy),
            "bubble": list(self.bubble),
            "bubble_ratio": self.bubble_ratio,
            "first_start": list(self.first_start),
            "last_end": list(self.last_end),
        }

    @cached_property
    def _ops(self) -> tuple[tuple[OpInterval, ...], ...]:
        return tuple(
            tuple(
                OpInterval(rank, op, start, end)
                for op, (start, end) in zip(
                    (op for op in order if op.kind.is_compute),
                    struct.iter_unpack("=2d", self._simulated.intervals(rank)),
                    strict=True,
                )
            )
            for rank, order in enumerate(self.program.orders)
        )

    @cached_property
    def _messages(self) -> tuple[MessageInterval, ...]:
        found = [
            MessageInterval(
                Kind.SEND_F if destination > source else Kind.SEND_B,
                source,
                destination,
                microbatch,
                posted,
                departed,
                arrived,
            )
            for source, destination, microbatch, posted, departed, arrived in struct.iter_unpack(
                "=3i4x3d", self._simulated.messages()
            )
        ]
        return tuple(
            sorted(found, key=lambda message: (message.posted, message.source, message.destination, message.microbatch))
        )


def simulate(program: Program, cost: CostModel) -> Simulation:
    """Simulate one step of ``program`` under ``cost``. Communication ops are skipped, since the cost model times messages.

    Every placement is accepted. Messages between stages of one rank take no time.

    Raises:
        CaseError: The program and the cost model have different numbers of stages.
        ScheduleError: The ranks can't execute the program. For a deadlock, the text names every waiting rank, its op and the
            op that it waits for.
    """
    program.require_one_pipeline("simulate")
    if program.stages != cost.stages:
        raise CaseError(f"{program.name} has {program.stages} stages, the cost model {cost.stages}: expected as many")
    cost = cost.placed(program.placement)
    simulated = _C.simulate(program, cost, _C.to_orders(program.orders), RULE)
    if not simulated.complete:
        from adaptra.program.verify import verify

        verify(program)
        raise AssertionError(f"{program.name}: the simulator can't execute what the verifier accepts")
    return Simulation(
        program,
        cost,
        simulated.makespan,
        simulated.peak_in_flight,
        simulated.peak_memory,
        simulated.busy,
        simulated.first_start,
        simulated.last_end,
        simulated,
    )


class BoundKind(Enum):
    """The reason why no order of ops is shorter. The formulas are in ``csrc/schedule/bounds/bounds.cc``."""

    LOAD = "load"
    """A rank runs all its ops one after the other."""
    DRAIN = "drain"
    """After a stage's forwards and input gradients, its last gradient travels to stage 0, and a W ends last."""
    CHAIN = "chain"
    """A first microbatch goes to the last stage and back, then a stage runs the rest of its input gradients."""
    MEMORY = "memory"
    """A stage with room for A microbatches needs one round trip for every A of them."""
    LINK_FORWARD = "link forward"
    """All forward messages of an edge occupy it one after the other."""
    LINK_BACKWARD = "link backward"
    """All backward messages of an edge (of a shared edge: all messages) occupy it one after the other."""
    IDLE = "idle"
    """A stage's load, plus its idle time before the first input gradients and after the last forwards for lack of memory."""
    ONE_MACHINE = "one machine"
    """The best preemptive schedule of one rank's ops, each with the least time that must pass before and after it."""


@dataclass(frozen=True, slots=True)
class Bound:
    """A lower bound of the makespan, and its cause: a rank (load, one machine), an edge (links) or a stage.

    It is a sum of rounded numbers, so compare with a relative tolerance of 1e-9.
    """

    value: float
    kind: BoundKind
    where: str

    def __str__(self) -> str:
        return f"{self.value:g} ({self.kind.value}, {self.where})"


def lower_bound(case: Case) -> Bound:
    """Return the greatest of the bounds of :class:`BoundKind`, the simplest one if several are equal.

    It is valid for every order, every placement and every mode of communication, with I and W or with B. It is infinite if a
    single microbatch exceeds a memory limit, so that no plan exists.

    Raises:
        CaseError: The case is not of one pipeline.
    """
    case.require_one_pipeline("lower_bound")
    value, name, where = _C.lower_bound(case)
    kind = BoundKind(name)
    match kind:
        case BoundKind.LOAD | BoundKind.ONE_MACHINE:
            place = f"rank {where}"
        case BoundKind.DRAIN | BoundKind.CHAIN | BoundKind.MEMORY | BoundKind.IDLE:
            place = f"stage {where}"
        case BoundKind.LINK_FORWARD:
            place = f"edge {where}→{where + 1}"
        case BoundKind.LINK_BACKWARD:
            place = f"edge {where + 1}→{where}"
    return Bound(value, kind, place)
