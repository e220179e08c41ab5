"""Robust plans for uncertain delays: the best mean or the best worst case over several scenarios.

A scenario is a cost model with a weight. The candidates are the plans for each scenario and for blends between the mildest and
the harshest one. Known schedules and the paper's uniform slack compete too. Each candidate is simulated under every scenario,
and the best is chosen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import Final

from adaptra.equations.warm_up import in_flight_limits
from adaptra.errors import PlanError
from adaptra.planning.published import paper_rule, uniform_slack
from adaptra.planning.timing import MAKESPAN, StepTiming
from adaptra.program import Program
from adaptra.program.placement import has_several
from adaptra.program.schedules import GENERATORS, generate
from adaptra.simulation.case import Case
from adaptra.simulation.cost import CostModel
from adaptra.simulation.scenarios import Scenario
from adaptra.simulation.simulate import simulate

_MOST_PLANNED: Final = 16
_BLENDS: Final = (0.25, 0.5, 0.75, 1.0)


class Objective(Enum):
    """The quantity that a robust plan minimizes."""

    EXPECTED = "expected"
    """The weighted mean time over the scenarios."""
    WORST = "worst"
    """The longest time of any scenario; of plans equal in that, the mean."""


@dataclass(frozen=True, slots=True)
class RobustPlan:
    """A plan and its time under every scenario. Times are in the scenarios' unit.

    Attributes:
        program: The plan.
        times: The plan's simulated time per scenario: the makespan, or the period.
        bounds: The bound per scenario, each for a plan made for that scenario alone.
        expected: The weighted mean of these times.
        worst: The longest of them.
        candidates: The number of different plans compared.
    """

    program: Program
    times: tuple[float, ...]
    bounds: tuple[float, ...]
    expected: float
    worst: float
    candidates: int


def robust_plan(
    case: Case,
    scenarios: Sequence[Scenario],
    *,
    objective: Objective = Objective.EXPECTED,
    in_flight: int | Sequence[int] | None = None,
    incumbent: Program | None = None,
    effort: int | None = None,
    budget: float | None = None,
    timing: StepTiming = MAKESPAN,
) -> RobustPlan:
    """Find the best plan over scenarios.

    By the objective it is never worse than the incumbent or the plan for any of the likeliest 16 scenarios.

    Args:
        case: Microbatches, placement and memory limits. Its own costs give one more candidate, but are no scenario unless
            listed as one.
        scenarios: The possible cost models with their weights.
        objective: Expected or worst time.
        in_flight: As for :func:`adaptra.planning.planner.plan`.
        incumbent: The program that runs now. It is a candidate if it is within the limits.
        effort, budget: As for :func:`adaptra.planning.planner.plan`, for each of about twenty plans at most.
        timing: The time that counts: the makespan, or :data:`adaptra.planning.routes.steady_steps.PERIOD`.

    Raises:
        PlanError: There is no scenario, a weight is not a positive number, or a scenario has other stages than the case. Also
            as :func:`adaptra.planning.planner.plan`.
    """
    _check(case, scenarios)
    limits = in_flight_limits(in_flight, case.cost.stages, case.microbatches)
    sizes = {name: getattr(case.cost, name) for name in ("memory_forward", "memory_input_grad", "memory_limit")}
    costs = [replace(scenario.cost, **sizes) for scenario in scenarios]
    weights = [scenario.weight for scenario in scenarios]
    best: tuple[tuple[float, float], Program, tuple[float, ...]] | None = None
    search = partial(timing.plan, in_flight=in_flight, incumbent=incumbent, effort=effort, budget=budget)
    programs = dict.fromkeys(_candidates(case, costs, weights, search, in_flight, incumbent))
    for program in programs:
        runs = [simulate(program, cost) for cost in costs]
        if any(run.over_memory for run in runs) or any(map(int.__gt__, runs[0].peak_in_flight, limits)):
            continue
        times = tuple(timing.of(program, cost) for cost in costs)
        expected, worst = _expected(times, weights), max(times)
        score = (expected, worst) if objective is Objective.EXPECTED else (worst, expected)
        if best is None or score < best[0]:
            best = score, program, times
    assert best is not None, "the plans for the scenarios are within the limits"
    _, program, times = best
    bounds = tuple(timing.bound(replace(case, cost=cost)) for cost in costs)
    return RobustPlan(program, times, bounds, _expected(times, weights), max(times), len(programs))


def _check(case: Case, scenarios: Sequence[Scenario]) -> None:
    if not scenarios:
        raise PlanError(f"{case.name}: no scenarios: expected at least one")
    for index, scenario in enumerate(scenarios):
        if not (math.isfinite(scenario.weight) and scenario.weight > 0):
            raise PlanError(f"{case.name}: scenario {index} has weight {scenario.weight}: expected a positive number")
        if scenario.cost.stages != case.cost.stages:
            raise PlanError(f"{case.name}: scenario {index} has {scenario.cost.stages} stages: expected {case.cost.stages}")


def _candidates(
    case: Case,
    costs: Sequence[CostModel],
    weights: Sequence[float],
    search: Callable[[Case], Program],
    in_flight: int | Sequence[int] | None,
    incumbent: Program | None,
) -> Iterator[Program]:
    likeliest = sorted(range(len(costs)), key=lambda index: -weights[index])[:_MOST_PLANNED]
    mildest, harshest = _extreme(costs, min), _extreme(costs, max)
    planned_for = [*(costs[index] for index in likeliest), *(_blend(mildest, harshest, share) for share in _BLENDS), case.cost]
    for cost in dict.fromkeys(planned_for):
        yield search(replace(case, cost=cost))
    if incumbent is not None:
        yield incumbent
    if not has_several(case.placement):
        yield uniform_slack(case, in_flight=in_flight)
        yield paper_rule(replace(case, cost=harshest), in_flight=in_flight)
    if case.placement == tuple(range(case.cost.stages)):
        for name in GENERATORS:
            yield generate(name, case.cost.stages, case.microbatches)


def _expected(times: Sequence[float], weights: Sequence[float]) -> float:
    """Return the weighted mean. ``fsum`` makes it independent of the order of the scenarios."""
    weighted = (time * weight for time, weight in zip(times, weights, strict=True))
    return math.fsum(weighted) / math.fsum(weights)


_TIMES: Final = (
    "forward", "input_grad", "weight_grad", "latency_forward", "latency_backward", "occupancy_forward", "occupancy_backward",
)  # fmt: skip


def _extreme(costs: Sequence[CostModel], choose: Callable[[Iterable[float]], float]) -> CostModel:
    """Return a cost model in which every time is the longest or the shortest of any scenario."""
    times = {name: tuple(map(choose, zip(*(getattr(cost, name) for cost in costs), strict=True))) for name in _TIMES}
    return replace(costs[0], **times)


def _blend(mildest: CostModel, harshest: CostModel, share: float) -> CostModel:
    """Return the cost model between the mildest (share 0) and the harshest (share 1)."""
    times = {
        name: tuple(
            low + share * (high - low) for low, high in zip(getattr(mildest, name), getattr(harshest, name), strict=True)
        )
        for name in _TIMES
    }
    return replace(mildest, **times)
