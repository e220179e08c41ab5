"""The simulator of several replicas: the exact times of a program that repeats, and its period.

A worker's next step begins when its last op has ended, so fill and drain overlap across steps. The period is the steady
distance between the ends of steps. The hot loop is in C++.
"""

from __future__ import annotations

import contextlib
import struct
from array import array
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final

from adaptra import _C
from adaptra.errors import CaseError, ScheduleError
from adaptra.program import Kind, Op, Program
from adaptra.program.dependencies import INPUT_GRADIENT, RULE, WEIGHT_GRADIENT
from adaptra.program.routing import Routing
from adaptra.program.verify import verify
from adaptra.simulation.case import Case, placement_lists
from adaptra.simulation.cost import CostModel
from adaptra.simulation.timeline import OpInterval

STEPS: Final = 8
"""The number of steps from which the period is taken."""

KINDS: Final = (Kind.F, Kind.I, Kind.W, Kind.B, Kind.REDUCE, Kind.STEP)
"""The kinds of the ops that the simulator executes, in the order of their codes."""
_CODE: Final = {kind: code for code, kind in enumerate(KINDS)}


@dataclass(frozen=True)
class PeriodicSimulation:
    """Time and memory of a repeated program. Times are in the case's unit and start at zero.

    Attributes:
        program: The program, with its REDUCE and STEP.
        case: The case.
        period: The steady distance between the ends of steps, of the slowest worker.
        makespan: The end of the first step.
        held: Per worker, the most microbatches from the start of F to the end of W.
        peak_in_flight: Per worker, the most microbatches from the start of F to the end of I, of all its stages together.
    """

    program: Program
    case: Case
    period: float
    makespan: float
    held: tuple[int, ...]
    peak_in_flight: tuple[int, ...]
    _simulated: _C.SimulatedPeriod = field(repr=False, compare=False)

    @property
    def over_memory(self) -> tuple[int, ...]:
        """The workers that hold more microbatches than the case allows."""
        routing, memory = self.program.routing, self.case.memory
        if memory is None:
            return ()
        placement = self.case.placement
        return tuple(worker for worker in routing.live if self.held[worker] > memory[placement[routing.stages_of(worker)[0]]])

    def intervals(self, worker: int) -> tuple[tuple[OpInterval, ...], ...]:
        """Return the intervals of a worker's ops, per simulated step."""
        order = _executed(self.program.orders[worker])
        times = struct.iter_unpack("=2d", self._simulated.intervals(worker))
        found = [OpInterval(worker, op, start, end) for op, (start, end) in zip(order * STEPS, times, strict=True)]
        return tuple(tuple(found[step * len(order) : (step + 1) * len(order)]) for step in range(STEPS))

    @cached_property
    def steps(self) -> tuple[tuple[tuple[OpInterval, ...], ...], ...]:
        """The intervals of all ops: per simulated step, per worker."""
        return tuple(zip(*(self.intervals(worker) for worker in range(self.program.ranks)), strict=True))

    def to_json(self) -> dict[str, Any]:
        """Return the figures as JSON values, without the times of single ops."""
        return {
            "period": self.period,
            "makespan": self.makespan,
            "held": list(self.held),
            "over_memory": list(self.over_memory),
        }


def simulate_period(program: Program, case: Case) -> PeriodicSimulation:
    """Simulate :data:`STEPS` steps of a program of several replicas. Communication ops are skipped: the case times messages.

    Without REDUCE and STEP in the program, each worker ends its step with them.

    Raises:
        ScheduleError: The workers can't execute the program, or it is no training step of several replicas. For a deadlock it
            shows who waits for whom.
        CaseError: The program and the case have different replicas, stages or microbatches, or a lost worker has ops.
    """
    routing = check_fit(program, case)
    if program.is_forward_only:
        raise ScheduleError(f"{program.name}: no op computes a gradient: expected a training step")
    whole = with_updates(program)
    simulated = None
    with contextlib.suppress(ValueError):  # an op is misplaced or missing, which the verifier names
        simulated = _C.simulate_period(job_of(case, routing), [packed(_executed(order)) for order in whole.orders], STEPS)
    if simulated is None or not simulated.complete:
        verify(whole, hands_over=case.hands_over, barrier=case.barrier, changing=case.changing)
        raise AssertionError(f"{program.name}: the simulator can't execute what the verifier accepts")
    held, in_flight = (tuple(_most(order, ends) for order in whole.orders) for ends in (WEIGHT_GRADIENT, INPUT_GRADIENT))
    return PeriodicSimulation(whole, case, simulated.period, simulated.makespan, held, in_flight, simulated)


def pipeline_period(program: Program, cost: CostModel) -> float:
    """Return the period of a program of one pipeline over :data:`STEPS` steps, in the cost model's unit.

    REDUCE and STEP take no time. Every placement and mode of communication is simulated.

    Raises:
        CaseError, ScheduleError: As of :func:`adaptra.simulation.simulate.simulate`.
    """
    program.require_one_pipeline("pipeline_period")
    if program.stages != cost.stages:
        raise CaseError(f"{program.name} has {program.stages} stages, the cost model {cost.stages}: expected as many")
    found = _C.period_of(program, cost.placed(program.placement), _C.to_orders(program.orders), RULE, STEPS)
    if found is None:
        verify(program)
        raise AssertionError(f"{program.name}: the simulator can't execute what the verifier accepts")
    return found


def simulate_alike(program: Program, cost: CostModel, changing: Collection[int] = ()) -> PeriodicSimulation:
    """Simulate a program of several replicas in the case of :func:`alike_case`.

    Raises:
        ScheduleError: As of :func:`simulate_period`.
    """
    return simulate_period(program, alike_case(program, cost, changing=changing))


def alike_case(program: Program, cost: CostModel, *, hands_over: bool = True, changing: Collection[int] = ()) -> Case:
    """Return the case of a program of several replicas that all have the same costs; REDUCE and STEP take no time.

    A limit of memory is that of :meth:`.Case.of_replicas`. ``changing`` are the stages whose forwards change buffers.
    """
    case = Case(cost, program.microbatches, program.placement).of_replicas(program.replicas)
    return replace(case, hands_over=hands_over, changing=frozenset(changing))


def with_updates(program: Program) -> Program:
    """Return the program with all REDUCE, then all STEP at each worker's end, if it has none."""
    routing = program.routing
    if any(op.kind.is_update for order in program.orders for op in order):
        return program
    orders = list(program.orders)
    for worker in routing.live:
        replica = routing.replica_of(worker)
        updates = [
            Op(stage, kind, 0, None, replica) for kind in (Kind.REDUCE, Kind.STEP) for stage in routing.stages_of(worker)
        ]
        orders[worker] = (*orders[worker], *updates)
    return replace(program, orders=tuple(orders))


def job_of(case: Case, routing: Routing) -> _C.Job:
    """Return the numbers of a case and a routing as the C++ code takes them.

    Raises:
        CaseError: Edges are half duplex or communication blocks.
    """
    case.check_edges()
    workers = routing.live[-1] + 1
    holders = [
        routing.holder(replica, stage, microbatch)
        for replica in range(case.replicas)
        for stage in range(case.stages)
        for microbatch in range(case.microbatches)
    ]
    return _C.Job(
        replicas=case.replicas,
        microbatches=case.microbatches,
        durations=[case.cost.forward, case.cost.input_grad, case.cost.weight_grad, case.step, case.reduce],
        slow=[case.slow.get(worker, 1.0) for worker in range(workers)],
        port=[case.ports.get(worker, 0.0) for worker in range(workers)],
        latency=[case.cost.latency_forward, case.cost.latency_backward],
        occupancy=[case.cost.occupancy_forward, case.cost.occupancy_backward],
        links=[(*ends, link.latency, link.occupancy) for ends, link in case.links.items()],
        hand_over=case.hand_over,
        hands_over=case.hands_over,
        changing=[stage in case.changing for stage in range(case.stages)],
        barrier=case.barrier,
        holder=holders,
        home=[routing.replica_of(worker) if routing.stages_of(worker) else 0 for worker in range(workers)],
        columns=[routing.column(stage) for stage in range(case.stages)],
        rule=RULE,
    )


def packed(order: Iterable[Op]) -> bytes:
    """Return ops as the C++ code takes them: four int32 each, the replica, the stage, the kind's code and the microbatch."""
    numbers = array("i")
    for op in order:
        numbers.extend((op.replica, op.stage, _CODE[op.kind], op.microbatch))
    return numbers.tobytes()


def unpacked(order: bytes, replica: int | None = None) -> tuple[Op, ...]:
    """Return the ops of an order as the C++ code gives it, those of :func:`packed`; all of ``replica`` if it is given."""
    return tuple(
        Op(stage, KINDS[code], microbatch, None, home if replica is None else replica)
        for home, stage, code, microbatch in struct.iter_unpack("=4i", order)
    )


def check_fit(program: Program, case: Case) -> Routing:
    """Check that a program is of a case's size, and return its routing.

    Raises:
        CaseError: The program and the case have different replicas, stages or microbatches, or a lost worker has ops.
    """
    routing = program.routing
    given = routing.replicas, program.stages, program.microbatches
    expected = case.replicas, case.stages, case.microbatches
    if given != expected:
        raise CaseError(
            f"{program.name} has {given[0]} replicas of {given[1]} stages and {given[2]} microbatches: expected "
            f"{expected[0]}, {expected[1]} and {expected[2]}, as {case.name} has"
        )
    for replica, path in enumerate(routing.workers):
        rank_of: dict[int, int] = {}
        worker_of: dict[int, int] = {}
        for rank, worker in zip(case.placement, path, strict=True):
            if worker is not None and (rank_of.setdefault(worker, rank), worker_of.setdefault(rank, worker)) != (rank, worker):
                raise CaseError(
                    f"{program.name}: worker {worker} of replica {replica} has the stages {list(routing.stages_of(worker))}: "
                    f"expected the placement {placement_lists(case.placement)}, as {case.name} has"
                )
    for worker in case.lost:
        if routing.stages_of(worker):
            raise CaseError(f"{program.name}: worker {worker} has stages, but {case.name} says that it is lost")
    return routing


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
