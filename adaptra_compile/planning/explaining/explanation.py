"""Explanation of a plan: its times, what limits them and what would help, and its equations with its numbers filled in."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final

from adaptra.equations.bubble import SYMBOLS
from adaptra.equations.equation import Equation, legend
from adaptra.equations.replicas import REPLICA_SYMBOLS, replica_equations
from adaptra.equations.warm_up import warm_up
from adaptra.errors import PlanError
from adaptra.planning.explaining.job_numbers import JobNumbers
from adaptra.planning.explaining.job_remarks import remarks_of
from adaptra.planning.explaining.lines import Line, texts_of
from adaptra.planning.explaining.memory_table import MemoryPoint, time_by_memory
from adaptra.planning.explaining.pipeline_numbers import bound_lines, edge_lines, limits_of, warm_up_of
from adaptra.planning.limitation import what_limits
from adaptra.planning.remedies.bandwidth_remedies import BandwidthOptions, Edge, find_remedies
from adaptra.planning.routes.job_planner import plan_job
from adaptra.planning.routes.period_bound import period_bound
from adaptra.planning.routes.steady_steps import PERIOD, timing_of
from adaptra.program import Program
from adaptra.simulation.bound import Bound
from adaptra.simulation.case import Case
from adaptra.simulation.cost import CostModel
from adaptra.simulation.job import alike_case, check_fit
from adaptra.simulation.simulate import Simulation, lower_bound, simulate

_MOST_NAMES: Final = 4
"""The most names before one line of text."""


@dataclass(frozen=True)
class Explanation:
    """A plan with its equations. :func:`str` gives all as text.

    Attributes:
        simulation: The plan, its costs and its times.
        figures: Its figures as JSON values.
        summary: The plan, what limits it and what would help, as lines of text.
        lines: Every equation at every stage, edge, worker or link where it applies, sorted by equation.
        notation: What indices stand for.
    """

    simulation: Simulation
    figures: Mapping[str, Any]
    summary: tuple[str, ...]
    lines: tuple[Line, ...]
    notation: str

    def to_json(self) -> dict[str, Any]:
        """Return the explanation as JSON values."""
        return {**self.figures, "symbols": self._symbols, "equations": [line.to_json() for line in self.lines]}

    def __str__(self) -> str:
        return self.text(equations=True)

    def text(self, *, equations: bool) -> str:
        """Return the plan, what limits it and what would help, and on request the equations with their numbers."""
        return "\n".join((*self.summary, *(self._equations() if equations else ()))) + "\n"

    @property
    def _symbols(self) -> dict[str, str]:
        known = SYMBOLS if self.simulation.case.is_one_pipeline else REPLICA_SYMBOLS
        return legend((line.equation for line in self.lines), known)

    def _equations(self) -> Iterator[str]:
        of_stages = self.simulation.case.is_one_pipeline  # then each symbol but one has the index i
        yield from texts_of(self.lines if of_stages else _alike_once(self.lines))
        yield f"\nsymbols{self.notation}:"
        for symbol, meaning in self._symbols.items():
            yield f"  {symbol if symbol == 'N' else f'{symbol}_i':<9}{meaning}" if of_stages else f"  {symbol:<5}{meaning}"


def _alike_once(lines: Iterable[Line]) -> Iterator[Line]:
    """Yield one line for all of an equation with the same numbers, since most stages of a large job are alike."""
    alike: defaultdict[tuple[Equation, str], list[Line]] = defaultdict(list)
    for line in lines:
        alike[line.equation, line.values].append(line)
    for group in alike.values():
        names = [line.where for line in group]
        few = names if len(names) <= _MOST_NAMES else [*names[: _MOST_NAMES - 1], f"{len(names) - _MOST_NAMES + 1} more"]
        yield replace(group[0], where=", ".join(few))


def explain(
    program: Program,
    costs: Case | CostModel,
    *,
    bandwidth: BandwidthOptions | None = None,
    spread: Sequence[Edge] = (),
    rounded: Sequence[Edge] = (),
    unit: str = "",
) -> Explanation:
    """Fill the equations with the numbers of a plan: those of a pipeline's bubble, or those of several replicas.

    If "no cascading bubble" is not satisfied, the delay of one microbatch may reach the next. The plan may still be optimal: W
    may fill the bubble, forwards after the warm-up may widen the slackness, or memory may leave no choice. Its cost is the gap
    between makespan and bound.

    What limits one pipeline and what would help is said of the period, or behind the case's barrier of the makespan. Of several
    replicas the healthy job is planned too. So is the same one without memory limit, if memory may make the period longer.

    Args:
        program: The plan, with its routes. Communication ops are ignored.
        costs: The case for which it was made, or the costs of all its replicas.
        bandwidth, spread, rounded: Remedies for edges whose bandwidth limits one pipeline, available and in use; see
            :func:`adaptra.planning.remedies.bandwidth_remedies.find_remedies`.
        unit: Unit of one pipeline's times, such as ``seconds``; empty for the case's own.

    Raises:
        PlanError: The program computes no gradients, or no plan of the healthy job keeps the memory limit.
        CaseError: The program and the case have different replicas, stages or microbatches, or a lost worker has ops.
        ScheduleError: The workers can't execute the program.
    """
    if isinstance(costs, Case):
        case = costs
    else:
        case = Case(costs, program.microbatches, program.placement) if program.is_one_pipeline else alike_case(program, costs)
    check_fit(program, case)
    if not case.is_one_pipeline:
        return _of_job(program, case)
    if program.is_forward_only:
        raise PlanError(f"{program.name} computes no gradients: there is no warm-up to explain")
    cost, timing, number = case.cost, timing_of(barrier=case.barrier), case.microbatches
    simulation = simulate(program.compute_only() if program.is_lowered else program, cost)
    program, makespan, period, busy = simulation.program, simulation.makespan, simulation.period, max(simulation.busy)
    x, asked = warm_up_of(program), warm_up(cost, number, limits_of(program, cost))
    bound, period_bound = lower_bound(case), PERIOD.binds(case)
    gap, period_gap = _gap(makespan, bound), _gap(period, period_bound)
    points, limitation = time_by_memory(case, program, timing), what_limits(simulation, timing)
    remedies = find_remedies(case, program, spread, rounded, bandwidth=bandwidth or BandwidthOptions(), timing=timing)
    figures = {
        "program": program.name,
        "microbatches": number,
        "stages": case.stages,
        "x": list(x),
        "slack": [before - behind for before, behind in pairwise(x)],
        "asked_x": list(asked.x),
        "asked_slack": list(asked.slack),
        "makespan": makespan,
        "bound": bound.value,
        "binds": f"{bound.kind.value}, {bound.where}",
        "gap": gap,
        "period": period,
        "period_bound": period_bound.value,
        "period_binds": period_bound.cause,
        "period_gap": period_gap,
        "busy": busy,
        "counts": timing.name,
        "by_memory": [point.to_json() for point in points],
        "limitation": limitation.to_json(),
        "remedies": None if remedies is None else remedies.to_json(),
        "unit": unit,
    }
    times = f"in {unit}" if unit else "in the unit of the case"
    idle, of_makespan = (0.0 if time - busy < 1e-9 * busy else time - busy for time in (period, makespan))
    summary = (
        f"{program.name}: makespan {makespan:g}, no plan beats {bound}, gap {100 * gap:.1f} %; all times {times}",
        f"steps in a row: period {period:g}, no plan beats {period_bound}, gap {100 * max(period_gap, 0.0):.1f} %",
        f"the busiest rank computes for {busy:g}: it idles for {idle:g} of the period, {of_makespan:g} of the makespan",
        str(limitation),
        *(() if remedies is None else (str(remedies),)),
        *_by_memory(points, timing.name),
        f"N = {number}, S = {case.stages}; warm-up forwards per stage, x_i:",
        f"  this plan           {' '.join(map(str, x))}",
        f"  the equations alone {' '.join(map(str, asked.x))}",
    )
    lines = (*edge_lines(cost, number, x, asked), *bound_lines(cost, number, asked.limit))
    notation = f", times {times}; i numbers stages, and edge i joins stages i and i+1"
    return Explanation(simulation, figures, summary, lines, notation)


def _by_memory(points: Sequence[MemoryPoint], counts: str) -> Iterator[str]:
    """Yield the table of times by memory, if the plan is not alone in it."""
    if len(points) > 1:
        over = "; + is more than the limit" if any(point.is_over for point in points) else ""
        yield f"{counts} for the most memory that a rank holds; * is this plan{over}:"
        marked = [f"{point.held:.4g}{'*' * point.is_own}{'+' * point.is_over}" for point in points]
        columns = [(held, f"{point.time:.4g}") for held, point in zip(marked, points, strict=True)]
        widths = [max(map(len, column)) for column in columns]
        for name, row in zip(("memory", counts), zip(*columns, strict=True), strict=True):
            yield f"  {name:<9}" + "".join(f" {text:>{width}}" for text, width in zip(row, widths, strict=True))


def _gap(time: float, bound: Bound) -> float:
    """Return the excess of a time over its bound, as a fraction of the bound. Zero for a step that takes no time."""
    return time / bound.value - 1.0 if bound.value > 0 else 0.0


def _of_job(program: Program, case: Case) -> Explanation:
    simulation = simulate(program, case)
    period = healthy = simulation.period
    if not case.is_healthy:
        whole = case.healthy
        healthy = simulate(plan_job(whole), whole).period
    bound = period_bound(case, program.routing)
    numbers, gap = JobNumbers(simulation, program.routing), _gap(period, bound)
    scaled = Line.of(replica_equations().fault_scaled, "all stages", healthy, *numbers.left)
    lines = (*numbers.of_stages(), *numbers.of_workers(), *numbers.of_messages(), *numbers.of_recut())
    remarks = tuple(remarks_of(numbers, bound))
    figures = {
        "program": program.name,
        "case": case.name,
        "period": period,
        **bound.to_json(),
        "gap": gap,
        "healthy_period": healthy,
        "fault_scaled_period": float(scaled.result),
        "remarks": list(remarks),
    }
    first = (
        f"{program.name} on {case.name}: period {period:.10g}, no order on its routes beats {bound}, gap {100 * gap:.1f} %; "
        "all times in the unit of the case"
    )
    if case.is_healthy:
        summary = (first, *remarks)
    else:
        lines = (*lines, scaled)
        even = f"if what is left shared all work of that evenly, it would take {scaled.result:.10g}"
        summary = (first, f"the healthy job takes {healthy:.10g}; {even}", *remarks)
    return Explanation(simulation, figures, summary, lines, "; i numbers stages, k workers, l and r links or ports")
