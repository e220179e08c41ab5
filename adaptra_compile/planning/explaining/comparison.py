"""Comparison of several plans for one planning problem, and the times of schedules as the delay of an edge grows.

The time that counts is the period of steps in a row, or the makespan where one pipeline has a barrier between them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from adaptra.errors import PlanError
from adaptra.passes.adapt_order import ADAPTED
from adaptra.planning.published import PAPER, paper_rule
from adaptra.planning.routes.job_planner import plan_job
from adaptra.planning.routes.period_bound import period_bound
from adaptra.planning.routes.route import share_evenly
from adaptra.planning.routes.steady_steps import timing_of
from adaptra.program import Program
from adaptra.program.schedules import GENERATORS, PLACED, generate_for
from adaptra.simulation.bound import Bound
from adaptra.simulation.case import Case
from adaptra.simulation.cost import CostModel
from adaptra.simulation.simulate import Simulation, simulate

KEPT: Final = "kept"
"""In a sweep: the plan for the smallest delay, kept while the delay grows."""

COMPARED: Final = (*GENERATORS, *PLACED, PAPER, ADAPTED)
"""Schedule names that :func:`compare` accepts for one pipeline."""

HEALTHY: Final = "healthy"
"""The plan of several replicas if no worker were lost or slow. It says nothing about the bound of the case."""

SHARED: Final = (HEALTHY, "kept", "blocks", "turns", ADAPTED)
"""Names that :func:`compare` accepts for several replicas, by how these share microbatches.

With ``kept``, slow workers keep all their microbatches, and only those of lost ones are shared. With ``blocks``, workers give
microbatches of the middle of the step, in contiguous blocks. With ``turns`` they give them in turns, as ReCycle does.
"""

SWEPT: Final = (*COMPARED, KEPT)
"""Schedule names that :func:`sweep_delay` accepts."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Plans for one problem, in the order asked for.

    Attributes:
        case: The planning problem.
        bound: The bound of the time that counts.
        runs: One simulation per plan, whose program has the plan's name. A fixed schedule ignores memory limits and may exceed
            them.
    """

    case: Case
    bound: Bound
    runs: tuple[Simulation, ...]

    @property
    def counts_periods(self) -> bool:
        """Whether the period counts. That of several replicas has their barrier in it."""
        return not (self.case.barrier and self.case.is_one_pipeline)

    def of_bound(self, run: Simulation) -> float | None:
        """Return a run's time that counts as a multiple of its bound; None for a bound without end and for other workers."""
        time = run.period if self.counts_periods else run.makespan
        bounded = run.program.name != HEALTHY and 0 < self.bound.value < math.inf
        return time / self.bound.value if bounded else None


@dataclass(frozen=True, slots=True)
class Sweep:
    """Times of schedules at growing delays of some edges. Each tuple has one value per delay.

    Attributes:
        case: The planning problem without added delay.
        edges: The directed edges that are delayed.
        delays: Delays added to the latency of these edges, ascending.
        bounds: The bound of the time that counts at each delay.
        times: Per schedule, its time at each delay.
        over_memory: Per schedule, whether it exceeds a memory limit at each delay.
    """

    case: Case
    edges: tuple[tuple[int, int], ...]
    delays: tuple[float, ...]
    bounds: tuple[float, ...]
    times: Mapping[str, tuple[float, ...]]
    over_memory: Mapping[str, tuple[bool, ...]]

    def to_json(self) -> dict[str, Any]:
        """Return the sweep as JSON values, without the case's costs."""
        return {
            "case": self.case.name,
            "edges": [list(edge) for edge in self.edges],
            "delays": list(self.delays),
            "bounds": list(self.bounds),
            f"{timing_of(barrier=self.case.barrier).name}s": {name: list(found) for name, found in self.times.items()},
            "over_memory": {name: list(found) for name, found in self.over_memory.items()},
        }


def compare(
    case: Case,
    names: Iterable[str],
    adapted: Program,
    *,
    in_flight: int | Sequence[int] | None = None,
    budget: float | None = None,
) -> Comparison:
    """Simulate plans by name: schedules of one pipeline, or ways to share the microbatches of several replicas.

    Args:
        case: The problem.
        names: Some of :data:`COMPARED` for one pipeline, of :data:`SHARED` for several replicas.
        adapted: The plan to show as ``adapted``. With several replicas the bound is that of its routes.
        in_flight: The most microbatches in flight per stage. Only ``paper`` observes it.
        budget: Seconds to search each plan of several replicas.

    Raises:
        PlanError: A name is unknown, or no plan fits.
        ScheduleError: The schedule has another placement than the case.
    """
    if case.is_one_pipeline:
        schedules = check_names(names, COMPARED)
        programs = (adapted if name == ADAPTED else _program(case, name, in_flight) for name in schedules)
        return Comparison(
            case, timing_of(barrier=case.barrier).binds(case), tuple(simulate(program, case.cost) for program in programs)
        )
    shared = check_names(names, SHARED)
    found = (simulate(adapted, case) if name == ADAPTED else _shared(case, name, budget) for name in shared)
    return Comparison(case, period_bound(case, adapted.routing), tuple(found))


def _shared(case: Case, name: str, budget: float | None) -> Simulation:
    """Return the plan of several replicas that share as the name says."""
    here = case.healthy if name == HEALTHY else case
    equal = replace(case, slow={}, ports={}) if name == "kept" else here
    routing = () if name == HEALTHY else share_evenly(equal, in_turns=name == "turns")
    return simulate(replace(plan_job(here, budget=budget, routing=routing), name=name), here)


def sweep_delay(
    case: Case,
    edges: Iterable[tuple[int, int]],
    delays: Iterable[float],
    names: Iterable[str] = ("1f1b", "zb_h1", "zb_h2", PAPER, KEPT, ADAPTED),
    *,
    in_flight: int | Sequence[int] | None = None,
    budget: float | None = None,
) -> Sweep:
    """Simulate schedules while a delay is added to the latency of some directed edges.

    ``paper`` and ``adapted`` are planned again for every delay. ``kept`` is the plan for the smallest delay. All others do not
    depend on delays.

    Args:
        case: The planning problem without added delay.
        edges: The directed edges to delay, all by the same amount.
        delays: The delays to add, in the case's unit of time.
        names: Some of :data:`SWEPT`.
        in_flight: As for :func:`compare`.
        budget: As for :func:`adaptra.planning.planner.plan`, for each of the plans.

    Raises:
        PlanError, ScheduleError: As :func:`compare`, or no delays.
        CaseError: An edge does not exist, or a delay is negative or not finite.
    """
    timing = timing_of(barrier=case.barrier)
    names, edges, delays = check_names(names, SWEPT), tuple(edges), tuple(sorted(delays))
    if not delays:
        raise PlanError("no delays: expected at least one")
    slowed = [replace(case, cost=_slower(case.cost, edges, delay)) for delay in delays]
    kept = timing.plan(slowed[0], in_flight=in_flight, budget=budget) if KEPT in names else None
    simulations: dict[str, list[Simulation]] = {name: [] for name in names}
    for slow in slowed:
        for name, runs in simulations.items():
            program = kept if name == KEPT and kept is not None else _program(slow, name, in_flight, budget)
            runs.append(simulate(program, slow.cost))
    return Sweep(
        case,
        edges,
        delays,
        tuple(timing.bound(slow) for slow in slowed),
        {name: tuple(timing.of(run.program, run.cost) for run in runs) for name, runs in simulations.items()},
        {name: tuple(bool(run.over_memory) for run in runs) for name, runs in simulations.items()},
    )


def check_names(names: Iterable[str], known: Sequence[str]) -> tuple[str, ...]:
    """Return the names without duplicates.

    Raises:
        PlanError: A name is unknown, or there are no names.
    """
    names = tuple(dict.fromkeys(names))
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        given = f"schedule {unknown[0]!r}" if unknown else "no schedule to compare"
        raise PlanError(f"{given}: expected some of {', '.join(known)}")
    return names


def _program(case: Case, name: str, in_flight: int | Sequence[int] | None, budget: float | None = None) -> Program:
    if name == ADAPTED:
        return timing_of(barrier=case.barrier).plan(case, in_flight=in_flight, budget=budget)
    if name == PAPER:
        return paper_rule(case, in_flight=in_flight)
    return generate_for(name, case.placement, case.microbatches)


def _slower(cost: CostModel, edges: Iterable[tuple[int, int]], delay: float) -> CostModel:
    for source, destination in edges:
        cost = cost.with_latency(source, destination, cost.latency(source, destination) + delay)
    return cost
