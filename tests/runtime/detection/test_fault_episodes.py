"""Random faults in real training, as ``bench/reaction.py`` runs them: found, and not one bit of the weights changes."""

from __future__ import annotations

from typing import Any

import pytest
from fault_episodes import judge, misplaced, random_episodes, train_through
from processes import run_processes

from adaptra.runtime.control.plans.events import ControlEvent, EventKind
from adaptra.runtime.injection.faults import Fault


def train(rank: int, *arguments: Any) -> tuple[list[str], list[dict[str, object]], list[bool]]:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    return train_through(rank, *arguments)


@pytest.mark.processes
def test_weights_are_those_of_an_undisturbed_run_after_random_faults() -> None:
    seed, episodes, stages, op_seconds = 0, 4, 4, 0.003
    results = run_processes(train, stages, seed, episodes, stages, 6, op_seconds)
    assert [differing for differing, *_ in results] == [[]] * stages
    events = [ControlEvent(**event | {"kind": EventKind(event["kind"])}) for event in results[0][1]]
    planned = random_episodes(seed, episodes, stages, op_seconds)
    assert any(len(faults) == 2 for faults in planned)
    outcomes = judge(planned, events)
    assert any(outcome.detected for outcome in outcomes)
    important = results[0][2]
    assert len(important) == len(outcomes)
    assert any(important)


def test_outcomes_are_read_off_the_events() -> None:
    """A fault that was found in its second step and adapted to in its fourth, and the way back."""
    (fault,), *_ = planned = random_episodes(0, 2, 3, 0.01)
    begins, ends = fault.from_step, fault.until_step
    assert ends is not None
    where = f"stage {fault.stage}" if fault.peer is None else f"edge {fault.stage}→{fault.peer}"
    told = [
        ControlEvent(EventKind.DETECTED, 0, begins + 1, 0, f"{where} slow: more than before"),
        ControlEvent(EventKind.AGREED, 0, begins + 2, 1, "edge 7→8 slow: 9.0 ms (was 0.1 ms)"),
        ControlEvent(EventKind.AGREED, 0, begins + 3, 2, f"{where} slow: more than before"),
        ControlEvent(EventKind.DETECTED, 0, ends + 1, 1, f"{where} healed: as before"),
        ControlEvent(EventKind.AGREED, 0, ends + 3, 3, f"{where} healed (flapping): as before"),
    ]
    first, other = judge(planned, told)
    assert (first.detected, first.switched, first.back, first.is_flapping) == (2, 3, 3, True)
    assert not first.has_waited
    assert (other.detected, other.switched, other.back) == (None, None, None)
    assert misplaced(planned, told) == []
    told.append(
        ControlEvent(
            EventKind.KEPT,
            0,
            begins + 1,
            0,
            "a flapping edge or stage may turn slow again: a plan of 1.0 ms instead of 2.0 ms waits until",
        )
    )
    first, _ = judge(planned, told)
    assert (first.switched, first.has_waited) == (3, True)


def test_a_place_that_is_named_and_the_kind_are_compared_with_the_faults() -> None:
    delay = Fault.parse("delay 0>1 20ms @12..20")
    told = [ControlEvent(EventKind.DETECTED, 0, step, 0, text) for step, text in (
        (13, "edge 0→1 slow: 21.1 ms (was 0.1 ms), 16.0 ms of it occupancy; edge 1→2 slow: 9.0 ms (was 0.1 ms)"),
        (14, "edge 0→1 slow (flapping): 21.1 ms (was 0.1 ms), 2.0 ms of it occupancy; stage 0 slow: 1.50x the calibrated time"),
        (21, "edge 2→3 faster (flapping): 9.9 ms (was 14.2 ms)"),
        (22, "edge 0→1 lossy: 5 % of its messages are 200.0 ms late, the others as fast as ever; stage 2 healed: 1.00x"),
    )]  # fmt: skip
    (outcome,) = judge([[delay]], told)
    assert (outcome.detected, outcome.kind) == (2, False)
    assert [text[:28] for text in misplaced([[delay]], told)] == [
        "step 13: edge 1→2 slow: 9.0 ", "step 14: stage 0 slow: 1.50x", "step 22: edge 0→1 lossy: 5 %",
    ]  # fmt: skip
    (outcome,) = judge([[delay]], told[1:])
    assert (outcome.detected, outcome.kind) == (3, True)
    (outcome,) = judge([[Fault.parse("rate 0>1 1kB @12..20")]], told)
    assert (outcome.detected, outcome.kind) == (2, True)
    (outcome,) = judge([[Fault.parse("delay 2-3 10ms @20..30")]], told)
    assert (outcome.detected, outcome.kind) == (2, True)
