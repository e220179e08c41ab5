"""Explanation of a plan: its period and makespan, what limits it, and the bubble equations with its numbers filled in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from adaptra.equations.bubble import SYMBOLS, equations
from adaptra.equations.equation import Equation, legend
from adaptra.equations.warm_up import WarmUp, edge_times, warm_up
from adaptra.errors import PlanError
from adaptra.planning.explaining.memory_table import MemoryPoint, time_by_memory
from adaptra.planning.limitation import Limitation, what_limits
from adaptra.planning.remedies.bandwidth_remedies import BandwidthOptions, Edge, Remedies, find_remedies
from adaptra.planning.routes.steady_steps import PERIOD
from adaptra.planning.timing import MAKESPAN, StepTiming
from adaptra.program import Kind, Program
from adaptra.simulation.bound import Bound
from adaptra.simulation.case import Case
from adaptra.simulation.cost import MEMORY_TOLERANCE, CostModel
from adaptra.simulation.simulate import lower_bound, simulate


@dataclass(frozen=True, slots=True)
class Line:
    """One equation at one stage or edge.

    Attributes:
        equation: The equation.
        where: The stage or edge.
        values: Its text with numbers instead of symbols.
        result: Its value, or for a relation whether it is satisfied.
    """

    equation: Equation
    where: str
    values: str
    result: float | bool

    @staticmethod
    def of(equation: Equation, where: str, *values: float) -> Line:
        """Return the line of an equation with values instead of its arguments."""
        result = equation.evaluate(*values)
        return Line(equation, where, equation.with_values(*values), bool(result) if equation.is_relation else float(result))

    def __str__(self) -> str:
        if isinstance(self.result, bool):
            return f"{self.where}: {self.values}  {'holds' if self.result else 'DOES NOT HOLD'}"
        return f"{self.where}: {self.values} = {self.result:g}"

    def to_json(self) -> dict[str, Any]:
        """Return the line as JSON values."""
        return {
            "title": self.equation.title,
            "source": self.equation.source,
            "equation": self.equation.text,
            "where": self.where,
            "values": self.values,
            "result": self.result,
        }


def texts_of(lines: Iterable[Line]) -> Iterator[str]:
    """Yield the lines as text, under a heading for each equation."""
    for equation, group in groupby(lines, key=lambda line: line.equation):
        yield f"\n{equation.title} ({equation.source}):\n  {equation.text}"
        yield from (f"    {line}" for line in group)


@dataclass(frozen=True)
class Explanation:
    """A plan with its equations.

    Attributes:
        name: The program's name.
        microbatches: N.
        x: Per stage, the forwards before its first backward in this program.
        asked: The warm-up forwards that the equations require.
        makespan: The simulated makespan.
        bound: The makespan bound and its cause.
        period: The period of steps in a row.
        period_bound: The period bound and its cause.
        busy: The time for which the busiest rank computes in a step; the rest of either time it idles.
        counts: The name of the time that counts: the period, or behind a barrier the makespan.
        by_memory: What less and more memory would bring, the least first; see
            :func:`adaptra.planning.explaining.memory_table.time_by_memory`.
        lines: Every equation at every stage or edge where it applies, sorted by equation.
        limitation: The limit of the time that counts, and the changes that would help.
        remedies: The remedies for edges whose bandwidth limits the plan, or None if there is no such edge.
        unit: Unit of all times, such as ``seconds``; empty for the case's own.
    """

    name: str
    microbatches: int
    x: tuple[int, ...]
    asked: WarmUp
    makespan: float
    bound: Bound
    period: float
    period_bound: Bound
    busy: float
    counts: str
    by_memory: tuple[MemoryPoint, ...]
    lines: tuple[Line, ...]
    limitation: Limitation
    remedies: Remedies | None
    unit: str = ""

    @property
    def slack(self) -> tuple[int, ...]:
        """The plan's slackness x_i - x_{i+1} of each edge."""
        return tuple(x - following for x, following in zip(self.x, self.x[1:], strict=False))

    @property
    def gap(self) -> float:
        """Excess of the makespan over the bound, as a fraction of the bound. Zero for a step that takes no time."""
        return self.makespan / self.bound.value - 1.0 if self.bound.value > 0 else 0.0

    @property
    def period_gap(self) -> float:
        """Excess of the period over its bound, as a fraction of the bound. Zero for a step that takes no time."""
        return self.period / self.period_bound.value - 1.0 if self.period_bound.value > 0 else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the explanation as JSON values."""
        return {
            "program": self.name,
            "microbatches": self.microbatches,
            "stages": len(self.x),
            "x": list(self.x),
            "slack": list(self.slack),
            "asked_x": list(self.asked.x),
            "asked_slack": list(self.asked.slack),
            "makespan": self.makespan,
            "bound": self.bound.value,
            "binds": f"{self.bound.kind.value}, {self.bound.where}",
            "gap": self.gap,
            "period": self.period,
            "period_bound": self.period_bound.value,
            "period_binds": self.period_bound.cause,
            "period_gap": self.period_gap,
            "busy": self.busy,
            "counts": self.counts,
            "by_memory": [point.to_json() for point in self.by_memory],
            "limitation": self.limitation.to_json(),
            "remedies": None if self.remedies is None else self.remedies.to_json(),
            "unit": self.unit,
            "symbols": legend((line.equation for line in self.lines), SYMBOLS),
            "equations": [line.to_json() for line in self.lines],
        }

    def __str__(self) -> str:
        return self.text(equations=True)

    def text(self, *, equations: bool) -> str:
        """Return the plan, what limits it and what would help, and on request the equations with their numbers."""
        return "\n".join((*self._summary(), *(self._equations() if equations else ()))) + "\n"

    @property
    def _unit(self) -> str:
        return f"in {self.unit}" if self.unit else "in the unit of the case"

    def _summary(self) -> Iterator[str]:
        gap = f"gap {100 * self.gap:.1f} %"
        yield f"{self.name}: makespan {self.makespan:g}, no plan beats {self.bound}, {gap}; all times {self._unit}"
        gap = f"gap {100 * max(self.period_gap, 0.0):.1f} %"
        yield f"steps in a row: period {self.period:g}, no plan beats {self.period_bound}, {gap}"
        of_period, of_makespan = (
            0.0 if time - self.busy < 1e-9 * self.busy else time - self.busy for time in (self.period, self.makespan)
        )
        idle = f"{of_period:g} of the period, {of_makespan:g} of the makespan"
        yield f"the busiest rank computes for {self.busy:g}: it idles for {idle}"
        yield str(self.limitation)
        if self.remedies is not None:
            yield str(self.remedies)
        if len(self.by_memory) > 1:
            over = "; + is more than the limit" if any(point.is_over for point in self.by_memory) else ""
            yield f"{self.counts} for the most memory that a rank holds; * is this plan{over}:"
            marked = [f"{point.held:.4g}{'*' * point.is_own}{'+' * point.is_over}" for point in self.by_memory]
            columns = [(held, f"{point.time:.4g}") for held, point in zip(marked, self.by_memory, strict=True)]
            widths = [max(map(len, column)) for column in columns]
            for name, row in zip(("memory", self.counts), zip(*columns, strict=True), strict=True):
                yield f"  {name:<9}" + "".join(f" {text:>{width}}" for text, width in zip(row, widths, strict=True))
        yield f"N = {self.microbatches}, S = {len(self.x)}; warm-up forwards per stage, x_i:"
        yield f"  this plan           {' '.join(map(str, self.x))}"
        yield f"  the equations alone {' '.join(map(str, self.asked.x))}"

    def _equations(self) -> Iterator[str]:
        yield from texts_of(self.lines)
        yield f"\nsymbols, times {self._unit}; i numbers stages, and edge i joins stages i and i+1:"
        meanings = legend((line.equation for line in self.lines), SYMBOLS)
        for symbol, meaning in meanings.items():
            yield f"  {symbol if symbol == 'N' else f'{symbol}_i':<9}{meaning}"


def explain(
    program: Program,
    cost: CostModel,
    microbatches: int | None = None,
    *,
    bandwidth: BandwidthOptions | None = None,
    spread: Sequence[Edge] = (),
    rounded: Sequence[Edge] = (),
    unit: str = "",
    timing: StepTiming = MAKESPAN,
) -> Explanation:
    """Fill the bubble equations with the numbers of a plan.

    If "no cascading bubble" is not satisfied, the delay of one microbatch may reach the next. The plan may still be optimal: W
    may fill the bubble, forwards after the warm-up may widen the slackness, or memory may leave no choice. Its cost is the gap
    between makespan and bound.

    Args:
        program: The plan. Communication ops are ignored.
        cost: The cost model for which it was made.
        microbatches: N, to be checked against the program's number, or None.
        bandwidth, spread, rounded: Remedies for edges whose bandwidth limits the plan, available and in use; see
            :func:`adaptra.planning.remedies.bandwidth_remedies.find_remedies`.
        unit: Unit of the times in ``cost``, such as ``seconds``; empty for the case's own.
        timing: The time that counts for what limits it and what would help: the makespan, or
            :data:`adaptra.planning.routes.steady_steps.PERIOD`.

    Raises:
        PlanError: The program has another number of microbatches, or no backward and therefore no warm-up.
        CaseError: The cost model has another number of stages.
    """
    if microbatches not in (None, program.microbatches):
        raise PlanError(f"{program.name} has {program.microbatches} microbatches: expected {microbatches}")
    if program.is_forward_only:
        raise PlanError(f"{program.name} computes no gradients: there is no warm-up to explain")
    simulation = simulate(program.compute_only() if program.is_lowered else program, cost)
    case = Case(cost, program.microbatches, program.placement, program.name)
    x = _warm_up_of(program)
    asked = warm_up(cost, program.microbatches, _limits(program, cost))
    return Explanation(
        program.name,
        program.microbatches,
        x,
        asked,
        simulation.makespan,
        lower_bound(case),
        PERIOD.of(simulation.program, cost),
        PERIOD.binds(case),
        max(simulation.busy),
        timing.name,
        time_by_memory(case, simulation.program, timing),
        (*_edge_lines(cost, program.microbatches, x, asked), *_bound_lines(cost, program.microbatches, asked.limit)),
        what_limits(simulation, timing),
        find_remedies(case, simulation.program, spread, rounded, bandwidth=bandwidth or BandwidthOptions(), timing=timing),
        unit,
    )


def _warm_up_of(program: Program) -> tuple[int, ...]:
    """Return the forwards before the first I or B of each stage."""
    counts = [0] * program.stages
    turned = [False] * program.stages
    for order in program.orders:
        for op in order:
            if op.kind is Kind.F and not turned[op.stage]:
                counts[op.stage] += 1
            elif op.kind in (Kind.I, Kind.B):
                turned[op.stage] = True
    return tuple(counts)


def _limits(program: Program, cost: CostModel) -> tuple[int, ...] | None:
    """Return A_i: the number of microbatches that fit the memory of each stage's rank, if the rank had no other stage."""
    if cost.memory_limit is None:
        return None
    limits: list[int] = []
    for stage, rank in enumerate(program.placement):
        held = cost.memory_forward[stage]
        fitting = int((cost.memory_limit[rank] + MEMORY_TOLERANCE) / held) if held > 0 else program.microbatches
        limits.append(max(1, min(fitting, program.microbatches)))
    return tuple(limits)


def _edge_lines(cost: CostModel, microbatches: int, x: Sequence[int], asked: WarmUp) -> Iterator[Line]:
    model = equations()
    edges = range(cost.stages - 1)
    busy = [edge for edge in edges if cost.forward[edge + 1] + cost.input_grad[edge + 1] > 0]

    def name(edge: int) -> str:
        return f"edge {edge}-{edge + 1}"

    for edge in edges:
        yield Line.of(model.slackness, name(edge), x[edge] - x[edge + 1], x[edge], x[edge + 1])
    for edge in busy:
        yield Line.of(model.needed_slack, name(edge), *edge_times(cost, edge))
    for edge in busy:
        yield Line.of(model.warm_up_slack, name(edge), *edge_times(cost, edge), microbatches)
    for edge in busy:
        yield Line.of(model.no_cascade, name(edge), *edge_times(cost, edge), x[edge] - x[edge + 1])
    for edge in busy:
        yield Line.of(model.steady_slack, name(edge), *edge_times(cost, edge), cost.weight_grad[edge + 1])
    for stage in range(cost.stages):
        yield Line.of(model.budget, f"stage {stage}", x[stage], asked.limit[stage], microbatches)


def _bound_lines(cost: CostModel, microbatches: int, limits: Sequence[int]) -> Iterator[Line]:
    """Yield each bound at the stage or edge where it is greatest."""
    model = equations()
    head, down, tail = _heads_and_tails(cost)
    forward, input_grad, weight_grad = cost.forward, cost.input_grad, cost.weight_grad
    stages = range(cost.stages)

    def stage_values(stage: int) -> tuple[float, ...]:
        return head[stage], forward[stage], down[stage], input_grad[stage], tail[stage], microbatches

    def first(edge: int) -> tuple[float, ...]:
        return head[edge], forward[edge]

    def second(edge: int) -> tuple[float, ...]:
        return forward[edge + 1], down[edge + 1], input_grad[edge + 1]

    candidates: list[list[Line]] = [
        [
            Line.of(model.bound_load, f"stage {s}", head[s], forward[s], input_grad[s], weight_grad[s], microbatches)
            for s in stages
        ],
        [Line.of(model.bound_drain, f"stage {s}", head[s], forward[s], input_grad[s], tail[s], microbatches) for s in stages],
        [Line.of(model.bound_chain, f"stage {s}", *stage_values(s)) for s in stages],
        [Line.of(model.bound_memory, f"stage {s}", *stage_values(s), limits[s]) for s in stages],
        [
            Line.of(
                model.bound_link_forward,
                f"edge {edge}-{edge + 1}",
                *(*first(edge), cost.occupancy_forward[edge], cost.latency_forward[edge] + cost.occupancy_forward[edge]),
                *(*second(edge), tail[edge + 1], microbatches),
            )
            for edge in stages[:-1]
            if cost.occupancy_forward[edge] > 0
        ],
        [
            Line.of(
                model.bound_link_backward,
                f"edge {edge}-{edge + 1}",
                *(*first(edge), cost.latency_forward[edge] + cost.occupancy_forward[edge], *second(edge)),
                *(cost.occupancy_backward[edge], cost.latency_backward[edge] + cost.occupancy_backward[edge]),
                *(input_grad[edge], tail[edge], microbatches),
            )
            for edge in stages[:-1]
            if cost.occupancy_backward[edge] > 0
        ],
    ]
    for lines in candidates:
        if lines:
            yield max(lines, key=lambda line: line.result)


def _heads_and_tails(cost: CostModel) -> tuple[list[float], list[float], list[float]]:
    """Return h_i, d_i and r_i of all stages."""
    stages = cost.stages
    there = [latency + taken for latency, taken in zip(cost.latency_forward, cost.occupancy_forward, strict=True)]
    back = [latency + taken for latency, taken in zip(cost.latency_backward, cost.occupancy_backward, strict=True)]
    head, down, tail = [0.0] * stages, [0.0] * stages, list(cost.weight_grad)
    for stage in range(1, stages):
        head[stage] = head[stage - 1] + cost.forward[stage - 1] + there[stage - 1]
        tail[stage] = max(tail[stage], back[stage - 1] + cost.input_grad[stage - 1] + tail[stage - 1])
    for stage in reversed(range(stages - 1)):
        down[stage] = there[stage] + cost.forward[stage + 1] + down[stage + 1] + cost.input_grad[stage + 1] + back[stage]
    return head, down, tail
