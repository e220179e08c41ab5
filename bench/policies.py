"""Thousands of coordinators' policies stepped in one process: seconds per step and policy, and memory per policy.

Each policy has a pipeline of its own, of which only the measurements exist. Healthy steps scatter, so that no two pipelines are
alike. Then one edge of every pipeline turns slow. The baseline is the detector alone, which sees the same measurements. A step
with a suspicion also asks what would follow if the next step measured the same. Planning for the slow edge is not done here.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from _table import Row, parser, print_rows

from adaptra.program.schedules import one_f_one_b
from adaptra.runtime.control.deciding.policy import BeginPlanning, ControllerOptions, PlanningOutcome, Policy
from adaptra.runtime.control.deciding.replanning import Planning
from adaptra.runtime.control.plans.events import EventKind
from adaptra.runtime.control.plans.plan import Plan
from adaptra.runtime.control.plans.plan_log import Agreement
from adaptra.runtime.detection.detector import Detector
from adaptra.runtime.measuring.measurement import EdgeEstimate, EdgeMeasurement, StageMeasurement, StepMeasurement
from adaptra.simulation.case import Case
from adaptra.simulation.cost import CostModel
from adaptra.simulation.simulate import lower_bound, simulate

CALIBRATING = 4
"""Steps until the levels are known."""

SLOW_EDGE = 0.06
"""Seconds that are added to the first edge of every pipeline."""


def measurements(rng: random.Random, cost: CostModel, step: int, added: float) -> list[StepMeasurement]:
    """What all ranks measure, a hundredth more or less."""

    def scattered(value: float) -> float:
        return value * rng.uniform(0.99, 1.01)

    found: list[StepMeasurement] = []
    for rank in range(cost.stages):
        forward, input_grad, weight_grad = (
            scattered(times[rank]) for times in (cost.forward, cost.input_grad, cost.weight_grad)
        )
        edges: list[EdgeMeasurement] = []
        for source in (rank - 1, rank + 1):
            if 0 <= source < cost.stages:
                flight = scattered(cost.latency(source, rank)) + (added if (source, rank) == (0, 1) else 0.0)
                edges.append(EdgeMeasurement(source, rank, 8, 0.0, EdgeEstimate(flight, None, 0.01)))
        stage = StageMeasurement(rank, forward, input_grad, weight_grad, None)
        found.append(StepMeasurement(rank, step, scattered(0.5), (stage,), tuple(edges)))
    return found


def resident_bytes() -> int:
    """The memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


class Pipeline:
    """A policy, the agreement that it decides about, and a detector that sees the same."""

    def __init__(self, initial: Plan, planning: Planning) -> None:
        ranks = initial.case.cost.stages
        self.policy = Policy(0, ranks, initial, planning, ControllerOptions())
        self.agreement = Agreement(ranks)
        self.agreement.propose(initial)
        for rank in range(ranks):
            self.agreement.confirm(rank, 0, initial.digest)
        self.agreement.advance()
        self.detected = 0

    def step(self, found: Sequence[StepMeasurement], now: float) -> None:
        """Take a step's measurements. Planning finds nothing better."""
        for measurement in found:
            actions = self.policy.observe(measurement, self.agreement, now)
            self.agreement.report(measurement.rank, measurement.step)
            self.agreement.advance()
            for action in [*actions, *self.policy.begin_round(self.agreement, now)]:
                if isinstance(action, BeginPlanning):
                    self.policy.conclude(PlanningOutcome(action.detection), self.agreement, now)
                else:
                    self.detected += getattr(action, "kind", None) is EventKind.DETECTED


def main() -> int:
    """Measure and print."""
    arguments = parser(__doc__)
    arguments.add_argument("--policies", type=int, default=10_000)
    arguments.add_argument("--stages", type=int, default=4)
    arguments.add_argument("--steps", type=int, default=12, help="healthy steps, beside those of the calibration")
    given = arguments.parse_args()
    cost = CostModel.uniform(given.stages, 0.02, 0.02, 0.01, latency=2e-4)
    case = Case(cost, 8, tuple(range(given.stages)))
    program = one_f_one_b(given.stages, 8)
    initial = Plan(0, program, case, simulate(program, cost).makespan, lower_bound(case).value, "initial")
    planning = Planning(lambda case, incumbent: incumbent)
    before = resident_bytes()
    pipelines = [Pipeline(initial, planning) for _ in range(given.policies)]
    seconds: dict[str, float] = {"healthy": 0.0, "suspicious": 0.0}
    last = CALIBRATING + given.steps
    for step in range(last + 1):
        kind = "suspicious" if step == last else "healthy"
        for index, pipeline in enumerate(pipelines):
            found = measurements(random.Random(index * 1_000_003 + step), cost, step, SLOW_EDGE if step == last else 0.0)
            started = time.perf_counter()
            pipeline.step(found, float(step))
            if step >= CALIBRATING:
                seconds[kind] += time.perf_counter() - started
    memory = (resident_bytes() - before) / given.policies
    detected = sum(pipeline.detected for pipeline in pipelines)
    assert detected == given.policies, "calibrations, and nothing else so far"
    alone = detectors_alone(given.policies, given.steps, cost)
    healthy, suspicious = given.policies * given.steps, given.policies
    rows = [
        Row("healthy step of a policy", 1e6 * seconds["healthy"] / healthy, 1e6 * alone["healthy"] / healthy, "µs", healthy),
        Row(
            "step with a suspicion",
            1e6 * seconds["suspicious"] / suspicious,
            1e6 * alone["suspicious"] / suspicious,
            "µs",
            suspicious,
        ),
        Row("memory of a policy and its agreement", memory / 1024, None, "KiB", given.policies),
    ]
    title = f"{given.policies:,} policies of {given.stages} ranks"
    print_rows(title, rows, baseline="detector alone", as_json=given.json)
    return 0


def detectors_alone(policies: int, steps: int, cost: CostModel) -> dict[str, float]:
    """Seconds that as many detectors take for the same steps."""
    seconds: dict[str, float] = {"healthy": 0.0, "suspicious": 0.0}
    last = CALIBRATING + steps
    for index in range(policies):
        detector = Detector(cost)
        for step in range(last + 1):
            found = measurements(random.Random(index * 1_000_003 + step), cost, step, SLOW_EDGE if step == last else 0.0)
            started = time.perf_counter()
            detector.observe(found)
            if step >= CALIBRATING:
                seconds["suspicious" if step == last else "healthy"] += time.perf_counter() - started
    return seconds


if __name__ == "__main__":
    sys.exit(main())
