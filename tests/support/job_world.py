"""A job of two replicas of three stages whose steps are only measured, for tests of its detector and its controller."""

from __future__ import annotations

import random
from collections.abc import Mapping

from policy_world import PolicyWorld

from adaptra.program import Program
from adaptra.program.routing import Routing
from adaptra.program.schedules import one_f_one_b
from adaptra.runtime.control.deciding.replanning import Planning
from adaptra.runtime.control.plans.plan import Plan
from adaptra.runtime.measuring.measurement import EdgeEstimate, EdgeMeasurement, StageMeasurement, StepMeasurement
from adaptra.simulation.case import Case
from adaptra.simulation.cost import CostModel
from adaptra.simulation.simulate import lower_bound, simulate

REPLICAS, STAGES, MICROBATCHES = 2, 3, 4
COST = CostModel.uniform(STAGES, 0.04, 0.04, 0.04, latency=2e-4)
SECONDS = 0.6
"""Of a step."""
CASE = Case(COST, MICROBATCHES, tuple(range(STAGES)))


def plan_zero() -> Plan:
    """The plan that training begins with."""
    program = one_f_one_b(STAGES, MICROBATCHES)
    return Plan(0, program, CASE, simulate(program, COST).makespan, lower_bound(CASE).value, "initial")


def job_world() -> PolicyWorld:
    """A policy of the job, whose drafts and plans are there before the next step."""

    def never(_case: Case, _program: Program) -> Program:
        raise AssertionError("a job is planned as a whole")

    return PolicyWorld(plan_zero(), REPLICAS * STAGES, Planning(never, replicas=REPLICAS))


def measured(
    step: int,
    costs: Mapping[int, CostModel] | None = None,
    noise: random.Random | None = None,
    routing: Routing | None = None,
    *,
    has_rates: bool = False,
) -> list[StepMeasurement]:
    """What all workers measure in a step under each replica's costs, which scatter by two hundredths with ``noise``.

    Over links that no route takes there are only probes, whose flights have no occupancy; ``has_rates`` says whether there are
    rate probes.
    """

    def scattered(value: float) -> float:
        return value if noise is None else value * noise.gauss(1.0, 0.02)

    found: list[StepMeasurement] = []
    for replica in range(REPLICAS):
        cost = (costs or {}).get(replica, COST)
        for stage in range(STAGES):
            f, i, w = (scattered(one[stage]) for one in (cost.forward, cost.input_grad, cost.weight_grad))
            worker = replica * STAGES + stage
            edges: list[EdgeMeasurement] = []
            for near in (stage - 1, stage + 1):
                if 0 <= near < STAGES:
                    latency, occupancy = scattered(cost.latency(near, stage)), cost.occupancy(near, stage)
                    estimate = EdgeEstimate(latency + occupancy, occupancy or None, occupancy or 0.01)
                    messages = MICROBATCHES
                    ends = {worker, replica * STAGES + near}
                    if (
                        routing is not None
                        and len(routing.workers) > 1
                        and not any(ends <= set(route.workers) for route in routing.routes)
                    ):
                        messages = 0
                        estimate = EdgeEstimate(latency + occupancy, occupancy, None)
                        estimate = estimate if has_rates else EdgeEstimate(latency, None, None)
                    edges.append(EdgeMeasurement(near, stage, messages, 0.0, estimate))
            stages = (StageMeasurement(stage, f, i, w, None),)
            found.append(StepMeasurement(worker, step, scattered(SECONDS), stages, tuple(edges)))
    return found


def slow(stage: int, factor: float) -> CostModel:
    """The costs of a replica whose worker of a stage is slow."""
    return COST.with_stage(stage, *(factor * one[stage] for one in (COST.forward, COST.input_grad, COST.weight_grad)))
