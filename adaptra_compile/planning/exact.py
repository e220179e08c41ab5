"""The exact reference: a planning problem as a constraint program, solved to a proven optimum by OR-tools' CP-SAT.

It is meant for tests and small problems: tens of ops take less than a second, hundreds may take hours. Every op is an interval,
and the ops of a rank do not overlap. Messages follow :class:`adaptra.simulation.cost.CostModel`. Memory and in-flight limits
are conditions on the order of a rank's ops. The simulator, not the solver, computes the makespan of the order found. Needs the
extra ``exact``.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations
from typing import TYPE_CHECKING, Final, NamedTuple

from adaptra.equations.warm_up import in_flight_limits
from adaptra.errors import MissingExtraError, PlanError
from adaptra.planning.planner import plan
from adaptra.program import Kind, Op, Program
from adaptra.simulation.case import Case
from adaptra.simulation.cost import MEMORY_TOLERANCE, Blocking, CostModel
from adaptra.simulation.simulate import Simulation, simulate

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import BoolVarT, CpModel, IntervalVar, IntVar

_LARGEST_EXACT: Final = 1 << 32
"""Largest sum of times, in units, that is represented exactly. This needs one unit that divides all times."""

_ROUNDED: Final = 1 << 30
"""Approximate length of the step in units if no unit divides all times. Then every time is rounded down."""

_MEMORY_UNITS: Final = 1 << 30
_DENOMINATOR: Final = 10**6
_PHASE: Final = {Kind.F: 0, Kind.I: 1, Kind.W: 2}


@dataclass(frozen=True, slots=True)
class Exact:
    """The solver's plan and its proven bound. Times are in the case's unit.

    Attributes:
        program: The shortest program found, of F, I and W.
        makespan: Its simulated makespan.
        bound: The proven bound: no order of ops has a shorter makespan.
    """

    program: Program
    makespan: float
    bound: float

    @property
    def proven(self) -> bool:
        """Whether the plan is proven optimal, up to the rounding of times (below one part in 100,000)."""
        return self.makespan <= self.bound * (1 + 1e-5) + 1e-12


class _Activity(NamedTuple):
    """One op in the model; ``end`` is the expression ``start + length``."""

    start: IntVar
    length: int
    interval: IntervalVar

    @property
    def end(self) -> IntVar:
        # start + constant is a linear expression, which every constraint accepts like a variable.
        return self.start + self.length  # pyright: ignore[reportReturnType]


def solve_exactly(
    case: Case,
    *,
    in_flight: int | Sequence[int] | None = None,
    incumbent: Program | None = None,
    seconds: float = 60.0,
    workers: int = 0,
) -> Exact:
    """Find the shortest order of ops for a case, and a bound on the makespan of all orders.

    Given enough time, ``proven`` is true and the bound is the optimum. There is one exception: an edge that both directions
    share. Its messages go in the order of their producers, and the solver may delay an op on purpose, which no program can do.
    The bound is still valid there, but may not be reachable.

    Args:
        case: Costs, microbatches and placement. Every placement is allowed.
        in_flight: As for :func:`adaptra.planning.planner.plan`.
        incumbent: The program that runs now, as for :func:`adaptra.planning.planner.plan`. The solver starts from the plan
            that this function makes of it.
        seconds: Time limit, after which the best program and bound so far are returned.
        workers: The number of search threads, or 0 for one per core. With 1 and enough seconds the result is reproducible.

    Raises:
        PlanError: As :func:`adaptra.planning.planner.plan`, or communication blocks the stages, which this model does not know.
        MissingExtraError: OR-tools is not installed.
    """
    try:
        from ortools.sat.python import cp_model
    except ImportError as error:
        raise MissingExtraError("exact plans need OR-tools: pip install 'adaptra[exact]'") from error
    if case.cost.blocking is not Blocking.NONE:
        raise PlanError(f"{case.name}: blocking {case.cost.blocking.value}: expected none for an exact plan")
    start = simulate(plan(case, in_flight=in_flight, incumbent=incumbent), case.cost)
    units = _Units(case, start.makespan)
    problem = _Problem(cp_model.CpModel(), case, in_flight_limits(in_flight, case.cost.stages, case.microbatches), units)
    problem.hint(start)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = workers
    status = solver.solve(problem.model)
    bound = max(0.0, solver.best_objective_bound) / units.per_time
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return Exact(start.program, start.makespan, min(bound, start.makespan))
    found = simulate(problem.program({op: solver.value(activity.start) for op, activity in problem.ops.items()}), case.cost)
    best = min(start, found, key=lambda simulation: simulation.makespan)
    return Exact(best.program, best.makespan, min(bound, best.makespan))


class _Units:
    """Conversion of times to whole numbers. If no unit divides all times, it rounds down, so that bounds stay valid."""

    def __init__(self, case: Case, makespan: float) -> None:
        cost = case.cost
        times = [
            time
            for values in (cost.forward, cost.input_grad, cost.weight_grad, cost.latency_forward, cost.latency_backward,
                           cost.occupancy_forward, cost.occupancy_backward)
            for time in values
        ]  # fmt: skip
        common = _common_unit(times)
        self.per_time = common if common * makespan <= _LARGEST_EXACT else _ROUNDED / max(makespan, 1e-300)
        self.exact = common * makespan <= _LARGEST_EXACT

    def whole(self, time: float) -> int:
        return round(time * self.per_time) if self.exact else math.floor(time * self.per_time)


def _common_unit(values: Iterable[float]) -> float:
    """Return the reciprocal of the largest unit that divides all values, or infinity if decimals suggest no such unit."""
    fractions = [Fraction(value).limit_denominator(_DENOMINATOR) for value in values]
    if any(abs(float(fraction) - value) > 1e-12 * value for fraction, value in zip(fractions, values, strict=True)):
        return math.inf
    denominator = math.lcm(*(fraction.denominator for fraction in fractions))
    divisor = math.gcd(*(int(fraction * denominator) for fraction in fractions)) or 1
    return denominator / divisor if denominator < _LARGEST_EXACT else math.inf


class _Problem:
    """The constraint program of one case."""

    def __init__(self, model: CpModel, case: Case, limits: Sequence[int], units: _Units) -> None:
        self.model = model
        self._case = case
        self._units = units
        self._horizon = self._longest()
        self.ops = {
            Op(stage, kind, microbatch): self._activity(case.cost.duration(stage, kind))
            for stage in range(case.cost.stages)
            for kind in _PHASE
            for microbatch in range(case.microbatches)
        }
        self._order_within_stages(limits)
        for rank in range(max(case.placement) + 1):
            model.add_no_overlap([a.interval for op, a in self.ops.items() if case.placement[op.stage] == rank])
        self._messages(case.cost)
        for rank, limit in enumerate(case.cost.memory_limit or ()):
            self._memory(rank, limit)
        makespan = self._time("makespan")
        for op, activity in self.ops.items():
            if op.microbatch == case.microbatches - 1:
                model.add(makespan >= activity.end)
        model.minimize(makespan)

    def hint(self, simulation: Simulation) -> None:
        """Give the solver a solution to start from."""
        for interval in simulation.timeline:
            op = interval.op
            for kind in (Kind.I, Kind.W) if op.kind is Kind.B else (op.kind,):
                begins = interval.start + (simulation.cost.input_grad[op.stage] if (op.kind, kind) == (Kind.B, Kind.W) else 0.0)
                self.model.add_hint(self.ops[Op(op.stage, kind, op.microbatch)].start, self._units.whole(begins))

    def program(self, starts: dict[Op, int]) -> Program:
        """Return the program that runs ops in order of their starts. Ops of no duration that start at once go by microbatch."""
        orders: list[list[Op]] = [[] for _ in range(max(self._case.placement) + 1)]
        for op in sorted(starts, key=lambda op: (starts[op], self.ops[op].length > 0, *_rank_among_equals(op))):
            orders[self._case.placement[op.stage]].append(op)
        return Program.of_pipeline("exact", self._case.placement, self._case.microbatches, tuple(map(tuple, orders)))

    def _longest(self) -> int:
        """Return the length of a step that runs one op or message at a time, an upper bound of all sensible orders."""
        cost, whole = self._case.cost, self._units.whole
        stages = sum(map(whole, (*cost.forward, *cost.input_grad, *cost.weight_grad)))
        edges = (*cost.latency_forward, *cost.latency_backward, *cost.occupancy_forward, *cost.occupancy_backward)
        return self._case.microbatches * (stages + sum(map(whole, edges))) + 1

    def _time(self, name: str) -> IntVar:
        return self.model.new_int_var(0, self._horizon, name)

    def _activity(self, duration: float) -> _Activity:
        start, length = self._time(""), self._units.whole(duration)
        return _Activity(start, length, self.model.new_fixed_size_interval_var(start, length, ""))

    def _order_within_stages(self, limits: Sequence[int]) -> None:
        """Require F before I before W, microbatch order within each kind, and the limits on microbatches in flight."""
        ops, add = self.ops, self.model.add
        for stage, limit in enumerate(limits):
            for microbatch in range(self._case.microbatches):
                add(ops[Op(stage, Kind.I, microbatch)].start >= ops[Op(stage, Kind.F, microbatch)].end)
                add(ops[Op(stage, Kind.W, microbatch)].start >= ops[Op(stage, Kind.I, microbatch)].end)
                if microbatch > 0:
                    for kind in _PHASE:
                        add(ops[Op(stage, kind, microbatch)].start >= ops[Op(stage, kind, microbatch - 1)].end)
                if microbatch >= limit:
                    add(ops[Op(stage, Kind.F, microbatch)].start >= ops[Op(stage, Kind.I, microbatch - limit)].end)

    def _messages(self, cost: CostModel) -> None:
        on_link: defaultdict[object, list[tuple[int, Kind, list[_Activity]]]] = defaultdict(list)
        edges = range(cost.stages - 1)
        sends = [(edge, edge + 1, Kind.F) for edge in edges] + [(edge + 1, edge, Kind.I) for edge in edges]
        for source, destination, kind in sends:
            occupancy, latency = cost.occupancy(source, destination), cost.latency(source, destination)
            sent = self._send(source, destination, kind, occupancy, latency)
            ends = self._case.placement[source], self._case.placement[destination]
            if ends[0] != ends[1]:
                on_link[frozenset(ends) if cost.half_duplex else ends].append((source, kind, sent))
        for sharing in on_link.values():
            for first, second in combinations(sharing, 2):
                self._share(*first, *second)

    def _send(self, source: int, destination: int, kind: Kind, occupancy: float, latency: float) -> list[_Activity]:
        """Return all messages of a directed edge, in microbatch order, since their producers end in that order."""
        sent: list[_Activity] = []
        for microbatch in range(self._case.microbatches):
            message = self._activity(occupancy)
            self.model.add(message.start >= self.ops[Op(source, kind, microbatch)].end)
            if sent:
                self.model.add(message.start >= sent[-1].end)
            arrived = message.end + self._units.whole(latency)
            self.model.add(self.ops[Op(destination, kind, microbatch)].start >= arrived)
            sent.append(message)
        return sent

    def _share(
        self, source: int, kind: Kind, sent: Sequence[_Activity], other: int, its_kind: Kind, others: Sequence[_Activity]
    ) -> None:
        """Order messages of two stages that share a link by the ends of their producers. At equal ends, ``sent`` go first."""
        for microbatch, message in enumerate(sent):
            posted = self.ops[Op(source, kind, microbatch)].end
            for its_microbatch, opposite in enumerate(others):
                opposite_posted = self.ops[Op(other, its_kind, its_microbatch)].end
                first = self._literal()
                self.model.add(posted <= opposite_posted).only_enforce_if(first)
                self.model.add(opposite.start >= message.end).only_enforce_if(first)
                self.model.add(opposite_posted + 1 <= posted).only_enforce_if(~first)
                self.model.add(message.start >= opposite.end).only_enforce_if(~first)

    def _memory(self, rank: int, limit: float) -> None:
        """Require that a rank's memory is within its limit at the start of every F, where its maxima are."""
        cost = self._case.cost
        held = [op for op in self.ops if self._case.placement[op.stage] == rank]
        forwards = [op for op in held if op.kind is Kind.F]
        per_size = _common_unit([*cost.memory_forward, *cost.memory_input_grad])
        if per_size * sum(cost.memory_forward) * self._case.microbatches > _MEMORY_UNITS:
            per_size = _MEMORY_UNITS / max(limit, 1e-300)
        room = math.floor((limit + MEMORY_TOLERANCE) * per_size)
        taken = [math.ceil(size * per_size - 1e-6) for size in cost.memory_forward]
        freed = [math.floor(size * per_size + 1e-6) for size in cost.memory_input_grad]
        for op in forwards:
            total = [taken[other.stage] * self._before(other, op) for other in forwards if other != op]
            for other in held:
                match other.kind:
                    case Kind.I:
                        total.append(-freed[other.stage] * self._ended(other, op))
                    case Kind.W:
                        total.append((freed[other.stage] - taken[other.stage]) * self._ended(other, op))
                    case _:
                        pass
            self.model.add(sum(total) + taken[op.stage] <= room)

    def _before(self, other: Op, op: Op) -> BoolVarT | int:
        """Return whether ``other``, an F, comes before ``op``, another F: true unless it provably does not."""
        if other.stage == op.stage:
            return int(other.microbatch < op.microbatch)
        stands = self._literal()
        later, earlier = self.ops[other], self.ops[op]
        self.model.add(later.start >= earlier.end + self._apart(op, other)).only_enforce_if(~stands)
        return stands

    def _ended(self, other: Op, op: Op) -> BoolVarT | int:
        """Return whether ``other``, an I or W, comes before ``op``, an F: false unless it provably does."""
        if other.stage == op.stage and other.microbatch >= op.microbatch:
            return 0
        stands = self._literal()
        self.model.add(self.ops[op].start >= self.ops[other].end + self._apart(other, op)).only_enforce_if(stands)
        return stands

    def _apart(self, first: Op, second: Op) -> int:
        """Return the gap in units that keeps two ops in order.

        It is 1 if both have no duration and :meth:`program` would reverse them when they start at once, else 0.
        """
        if self.ops[first].length > 0 or self.ops[second].length > 0:
            return 0
        return int(_rank_among_equals(first) > _rank_among_equals(second))

    def _literal(self) -> BoolVarT:
        return self.model.new_bool_var("")


def _rank_among_equals(op: Op) -> tuple[int, int, int]:
    """Return the sort key of ops that start at once and take no time: by microbatch, then down the stages and back."""
    phase = _PHASE[op.kind]
    return op.microbatch, phase, op.stage if phase == 0 else -op.stage
