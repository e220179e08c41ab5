"""How many steps pass from the onset of a fault to the first step under a plan for it.

And how many from its end to the way back. Over processes, counted in steps: the coordinator's rank begins the second slow step
only when all have confirmed what is planned after the first. It is as if that step were long enough.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
from processes import run_processes

from adaptra.runtime.control.plans.events import ControlEvent, EventKind
from adaptra.runtime.control.plans.plan_log import Agreement

pytestmark = [pytest.mark.processes, pytest.mark.alone]

STEPS_TO_SWITCH = 3
"""Two steps show that the change is no outlier, and of a third the log has said already how it runs."""


class StandingBy:
    """Tells in the coordinator's process when all ranks have confirmed a speculative plan."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._is_ready = threading.Event()
        confirm = Agreement.confirm

        def confirm_and_tell(agreement: Agreement, rank: int, version: int, digest: str) -> bool:
            found = confirm(agreement, rank, version, digest)
            if agreement.is_speculative and not agreement.missing:
                self._is_ready.set()
            return found

        monkeypatch.setattr(Agreement, "confirm", confirm_and_tell)

    def wait(self) -> None:
        """Wait for it, each time anew."""
        assert self._is_ready.wait(100), "no plan stands by"
        self._is_ready.clear()


def follow_costs(rank: int, port: int, onset: int, healed: int, after: tuple[int, ...]) -> tuple[list[str], list[EventKind]]:
    """A rank that measures what it is told. After the steps in ``after`` a plan is waited for that stands by.

    Returns:
        The names of the programs that its steps ran, and what was made of proposals.
    """
    import torch.distributed as dist
    from controller_world import HEALTHY, RANKS, SLOW, best, measurement, plan_zero

    from adaptra.errors import PlanError
    from adaptra.runtime.control.agreeing_ranks import AgreeingRanks
    from adaptra.runtime.control.callbacks import ControlCallbacks
    from adaptra.runtime.control.controller import Controller
    from adaptra.runtime.control.deciding.replanning import Planning

    def search(case: object, current: object) -> Any:
        raise PlanError("only drafts are there in time")

    ran: list[str] = []
    told: list[ControlEvent] = []
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=30))
    with pytest.MonkeyPatch.context() as patch:
        standing_by = StandingBy(patch)
        planning, control = Planning(search, draft=best), dist.PrefixStore("control", store)
        controller = Controller(
            AgreeingRanks(rank, RANKS), control, plan_zero(), planning, callbacks=ControlCallbacks(on_event=told.append)
        )
        for step in range(healed + 6):
            if rank == 0 and step - 1 in after:
                standing_by.wait()
            ran.append(controller.plan_for(step).program.name)
            controller.report(measurement(rank, step, SLOW if onset <= step < healed else HEALTHY))
        # Whoever closes takes no part any more, and the last steps of the others need all.
        store.set(f"ended/{rank}", "")
        store.wait([f"ended/{other}" for other in range(RANKS)])
        controller.close()
    outcomes = (EventKind.PROPOSED, EventKind.AGREED, EventKind.WITHDRAWN)
    return ran, [event.kind for event in told if event.kind in outcomes]


def test_a_plan_runs_three_steps_after_the_onset_and_is_gone_three_after_the_end() -> None:
    import torch.distributed as dist
    from controller_world import HEALTHY_PROGRAM, RANKS, SLOW_PROGRAM

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    onset, healed = 10, 20
    results = run_processes(follow_costs, RANKS, store.port, onset, healed, (onset, healed))
    adapted, back = onset + STEPS_TO_SWITCH, healed + STEPS_TO_SWITCH
    healthy, slow = HEALTHY_PROGRAM.name, SLOW_PROGRAM.name
    expected = [healthy] * adapted + [slow] * (back - adapted) + [healthy] * (healed + 6 - back)
    assert [ran for ran, _ in results] == [expected] * RANKS
    assert results[0][1] == [EventKind.PROPOSED, EventKind.AGREED] * 2


def test_a_plan_that_stands_by_for_what_was_an_outlier_is_never_run() -> None:
    """All ranks have confirmed it, and then the next step is as fast as those before the slow one."""
    import torch.distributed as dist
    from controller_world import HEALTHY_PROGRAM, RANKS

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    results = run_processes(follow_costs, RANKS, store.port, 10, 11, (10,))
    assert [set(ran) for ran, _ in results] == [{HEALTHY_PROGRAM.name}] * RANKS
    assert results[0][1] == [EventKind.PROPOSED, EventKind.WITHDRAWN]


def train_through_a_delay(rank: int, onset: int, steps: int) -> tuple[list[str], list[int]]:
    """A link turns slow in training; what differs from plain torch, and the first steps under plans made for that."""
    import torch.distributed as dist
    from training import MIXED, adam, compiled, differences, run_step, train_alone

    import adaptra

    dist.init_process_group("gloo")
    told: list[ControlEvent] = []
    device = adaptra.EmulatedDevice(0.005, 0.005, 0.005)
    options = adaptra.Options(schedule="1f1b", faults=[f"delay 1-2 80ms @{onset}"], emulate=device, on_event=told.append)
    batches = [MIXED.rows(16, step) for step in range(steps)]
    given: dict[str, Any] = {"stages": 3, "microbatches": 8, "options": options}
    with compiled(MIXED, batches[0], **given) as pipe:
        optimizer = adam(pipe.parameters())
        ran = [run_step(pipe, optimizer, batch) for batch in batches]
    switches = [
        event.step
        for event in told
        if event.kind is EventKind.SWITCHED and ("edge 1→2 slow" in event.text or "edge 2→1 slow" in event.text)
    ]
    return differences(ran, train_alone(MIXED, batches, 8), whole=False), switches


def test_training_switches_to_a_plan_for_a_slow_link_on_all_ranks_at_once() -> None:
    """How soon depends on how steady this machine is: ``bench/reaction.py`` measures it."""
    onset = 14
    results = run_processes(train_through_a_delay, 3, onset, onset + 12)
    assert [found for found, _ in results] == [[]] * 3
    switches = [switches for _, switches in results]
    assert switches[0] and switches == [switches[0]] * 3
    # A busy machine may make an edge look slow before.
    assert all(step >= onset + STEPS_TO_SWITCH for step in switches[0] if step >= onset)
