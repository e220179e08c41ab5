"""A lossy or flapping path is told from a slow link, a slow stage, pauses and noise; it heals, and its plan does not flap."""

from __future__ import annotations

from dataclasses import replace

import pytest
from measurements import HEALTHY, calibrated, measured
from noisy_steps import CASE, Fault, NoisySteps

from adaptra.planning.planner import plan
from adaptra.planning.remedies.bandwidth_remedies import BandwidthOptions, Remedies, find_remedies
from adaptra.program import Program
from adaptra.runtime.control.deciding.replanning import Planning
from adaptra.runtime.control.plans.plan import Edges, Plan
from adaptra.runtime.detection.changes import Change, ChangeKind, LossChange
from adaptra.runtime.detection.detector import Detection, Detector
from adaptra.runtime.measuring.measurement import EdgeEstimate, Stalls, StepMeasurement
from adaptra.simulation.case import Case

EDGE = (1, 2)
STALLED = Stalls(count=1, late=4, lateness=0.5)
"""Of 16 messages."""


def lossy(share: float, first: int = 20, last: int = 120, size: float = 0.2) -> Fault:
    return Fault(ChangeKind.LOSS, (EDGE,), size, first, last, share)


def changes_of(run: NoisySteps, steps: int) -> list[tuple[int, Change]]:
    for _ in range(steps):
        run.step()
    return [(found.step, change) for found in run.detections for change in found.changes]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("share", [0.05, 0.1])
def test_a_lossy_path_is_found_on_its_edge_and_heals(share: float, seed: int) -> None:
    found = [(step, change) for step, change in changes_of(NoisySteps(CASE, seed, faults=[lossy(share)]), 170)]
    assert {(type(change), change.kind) for _, change in found} == {(LossChange, ChangeKind.LOSS)}
    assert {(change.source, change.destination) for _, change in found if isinstance(change, LossChange)} == {EDGE}
    (began, first), *_ = found
    assert began <= 32
    assert str(first).startswith("edge 1→2 lossy: ")
    assert isinstance(first, LossChange) and 0.05 < first.share < 0.5 and 0.05 < first.extra < 0.2
    assert 120 < found[-1][0] < 170 and found[-1][1].is_healed


@pytest.mark.parametrize(
    ("kind", "place", "size"),
    [(ChangeKind.LATENCY, EDGE, 0.2), (ChangeKind.BANDWIDTH, EDGE, 0.06), (ChangeKind.COMPUTE, (2,), 2.0)],
)
def test_other_faults_are_not_taken_for_loss(kind: ChangeKind, place: tuple[int, ...], size: float) -> None:
    """They come and go three times."""
    faults = [Fault(kind, (place,), size, first, first + 14) for first in (10, 50, 90)]
    found = changes_of(NoisySteps(CASE, seed=1, faults=faults), 130)
    assert {change.kind for _, change in found} == {kind}


def test_a_loss_so_small_that_no_step_feels_it_is_none() -> None:
    """120 ms once in five hundred messages: in one step of thirty."""
    assert changes_of(NoisySteps(CASE, seed=7, faults=[lossy(0.002, size=0.12)]), 120) == []


def step_with(step: int, stalls: Stalls, pauses: tuple[float, ...] = (0.0,) * 4) -> list[StepMeasurement]:
    """A healthy step, but for stalls on the edge and a pause of each rank."""
    found = measured(step, HEALTHY)
    return [
        replace(
            one,
            pause=pauses[one.rank],
            edges=tuple(
                replace(edge, stalls=stalls) if (edge.source, edge.destination) == EDGE else edge for edge in one.edges
            ),
        )
        for one in found
    ]


def follow(detector: Detector, stalls: list[Stalls], pauses: tuple[float, ...] = (0.0,) * 4, first: int = 4) -> list[str]:
    found = (detector.observe(step_with(first + index, one, pauses)) for index, one in enumerate(stalls))
    return [detection.reason for detection in found if detection is not None]


LOSSY = "edge 1→2 lossy: 8 % of its messages are 125.0 ms late, the others as fast as ever"
NONE = Stalls()


def test_three_steps_of_sixteen_must_stall() -> None:
    assert follow(calibrated(), [STALLED, *[NONE] * 7, STALLED]) == []
    assert follow(calibrated(), [STALLED, *[NONE] * 7, STALLED, *[NONE] * 7, STALLED]) == []
    (reason,) = follow(calibrated(), [STALLED, NONE, NONE, STALLED, *[NONE] * 4, STALLED])
    assert reason == f"{LOSSY}, 98 % sure"


@pytest.mark.parametrize(("paused", "elsewhere"), [(1, 0), (2, 3)])
def test_a_pause_of_either_side_explains_what_was_late_by_less(paused: int, elsewhere: int) -> None:
    pauses = tuple(0.15 if rank == paused else 0.0 for rank in range(4))
    assert follow(calibrated(), [STALLED] * 8, pauses) == []
    pauses = tuple(0.15 if rank == elsewhere else 0.0 for rank in range(4))
    assert len(follow(calibrated(), [STALLED] * 8, pauses)) == 1


def test_a_path_that_alternates_between_two_levels_is_lossy_not_slow_and_healed_in_turn() -> None:
    """Every other step each message takes 160 ms more: no two steps agree, but each of them jumps."""
    slow = [Fault(ChangeKind.LATENCY, (EDGE,), 0.16, first, first) for first in range(20, 100, 2)]
    found = changes_of(NoisySteps(CASE, seed=4, faults=slow), 140)
    assert [(type(change), change.is_healed) for _, change in found] == [(LossChange, False), (LossChange, True)]
    assert found[0][0] < 30


def test_healing_is_believed_later_where_it_was_believed_too_early() -> None:
    """After stalls in every second step some ten without any are enough; then twice and four times as many."""
    detector, step, waits = calibrated(), 4, list[int]()
    for _ in range(3):
        for index in range(8):
            detector.observe(step_with(step + index, STALLED if index % 2 == 0 else NONE))
        step += 8
        quiet = 0
        while detector.slow_edges:
            detector.observe(step_with(step + quiet, NONE))
            quiet += 1
        step += quiet
        waits.append(quiet)
    assert 5 <= waits[0] <= 20
    assert waits[1] >= 1.5 * waits[0] and waits[2] >= 1.5 * waits[1]


def test_the_level_of_a_lossy_edge_stays_and_its_cost_is_that_of_the_mean_message() -> None:
    detector = calibrated()
    assert follow(detector, [STALLED] * 4) == [LOSSY.replace("8 %", "25 %")]
    assert detector.slow_edges == (EDGE,)
    latency = detector.cost.latency_forward[1]
    assert HEALTHY.latency_forward[1] < latency < 0.125
    assert follow(detector, [STALLED, NONE] * 20, first=8) == []
    assert detector.cost.latency_forward[1] == latency
    (healed,) = follow(detector, [NONE] * 30, first=50)
    assert healed == "edge 1→2 healed: no message is held up any more"
    assert detector.cost == HEALTHY


def probed(step: int, *, has_rate: bool, lateness: float = 0.0) -> list[StepMeasurement]:
    """A healthy step in which no microbatch takes the edge: probes of a few bytes, and perhaps a rate probe."""
    latency = HEALTHY.latency(*EDGE)
    estimate = EdgeEstimate(latency + lateness, lateness if has_rate else None, None)
    return [
        replace(
            one,
            edges=tuple(
                replace(edge, messages=0, estimate=estimate) if (edge.source, edge.destination) == EDGE else edge
                for edge in one.edges
            ),
        )
        for one in measured(step, HEALTHY)
    ]


def test_a_lossy_path_that_no_microbatch_takes_heals_by_rate_probes_that_are_in_time() -> None:
    """Probes of a few bytes tell nothing of it, and a late rate probe is a stall."""
    detector = calibrated()
    assert follow(detector, [STALLED] * 4) == [LOSSY.replace("8 %", "25 %")]
    steps = iter(range(8, 400))
    assert [detector.observe(probed(next(steps), has_rate=False)) for _ in range(60)] == [None] * 60
    late = [number % 4 == 3 for number in range(60)]
    assert [detector.observe(probed(next(steps), has_rate=True, lateness=0.1 * one)) for one in late] == [None] * 60
    found = [detector.observe(probed(next(steps), has_rate=True)) for _ in range(60)]
    assert [one.reason for one in found if one is not None] == ["edge 1→2 healed: no message is held up any more"]
    assert detector.slow_edges == ()


def search(case: Case, incumbent: Program) -> Program:
    return plan(case, incumbent=incumbent, effort=30_000)


PLANNING = Planning(search)


def lossy_pipeline() -> tuple[Plan, Detection]:
    """The plan that runs, and the detection of a lossy edge."""
    case = Case(HEALTHY, 16, (0, 1, 2, 3))
    current = Plan(0, plan(case, effort=30_000).compute_only(), case, 1.0, 1.0, "first", (), ())
    detector = calibrated()
    (detection,) = filter(None, (detector.observe(step_with(4 + index, STALLED)) for index in range(4)))
    return current, detection


def test_the_plan_for_a_lossy_edge_is_the_one_with_the_shortest_expected_step() -> None:
    """Of plans for a prompt, a mean and a late message; its case has that one level."""
    current, detection = lossy_pipeline()
    prompt, late = (scenario.cost.latency_forward[1] for scenario in detection.scenarios)
    assert (prompt, late) == pytest.approx((HEALTHY.latency_forward[1], HEALTHY.latency_forward[1] + 0.125))
    assert sum(scenario.weight for scenario in detection.scenarios) == pytest.approx(1.0)
    found, remedies = PLANNING.plan_for(detection, current, (), is_draft=False)
    assert remedies is None
    assert found.predicted == pytest.approx(PLANNING.expect(found.program, detection))
    assert found.predicted < PLANNING.expect(current.program, detection)
    assert found.case.cost.latency_forward[1] in (prompt, late, detection.cost.latency_forward[1])
    for scenario in detection.scenarios:
        searched = search(replace(current.case, cost=scenario.cost), current.program)
        assert found.predicted <= PLANNING.expect(searched, detection)


def test_an_edge_whose_bandwidth_binds_is_relieved_while_another_is_lossy_and_exact_again_afterwards() -> None:
    """Rounding is allowed: it halves what each message occupies in everything that the lossy edge's messages may meet."""
    current, detection = lossy_pipeline()
    bound = ((2, 3),)
    full = replace(
        detection,
        cost=detection.cost.with_occupancy(2, 3, 0.12),
        scenarios=tuple(replace(one, cost=one.cost.with_occupancy(2, 3, 0.12)) for one in detection.scenarios),
    )

    def remedies(case: Case, program: Program, spread: Edges, rounded: Edges) -> Remedies | None:
        return find_remedies(case, program, spread, rounded, bandwidth=BandwidthOptions(rounds=True))

    planning = replace(PLANNING, remedies=remedies)
    found, told = planning.plan_for(full, current, (), is_draft=False)
    assert told is not None and told.edges == bound
    assert found.rounded == bound
    assert found.reason == f"{detection.reason}; rounding to bfloat16"
    assert found.case.cost.occupancy(2, 3) == 0.06
    halved = full.with_occupancies(bound, 0.5)
    assert found.predicted == pytest.approx(planning.expect(found.program, halved))
    assert found.predicted < 0.7 * planning.expect(PLANNING.plan_for(full, current, (), is_draft=False)[0].program, full)

    # What a rounded message takes is measured from then on; 10 ms for twice as many bytes would not bind.
    fast = replace(halved.with_occupancies(bound, 0.01 / 0.12), changes=())
    exact, told = planning.plan_for(fast, found, (), is_draft=False)
    assert (exact.rounded, told) == ((), None)
    assert exact.case.cost.occupancy(2, 3) == pytest.approx(0.01)
    assert exact.predicted == pytest.approx(planning.expect(exact.program, fast.with_occupancies(bound, 2.0)))
