"""Hours of noise and random faults in seconds: no false switch, every fault that matters found and rightly named.

``bench/episodes.py`` runs the same for two hours and a hundred episodes.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from noisy_steps import CASE, Fault, Noise, NoisySteps, judge, random_episode

from adaptra.runtime.detection.changes import ChangeKind, EdgeChange
from adaptra.simulation.case import Case


def test_noise_drift_pauses_and_warm_up_change_no_plan() -> None:
    run = NoisySteps(CASE, seed=5)
    for _ in range(300):
        run.step()
    assert [detection.reason for detection in run.detections] == ["calibrated by measurement"]
    assert run.switches == []


def test_clocks_that_run_apart_are_no_slow_links() -> None:
    """Half a millisecond per step, ten times what clocks do."""
    run = NoisySteps(CASE, seed=3, noise=Noise(clocks=5e-4), faults=[Fault(ChangeKind.LATENCY, ((2, 1),), 0.06, 100, 150)])
    for _ in range(250):
        run.step()
    changes = [change for found in run.detections for change in found.changes]
    named = [(change.source, change.destination) for change in changes if isinstance(change, EdgeChange)]
    assert len(named) == len(changes)
    assert named == [(2, 1), (2, 1)], "turned slow and healed"


def flapping(case: Case, slow: int, period: int) -> NoisySteps:
    """A link that is three forwards late for some steps of every period until step 250, and healthy from then on."""
    faults = [Fault(ChangeKind.LATENCY, ((1, 2), (2, 1)), 0.06, first, first + slow - 1) for first in range(10, 250, period)]
    run = NoisySteps(case, seed=4, faults=faults)
    for _ in range(400):
        run.step()
    changes = [found for found in run.detections if found.changes]
    assert len(changes) == 2 * len(faults)
    assert all(change.is_flapping for found in changes[2:] for change in found.changes)
    return run


@pytest.mark.parametrize(("slow", "period"), [(6, 12), (6, 24), (30, 60)])
def test_a_link_that_comes_and_goes_does_not_make_the_plan_come_and_go(slow: int, period: int) -> None:
    """What absorbs the delay costs nothing while the link is healthy: that is never worth a switch back."""
    assert flapping(CASE, slow, period).switches == [12]


def test_where_memory_is_scarce_the_way_back_takes_longer_after_each_relapse() -> None:
    """What absorbs the delay takes a third longer on a healthy link."""
    scarce = replace(CASE, cost=CASE.cost.limited((4.0,) * 4))
    *switches, last = flapping(scarce, 6, 12).switches
    assert switches == [12, 18, 24, 33, 36, 47, 48], "at once, after two steps and after four; then none lasts for long enough"
    assert last == 245 + 32 + 2, "but the last one"
    switches = flapping(scarce, 30, 60).switches
    assert switches[::2] == [12, 72, 132, 192], "as soon as the delay is found"
    waits = [back - slow for slow, back in zip(switches[::2], switches[1::2], strict=True)]
    assert waits == [30, 30 + 2 + 1, 30 + 4 + 1, 30 + 8 + 1]


@pytest.mark.parametrize(("flapping_edge", "edge"), [(1, 0), (2, 0), (2, 1)])
def test_what_turns_slow_while_a_flapping_link_heals_has_its_plan_as_soon_as_anything(flapping_edge: int, edge: int) -> None:
    """In the second slow step."""

    def late(between: int, first: int, last: int) -> Fault:
        return Fault(ChangeKind.LATENCY, ((between, between + 1), (between + 1, between)), 0.06, first, last)

    faults = [late(flapping_edge, 10, 15), late(flapping_edge, 22, 27), late(edge, 28, 90)]
    run = NoisySteps(replace(CASE, cost=CASE.cost.limited((4.0,) * 4)), seed=4, faults=faults)
    for _ in range(60):
        run.step()
    assert [step for step in run.switches if step >= 28] == [30]


@pytest.mark.parametrize("seed", range(12))
def test_every_fault_that_matters_is_found_and_rightly_named(seed: int) -> None:
    faults = random_episode(CASE, seed)
    run = NoisySteps(CASE, seed, faults=faults)
    for verdict in judge(run, faults):
        assert verdict.detected or not verdict.matters
        assert verdict.named
        assert verdict.kind is not False
    assert all(change.is_healed for change in run.detections[-1].changes)


def test_a_wrong_name_is_noticed() -> None:
    """What is said of a fault is held against what was injected: here another stage turns slow than is claimed."""
    injected = Fault(ChangeKind.COMPUTE, ((1,),), 2.0, 8, 20)
    claimed = Fault(ChangeKind.COMPUTE, ((2,),), 2.0, 8, 20)
    run = NoisySteps(CASE, seed=1, faults=[injected])
    (verdict,) = judge(run, [claimed])
    assert not verdict.detected
    assert not verdict.named


@pytest.mark.parametrize("edge", [(0, 1), (3, 2)])
@pytest.mark.parametrize("kind", [ChangeKind.BANDWIDTH, ChangeKind.LATENCY])
def test_bandwidth_is_told_from_latency_whether_messages_queue_or_not(edge: tuple[int, int], kind: ChangeKind) -> None:
    """Forwards of the warm-up queue; gradients come so far apart that none waits for another, and a probe tells.

    Forwards come one F apart, 20 ms. So a latency is told from bandwidth if it is more than twice that.
    """
    added = 0.03 if kind is ChangeKind.BANDWIDTH else 0.06
    run = NoisySteps(CASE, seed=2, faults=[Fault(kind, (edge,), added, 8, 30)])
    for _ in range(14):
        run.step()
    assert [change.kind for detection in run.detections for change in detection.changes] == [kind]
