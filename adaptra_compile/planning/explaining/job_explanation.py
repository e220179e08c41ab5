"""Explanation of a plan of several replicas: its equations with numbers, what binds its period, and what would help."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

from adaptra.equations.equation import Equation, legend
from adaptra.equations.replicas import REPLICA_SYMBOLS, replica_equations
from adaptra.planning.explaining.explanation import Line, texts_of
from adaptra.planning.explaining.job_numbers import ROUNDED, JobNumbers, Traffic, WorkerLoad
from adaptra.planning.responses.normalize import losses, role_moves, stage_work, with_moves
from adaptra.planning.routes.job_planner import plan_job
from adaptra.planning.routes.period_bound import period_bound
from adaptra.program import Program
from adaptra.simulation.bound import Bound, BoundKind
from adaptra.simulation.case import Case
from adaptra.simulation.simulate import Simulation, simulate

_MOST_NAMES: Final = 4
"""The most names before one line of text."""


@dataclass(frozen=True)
class JobExplanation:
    """A plan of several replicas with its equations. Times are in the case's unit.

    Attributes:
        simulation: The plan, its case and its period.
        healthy: The period of the plan for the job with nothing lost or slow.
        fault_scaled: The healthy period, scaled by the speed that is left.
        bound: The greatest lower bound of the period, and its cause.
        lines: Every equation at every stage, worker or link where it applies, sorted by equation.
        remarks: What bounds the period and what would make it shorter, one sentence each.
    """

    simulation: Simulation
    healthy: float
    fault_scaled: float
    bound: Bound
    lines: tuple[Line, ...]
    remarks: tuple[str, ...]

    @property
    def gap(self) -> float:
        """Excess of the period over the bound, as a fraction of the bound. Zero for a step that takes no time."""
        return self.simulation.period / self.bound.value - 1.0 if self.bound.value > 0 else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the explanation as JSON values."""
        return {
            "program": self.simulation.program.name,
            "case": self.simulation.case.name,
            "period": self.simulation.period,
            "bound": self.bound.value,
            "bound_kind": self.bound.kind.value,
            "bound_where": self.bound.where,
            "gap": self.gap,
            "healthy_period": self.healthy,
            "fault_scaled_period": self.fault_scaled,
            "remarks": list(self.remarks),
            "symbols": legend((line.equation for line in self.lines), REPLICA_SYMBOLS),
            "equations": [line.to_json() for line in self.lines],
        }

    def __str__(self) -> str:
        return self.text(equations=True)

    def text(self, *, equations: bool) -> str:
        """Return the plan, what bounds it and what would help, and on request the equations with their numbers."""
        return "\n".join((*self._summary(), *(self._equations() if equations else ()))) + "\n"

    def _summary(self) -> Iterator[str]:
        name, case = self.simulation.program.name, self.simulation.case
        yield (
            f"{name} on {case.name}: period {self.simulation.period:.10g}, no order on its routes beats {self.bound}, "
            f"gap {100 * self.gap:.1f} %; all times in the unit of the case"
        )
        if not case.is_healthy:
            yield (
                f"the healthy job takes {self.healthy:.10g}; if what is left shared all work of that evenly, it would take "
                f"{self.fault_scaled:.10g}"
            )
        yield from self.remarks

    def _equations(self) -> Iterator[str]:
        yield from texts_of(_alike_once(self.lines))
        yield "\nsymbols; i numbers stages, k workers, l and r links or ports:"
        for symbol, meaning in legend((line.equation for line in self.lines), REPLICA_SYMBOLS).items():
            yield f"  {symbol:<5}{meaning}"


def _alike_once(lines: Iterable[Line]) -> Iterator[Line]:
    """Yield one line for all of an equation with the same numbers, since most stages of a large job are alike."""
    alike: defaultdict[tuple[Equation, str], list[Line]] = defaultdict(list)
    for line in lines:
        alike[line.equation, line.values].append(line)
    for group in alike.values():
        names = [line.where for line in group]
        few = names if len(names) <= _MOST_NAMES else [*names[: _MOST_NAMES - 1], f"{len(names) - _MOST_NAMES + 1} more"]
        yield replace(group[0], where=", ".join(few))


def explain_job(program: Program, case: Case) -> JobExplanation:
    """Fill the equations of several replicas with the numbers of a plan.

    Plans the healthy job too, and the same one without memory limit if memory may be what makes the period longer.

    Args:
        program: The plan, with its routes. Communication ops are ignored.
        case: The case for which it was made.

    Raises:
        ScheduleError: The workers can't execute the program, or it is no training step of several replicas.
        CaseError: The program and the case have different replicas, stages or microbatches, or a lost worker has ops.
        PlanError: No plan of the healthy job keeps the case's memory limit.
    """
    simulation = simulate(program, case)
    healthy = simulation.period
    if not case.is_healthy:
        whole = replace(case, lost=frozenset(), slow={})
        healthy = simulate(plan_job(whole), whole).period
    bound = period_bound(case, program.routing)
    numbers = JobNumbers(simulation, program.routing)
    scaled = Line.of(replica_equations().fault_scaled, "all stages", healthy, *numbers.left)
    lines = (
        *numbers.of_stages(),
        *numbers.of_workers(),
        *numbers.of_messages(),
        *numbers.of_recut(),
        *(() if case.is_healthy else (scaled,)),
    )
    remarks = (*_remarks(numbers, bound), *_room_missing(numbers, bound))
    return JobExplanation(simulation, healthy, float(scaled.result), bound, lines, remarks)


def _remarks(numbers: JobNumbers, bound: Bound) -> Iterator[str]:
    """Yield what bounds the period, and what would make it shorter."""
    period, best = numbers.simulation.period, float(numbers.recut.result)
    if bound.kind is BoundKind.PORT:
        yield f"port: {bound.where} for that long; fewer microbatches through it would help"
    elif bound.kind is BoundKind.LINK:
        yield _detour(numbers, next(one for one in numbers.traffic if one.where == bound.where))
    else:
        where = bound.where.partition(",")[0]  # a path also has a stage
        load = max((load for load in numbers.loads if where == f"worker {load.worker}"), key=numbers.work)
        yield _computed(numbers, load)
        if bound.kind is BoundKind.WORK:
            yield from _role_moves(numbers.case)
            if bound.value > best * ROUNDED:
                yield (
                    f"re-cut: fewer layers for stage {load.stage} would take {best:.6g} at best; then it pays after "
                    f"its cost / {period - best:.6g} steps"
                )
    yield from _fit_remark(numbers)


def _computed(numbers: JobNumbers, load: WorkerLoad) -> str:
    replica, microbatches = numbers.routing.replica_of(load.worker), range(numbers.case.microbatches)
    own = sum(numbers.routing.holder(replica, load.stage, microbatch) == load.worker for microbatch in microbatches)
    others = load.microbatches - own
    return f"bound: {numbers.name(load)} computes {load.microbatches} microbatches, {others} of other replicas"


def _role_moves(case: Case) -> Iterator[str]:
    moves = role_moves(case)
    if moves:
        before, after = (
            max(stage_work(one, stage, lost) for stage, lost in enumerate(losses(one)))
            for one in (case, with_moves(case, moves))
        )
        listed = ", ".join(f"worker {move.worker} to the place of {move.place}" for move in moves)
        yield f"role move: {listed}; that would leave a work bound of {after:.6g} instead of {before:.6g}"


def _detour(numbers: JobNumbers, one: Traffic) -> str:
    model, size, way = replica_equations(), numbers.case.microbatches, numbers.way_round(one)
    if not way < one.occupancy:
        return f"link: {one.where} carries {one.messages} messages; no wider link leads to another replica's worker"
    share, best = (equation.evaluate(size, one.occupancy, 0, way) for equation in (model.detour_share, model.detour_bound))
    return (
        f"detour: {one.where} carries {one.messages} messages; with {share:.4g} of {size} on detours the links would be "
        f"busy for {best:.6g}"
    )


def _fit_remark(numbers: JobNumbers) -> Iterator[str]:
    """Yield that the fit holds and 1F1B is faster nevertheless, in a case as ReCycle has them."""
    model, case = replica_equations(), numbers.case
    delays = *case.cost.latency_forward, *case.cost.latency_backward, *(one.latency for one in case.links.values())
    busy = (one.occupancy for one in numbers.traffic)
    if not case.lost or not numbers.is_equal or case.slow or any(delays) or any(busy):
        return
    published = float(model.one_f_one_b.evaluate(case.microbatches, case.stages, *numbers.times(0)))
    fits = all(model.fit.evaluate(*numbers.size(stage), case.stages) for stage in range(case.stages))
    if fits and numbers.simulation.period > published * ROUNDED:
        yield (
            f"fit: it holds on every stage, and yet the period is above the {published:.6g} of the healthy 1F1B: it is "
            "necessary, not sufficient"
        )


def _room_missing(numbers: JobNumbers, bound: Bound) -> Iterator[str]:
    """Yield how much more room per worker gives the period that the planner finds without memory limit."""
    case, memory, period = numbers.case, numbers.case.memory, numbers.simulation.period
    of_memory = bound.kind in (BoundKind.MEMORY, BoundKind.FILL)
    if memory is None or (period <= bound.value * ROUNDED and not of_memory):
        return

    def period_with(more: int | None) -> float:
        roomy = replace(case, memory=None if more is None else tuple(room + more for room in memory))
        return simulate(plan_job(roomy), roomy).period

    free = period_with(None)
    if free * ROUNDED < period:
        most = max(load.microbatches for load in numbers.loads)
        enough = bisect_left(range(1, most), True, key=lambda more: period_with(more) <= free * ROUNDED) + 1
        yield f"memory: with room for {enough} more microbatches on every worker the planner finds {free:.10g}"
