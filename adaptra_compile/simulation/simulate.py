"""The simulator: the exact times of a program's ops, its makespan and its period, and the makespan bound of all orders.

It is event-driven, without time steps. Each worker executes its ops strictly in order. An op starts as soon as the one before
it has ended and its needs by :data:`adaptra.program.dependencies.RULE` are met. Messages follow
:class:`adaptra.simulation.case.Case`. A worker's next step begins when its last op has ended, so fill and drain overlap across
steps. The hot loop is in C++. It adds and compares the same doubles in the same order everywhere, so equal inputs give equal
digits.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

from adaptra import _C
from adaptra.errors import CaseError, ScheduleError
from adaptra.program import Kind, Op, Program
from adaptra.program.dependencies import INPUT_GRADIENT, WEIGHT_GRADIENT
from adaptra.program.program import COMPUTE_KINDS, UPDATE_KINDS
from adaptra.program.verify import verify
from adaptra.simulation.bound import Bound, BoundKind
from adaptra.simulation.case import Case
from adaptra.simulation.cost import MEMORY_TOLERANCE, CostModel
from adaptra.simulation.critical_path import Interval, critical_path
from adaptra.simulation.job import alike_case, check_fit, pipeline_of, problem_of, with_updates
from adaptra.simulation.timeline import MessageInterval, OpInterval, Source, Timeline

STEPS: Final = 8
"""The number of steps from which the period is taken."""


@dataclass(frozen=True)
class Simulation:
    """Time and memory of a program. Times are in the unit of its costs and start at zero.

    Attributes:
        program: The program. With several replicas, workers of their own or a barrier, it has its REDUCE and STEP.
        given: The case, or the costs of one pipeline.
        makespan: The end of the first step.
    """

    program: Program
    given: Case | CostModel
    makespan: float
    _problem: _C.Problem = field(repr=False, compare=False)
    _orders: _C.Orders = field(repr=False, compare=False)
    _simulated: _C.Simulated = field(repr=False, compare=False)

    @cached_property
    def cost(self) -> CostModel:
        """The cost model, with no time for messages between stages of one rank."""
        return self.given.cost if isinstance(self.given, Case) else self.given

    @cached_property
    def case(self) -> Case:
        """The case."""
        given, program = self.given, self.program
        return given if isinstance(given, Case) else Case(given, program.microbatches, program.placement)

    @property
    def busy(self) -> tuple[float, ...]:
        """Per worker, the time that it works in the first step."""
        return self._simulated.busy

    @property
    def first_start(self) -> tuple[float, ...]:
        """Per worker, the start of its first op; zero for one without ops."""
        return self._simulated.first_start

    @property
    def last_end(self) -> tuple[float, ...]:
        """Per worker, the end of its last op in the first step; zero for one without ops."""
        return self._simulated.last_end

    @property
    def bubble(self) -> tuple[float, ...]:
        """The time per worker that it idles within the makespan."""
        return tuple(self.makespan - busy for busy in self.busy)

    @property
    def bubble_ratio(self) -> float:
        """Idle time of all workers that live as a fraction of these × makespan; zero if the step takes no time."""
        time = self.makespan * len(self.program.routing.live)
        return (time - sum(self.busy)) / time if time > 0 else 0.0

    @cached_property
    def period(self) -> float:
        """The steady distance between the ends of :data:`STEPS` steps in a row, of the slowest worker."""
        return self._repeated(times=False).period

    @property
    def peak_in_flight(self) -> tuple[int, ...]:
        """Per stage, the most microbatches on one worker whose F has started and whose I or B has not ended.

        In a forward-only program, the most microbatches whose F has started and not ended.
        """
        return self._peaks[0]

    @property
    def peak_memory(self) -> tuple[float, ...]:
        """Peak memory per worker."""
        return self._peaks[1]

    @cached_property
    def held(self) -> tuple[int, ...]:
        """Per worker, the most microbatches from the start of F to the end of W, of all its stages together."""
        return tuple(_most(order, WEIGHT_GRADIENT) for order in self.program.orders)

    @cached_property
    def in_flight(self) -> tuple[int, ...]:
        """Per worker, the most microbatches from the start of F to the end of I, of all its stages together."""
        return tuple(_most(order, INPUT_GRADIENT) for order in self.program.orders)

    @property
    def over_memory(self) -> tuple[int, ...]:
        """The workers that exceed the case's limit of memory; none if it has no limit."""
        if isinstance(self.given, Case) and not self.given.is_one_pipeline:
            routing, memory, placement = self.program.routing, self.given.memory, self.given.placement
            if memory is None:
                return ()
            return tuple(one for one in routing.live if self.held[one] > memory[placement[routing.stages_of(one)[0]]])
        pairs = zip(self.peak_memory, self.cost.memory_limit or (), strict=False)
        return tuple(rank for rank, (peak, limit) in enumerate(pairs) if peak > limit + MEMORY_TOLERANCE)

    @cached_property
    def timeline(self) -> Timeline:
        """Return the timeline of the first step: all compute ops, and all messages between workers."""
        path_of = self.program.routing.path_of
        paths = ((one, path_of[one.replica][one.microbatch]) for one in self._messages)
        crossing = tuple(one for one, path in paths if path[one.source] != path[one.destination])
        return Timeline(self.program, Source.SIMULATED, self._ops, crossing)

    @cached_property
    def critical_path(self) -> tuple[Interval, ...]:
        """Return the chain of ops and messages that makes up the makespan; see :mod:`adaptra.simulation.critical_path`.

        Raises:
            ScheduleError: The program is not of one pipeline.
        """
        self.program.require_one_pipeline("critical_path")
        return critical_path(self._ops, self._messages, self.program.placement, self.cost)

    def computed(self, worker: int) -> tuple[OpInterval, ...]:
        """Return the intervals of a worker's compute ops in the first step."""
        return tuple(one for one in self._intervals(self._simulated, worker, 1) if one.op.kind.is_compute)

    def intervals(self, worker: int) -> tuple[tuple[OpInterval, ...], ...]:
        """Return the intervals of a worker's ops, REDUCE and STEP included, per simulated step."""
        count = len(_executed(self.program.orders[worker]))
        found = self._intervals(self._of_steps, worker, STEPS)
        return tuple(found[step * count : (step + 1) * count] for step in range(STEPS))

    @cached_property
    def steps(self) -> tuple[tuple[tuple[OpInterval, ...], ...], ...]:
        """The intervals of all ops: per simulated step, per worker."""
        return tuple(zip(*(self.intervals(worker) for worker in range(self.program.ranks)), strict=True))

    def to_json(self) -> dict[str, Any]:
        """Return the figures as JSON values, without the times of single ops."""
        if isinstance(self.given, Case) and not self.given.is_one_pipeline:
            figures = {"period": self.period, "makespan": self.makespan, "held": list(self.held)}
            return {**figures, "over_memory": list(self.over_memory)}
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
    def _peaks(self) -> tuple[tuple[int, ...], tuple[float, ...]]:
        return _C.peaks(self.cost, self._orders)

    @cached_property
    def _of_steps(self) -> _C.Simulated:
        return self._repeated(times=True)

    def _repeated(self, *, times: bool) -> _C.Simulated:
        repeated = _C.simulate(self._problem, self._orders, STEPS, times)
        if not repeated.complete:
            raise _refused(self.program, self.given)
        return repeated

    def _intervals(self, simulated: _C.Simulated, worker: int, steps: int) -> tuple[OpInterval, ...]:
        times = struct.iter_unpack("=2d", simulated.intervals(worker))
        order = _executed(self.program.orders[worker]) * steps
        return tuple(OpInterval(worker, op, start, end) for op, (start, end) in zip(order, times, strict=True))

    @cached_property
    def _ops(self) -> tuple[tuple[OpInterval, ...], ...]:
        return tuple(map(self.computed, range(self.program.ranks)))

    @cached_property
    def _messages(self) -> tuple[MessageInterval, ...]:
        messages = [
            MessageInterval(
                Kind.SEND_F if destination > source else Kind.SEND_B,
                source,
                destination,
                microbatch,
                posted,
                departed,
                arrived,
                replica,
            )
            for replica, source, destination, microbatch, posted, departed, arrived in struct.iter_unpack(
                "=4i3d", self._simulated.messages()
            )
        ]
        return tuple(sorted(messages, key=lambda one: (one.posted, one.replica, one.source, one.destination, one.microbatch)))


def simulate(program: Program, costs: Case | CostModel) -> Simulation:
    """Simulate a program of one pipeline or of several replicas. Communication ops are skipped, since the costs time messages.

    Every placement is accepted. Messages between stages of one rank take no time. Without REDUCE and STEP in a program of
    several replicas, each worker ends its step with them.

    Args:
        program: The program.
        costs: The case. Or the costs of all replicas, which are alike then.

    Raises:
        CaseError: The program and the costs have different replicas, stages or microbatches, or a lost worker has ops.
        ScheduleError: The workers can't execute the program, or one of several replicas is no training step. For a deadlock,
            the text names every waiting worker, its op and the op that it waits for.
    """
    if isinstance(costs, CostModel):
        if program.is_one_pipeline:
            return _of_pipeline(program, costs)
        costs = alike_case(program, costs)
    routing = check_fit(program, costs)
    if costs.is_one_pipeline and not costs.barrier and program.is_one_pipeline:
        return _simulated(program, costs, pipeline_of(program, costs.cost))
    if program.is_forward_only:
        raise ScheduleError(f"{program.name}: no op computes a gradient: expected a training step")
    return _simulated(with_updates(program), costs, problem_of(costs, routing))


def _of_pipeline(program: Program, cost: CostModel) -> Simulation:
    if program.stages != cost.stages:
        raise CaseError(f"{program.name} has {program.stages} stages, the cost model {cost.stages}: expected as many")
    cost = cost.placed(program.placement)
    return _simulated(program, cost, pipeline_of(program, cost))


def _simulated(program: Program, costs: Case | CostModel, problem: _C.Problem) -> Simulation:
    orders = _C.to_orders(program.orders)
    simulated = _C.simulate(problem, orders, 1)
    if not simulated.complete:
        raise _refused(program, costs)
    return Simulation(program, costs, simulated.makespan, problem, orders, simulated)


def _refused(program: Program, costs: Case | CostModel) -> AssertionError:
    """Raise the verifier's error of a program that can't be executed."""
    if isinstance(costs, Case):
        verify(program, hands_over=costs.hands_over, barrier=costs.barrier, changing=costs.changing)
    else:
        verify(program)
    return AssertionError(f"{program.name}: the simulator can't execute what the verifier accepts")


def verify_whole(program: Program, *, changing: Collection[int] = ()) -> None:
    """Prove that the workers can execute a program, as :func:`.verify` does, in a small part of its time.

    Messages are skipped. C++ accepts a program. The verifier decides on all others, and says which rule they break.

    Args:
        program: The program.
        changing: The stages whose forwards change buffers.

    Raises:
        InvalidProgramError: As :func:`.verify`.
    """
    unit = CostModel.uniform(program.stages, 1.0, 1.0, 1.0)
    problem = problem_of(alike_case(program, unit, changing=changing), program.routing)
    has_lanes = any(op.lane is not None and not op.kind.is_message for order in program.orders for op in order)
    if has_lanes or not _C.runs_whole(problem, _C.to_orders(program.orders)):
        verify(program.only(COMPUTE_KINDS | UPDATE_KINDS), changing=changing)


def _executed(order: Iterable[Op]) -> tuple[Op, ...]:
    return tuple(op for op in order if not op.kind.is_message)


def _most(order: Iterable[Op], ends: Collection[Kind]) -> int:
    """Return the most microbatches from the start of F to the end of an op of these kinds."""
    held = most = 0
    for op in order:
        if op.kind is Kind.F:
            held += 1
            most = max(most, held)
        elif op.kind in ends:
            held -= 1
    return most


def lower_bound(case: Case) -> Bound:
    """Return the greatest of the bounds of a makespan, the simplest one if several are equal.

    It is valid for every order, every placement and every mode of communication, with I and W or with B. It is infinite if a
    single microbatch exceeds a memory limit, so that no plan exists.

    Raises:
        CaseError: The case is not of one pipeline.
    """
    case.require_one_pipeline("lower_bound")
    value, name, where = _C.lower_bound(pipeline_of(case, case.cost))
    kind = BoundKind(name)
    match kind:
        case BoundKind.LOAD | BoundKind.ONE_MACHINE:
            place = f"rank {where}"
        case BoundKind.LINK_FORWARD:
            place = f"edge {where}→{where + 1}"
        case BoundKind.LINK_BACKWARD:
            place = f"edge {where + 1}→{where}"
        case _:
            place = f"stage {where}"
    return Bound(value, kind, place)
