"""Random faults in real training, as ``bench/reaction.py`` runs them: found, and not one bit of the weights changes."""

from __future__ import annotations

import pytest
from fault_episodes import judge, random_episodes, train_through
from processes import run_processes

from adaptra.runtime.events import ControlEvent, EventKind


def train(rank: int, *arguments: object) -> tuple[list[str], list[dict[str, object]]]:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    return train_through(rank, *arguments)


@pytest.mark.processes
@pytest.mark.timeout(120)
def test_weights_are_those_of_an_undisturbed_run_after_random_faults() -> None:
    seed, episodes, stages, op_seconds = 0, 4, 4, 0.003
    results = run_processes(train, stages, seed, episodes, stages, 6, op_seconds, timeout=100.0)
    assert [differing for differing, _ in results] == [[]] * stages
    events = [ControlEvent(**event | {"kind": EventKind(event["kind"])}) for event in results[0][1]]
    planned = random_episodes(seed, episodes, stages, op_seconds)
    assert any(len(faults) == 2 for faults in planned)
    assert any(outcome.detected for outcome in judge(planned, events))


def test_outcomes_are_read_off_the_events() -> None:
    """A fault that was found in its second step and adapted to in its fourth, and the way back."""
    (fault,), *_ = planned = random_episodes(0, 2, 3, 0.01)
    begins, ends = fault.from_step, fault.until_step
    assert ends is not None
    where = f"stage {fault.stage}" if fault.peer is None else f"edge {fault.stage}→{fault.peer}"
    told = [
        ControlEvent(EventKind.DETECTED, 0, begins + 1, 0, f"{where} slow: more than before"),
        ControlEvent(EventKind.AGREED, 0, begins + 3, 1, ""),
        ControlEvent(EventKind.DETECTED, 0, ends + 1, 1, f"{where} healed: as before"),
        ControlEvent(EventKind.AGREED, 0, ends + 3, 2, ""),
    ]
    first, other = judge(planned, told)
    assert (first.detected, first.switched, first.back) == (2, 3, 3)
    assert (other.detected, other.switched, other.back) == (None, None, None)
