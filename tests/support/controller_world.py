"""The world of a controller in tests: four ranks, a healthy and a slow pipeline, a planner for both, and what ranks measure."""

from __future__ import annotations

from adaptra.program import Program
from adaptra.program.schedules import gpipe, zb_h1
from adaptra.runtime.control.deciding.replanning import step_bound, step_seconds
from adaptra.runtime.control.plans.plan import Plan
from adaptra.runtime.measuring.measurement import EdgeEstimate, EdgeMeasurement, StageMeasurement, StepMeasurement
from adaptra.simulation.case import Case
from adaptra.simulation.cost import CostModel

RANKS, MICROBATCHES = 4, 8
HEALTHY = CostModel.uniform(RANKS, 0.02, 0.02, 0.01, latency=2e-4)
SLOW = HEALTHY.with_latency(1, 2, 0.06).with_latency(2, 1, 0.06)
CASE = Case(HEALTHY, MICROBATCHES, tuple(range(RANKS)))
HEALTHY_PROGRAM, SLOW_PROGRAM = zb_h1(RANKS, MICROBATCHES), gpipe(RANKS, MICROBATCHES)


def predict(program: Program, cost: CostModel) -> float:
    """Seconds of a step, one of many in a row."""
    return step_seconds(program, cost, barrier=False)


def best(case: Case, incumbent: Program) -> Program:
    """The better of two schedules: zb_h1 for healthy links, gpipe for slow ones."""
    return min((incumbent, HEALTHY_PROGRAM, SLOW_PROGRAM), key=lambda program: predict(program, case.cost))


def bound(case: Case) -> float:
    """Seconds below which no program takes."""
    return step_bound(case)


def plan_zero(program: Program = HEALTHY_PROGRAM) -> Plan:
    """What training begins with."""
    return Plan(0, program, CASE, predict(program, HEALTHY), bound(CASE), "initial")


def measurement(rank: int, step: int, cost: CostModel) -> StepMeasurement:
    """What a rank with one stage measures under these costs."""
    stage = StageMeasurement(rank, cost.forward[rank], cost.input_grad[rank], cost.weight_grad[rank], None)
    edges: list[EdgeMeasurement] = []
    if rank > 0:
        flight = EdgeEstimate(cost.latency_forward[rank - 1], None, 0.01)
        edges.append(EdgeMeasurement(rank - 1, rank, MICROBATCHES, 0.0, flight))
    if rank < RANKS - 1:
        flight = EdgeEstimate(cost.latency_backward[rank], None, 0.01)
        edges.append(EdgeMeasurement(rank + 1, rank, MICROBATCHES, 0.0, flight))
    return StepMeasurement(rank, step, 0.5, (stage,), tuple(edges))
