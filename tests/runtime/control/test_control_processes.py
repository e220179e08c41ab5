"""The control plane over processes: a killed coordinator, a paused rank, a cut connection; never two plans, never a hang.

The control store lives in the test's own process, so that it outlives every rank. Plans are proposed on request, and every
rank keeps its events in a file.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from event_log import EventFile, check_events, read_events
from processes import run_processes

from adaptra.runtime.control.plans.events import ControlEvent, EventKind
from adaptra.runtime.control.plans.plan import Plan

if TYPE_CHECKING:
    import torch.distributed as dist

    import adaptra

pytestmark = [pytest.mark.processes, pytest.mark.alone]

RANKS, MICROBATCHES, ROWS = 3, 4, 12
LIMIT = 1000
"""Far more steps than any of these runs takes."""


@pytest.fixture
def store() -> dist.TCPStore:
    import torch.distributed as dist

    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


class Training:
    """One rank: trains an example, and compares it bit for bit with plain torch."""

    def __init__(
        self,
        rank: int,
        port: int,
        folder: str,
        *,
        op_seconds: float = 0.004,
        on_event: Callable[[ControlEvent], None] | None = None,
    ) -> None:
        import torch.distributed as dist
        from training import MIXED

        import adaptra

        self.rank = rank
        self.seconds = []
        self._steps = []
        self._file = EventFile(folder, rank)
        self._on_event = on_event
        store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=60))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
        device = adaptra.EmulatedDevice(op_seconds, op_seconds, op_seconds)
        self.options = adaptra.Options(schedule="1f1b", adapt=False, emulate=device, on_event=self._told, timeout=60.0)
        self._example = MIXED

    def run(self, until: Callable[[int, Plan], bool], at: Callable[[int, adaptra.Pipeline], None]) -> list[str]:
        """Train until ``until(step, plan)`` holds, which must come at the same step on all ranks.

        Args:
            until: Says when to stop, before each step.
            at: Called with the step and the pipeline before each step.

        Returns:
            What differs from plain torch.
        """
        from training import adam, compiled, differences, run_step, train_alone

        batches = []
        first = self._example.rows(ROWS, 0)
        with compiled(self._example, first, stages=RANKS, microbatches=MICROBATCHES, options=self.options) as pipe:
            optimizer = adam(pipe.parameters())
            while not until(len(batches), pipe.plan):
                assert len(batches) < LIMIT
                at(len(batches), pipe)
                batches.append(self._example.rows(ROWS, len(batches)))
                started = time.monotonic()
                try:
                    self._steps.append(run_step(pipe, optimizer, batches[-1]))
                finally:
                    self.seconds.append(time.monotonic() - started)
        return differences(self._steps, train_alone(self._example, batches, MICROBATCHES), whole=False)

    def _told(self, event: ControlEvent) -> None:
        self._file(event)
        if self._on_event is not None:
            self._on_event(event)


def suggest(pipe: adaptra.Pipeline, schedule: str, reason: str) -> None:
    """Have a schedule proposed, if this rank coordinates."""
    import adaptra

    assert pipe._session is not None
    pipe._session.workers[0].controller.suggest(adaptra.generate(schedule, RANKS, MICROBATCHES), reason)


def fail_in(
    training: Training, until: Callable[[int, Plan], bool], at: Callable[[int, adaptra.Pipeline], None]
) -> tuple[str, str, int | None, float] | None:
    """Train, and return what ends it, as a tuple that can be pickled: kind, text, rank, and the seconds the last step took."""
    try:
        training.run(until, at)
    except Exception as error:
        return type(error).__name__, str(error), getattr(error, "rank", None), training.seconds[-1]
    return None


def die_in_a_proposal(rank: int, port: int, folder: str, kind: EventKind) -> tuple[str, str, int | None, float] | None:
    """Rank 0 proposes a plan and is killed as soon as it tells an event of this kind."""

    def die(event: ControlEvent) -> None:
        if rank == 0 and event.kind is kind:
            os.kill(os.getpid(), signal.SIGKILL)

    def propose(step: int, pipe: adaptra.Pipeline) -> None:
        if step == 3:
            suggest(pipe, "gpipe", "another order")

    return fail_in(Training(rank, port, folder, on_event=die), lambda step, plan: step == LIMIT, propose)


@pytest.mark.parametrize("kind", [EventKind.PROPOSED, EventKind.CONFIRMED, EventKind.AGREED])
def test_a_coordinator_killed_in_a_proposal_ends_the_others_under_one_plan(
    kind: EventKind, store: dist.TCPStore, tmp_path: Path
) -> None:
    """Before any rank has got the proposal, before the coordinator has confirmed it, and when all had just agreed."""
    results = run_processes(die_in_a_proposal, RANKS, store.port, str(tmp_path), kind, may_die=(0,))
    for error, text, lost, seconds in results[1:]:
        assert (error, lost) == ("PeerLostError", 0), text
        assert seconds < 100, "it waited for an op's own limit"
    events = read_events(tmp_path)
    assert events[0][-1].kind is kind
    switches = check_events(events, {})
    assert switches == {} or kind is EventKind.AGREED


def pause(rank: int, port: int, folder: str, victim: int) -> tuple[list[str], list[float]]:
    """The victim stops for 2 s as a plan is proposed; training ends three steps after the switch."""
    training = Training(rank, port, folder, op_seconds=0.02)
    paused_at, switched = 4, []

    def act(step: int, pipe: adaptra.Pipeline) -> None:
        if step == paused_at and rank == victim:
            me = os.getpid()
            subprocess.Popen(["sh", "-c", f"sleep 0.1; kill -STOP {me}; sleep 2; kill -CONT {me}"])
        if step == paused_at:
            suggest(pipe, "gpipe", "another order")

    def until(step: int, plan: Plan) -> bool:
        switched.extend([step] if plan.version else [])
        return len(switched) == 3

    differences = training.run(until, act)
    return differences, training.seconds


@pytest.mark.parametrize("victim", [0, 2])
def test_training_goes_on_after_a_rank_was_paused_for_two_seconds(victim: int, store: dist.TCPStore, tmp_path: Path) -> None:
    """A frozen rank is lost after 2.75 s. The pause costs its two seconds, once, and the plan still comes."""
    results = run_processes(pause, RANKS, store.port, str(tmp_path), victim)
    assert [differences for differences, _ in results] == [[]] * RANKS
    steps = len(results[0][1])
    for _, seconds in results:
        assert len(seconds) == steps
        assert max(seconds) > 1.8
    assert set(check_events(read_events(tmp_path), dict.fromkeys(range(RANKS), steps))) == {1}


def cut(rank: int, port: int, folder: str, victim: int) -> tuple[list[str], int, float]:
    """The victim's connections to the store are cut while a plan is under way; a second one is proposed until it is agreed."""
    from proxy import Proxy

    proxy = Proxy(port)
    training = Training(rank, proxy.port if rank == victim else port, folder)
    switched = []

    def act(step: int, pipe: adaptra.Pipeline) -> None:
        if step == 3:
            suggest(pipe, "gpipe", "the first")
        if step == 4 and rank == victim:
            proxy.cut()
        if step >= 10 and pipe.plan.reason != "the second":
            suggest(pipe, "1f1b", "the second")

    def until(step: int, plan: Plan) -> bool:
        switched.extend([step] if plan.reason == "the second" else [])
        return len(switched) == 3

    differences = training.run(until, act)
    return differences, len(training.seconds), max(training.seconds)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_cut_connection_to_the_store_is_made_anew_and_another_rank_coordinates(
    victim: int, store: dist.TCPStore, tmp_path: Path
) -> None:
    results = run_processes(cut, RANKS, store.port, str(tmp_path), victim)
    assert [differences for differences, *_ in results] == [[]] * RANKS
    steps: int = results[0][1]
    assert {count for _, count, _ in results} == {steps}
    assert all(longest < 100 for *_, longest in results), "a step waited for an op's own limit"
    events = read_events(tmp_path)
    assert check_events(events, dict.fromkeys(range(RANKS), steps))
    took_over = [event.rank for told in events.values() for event in told if event.kind is EventKind.COORDINATES]
    assert took_over[:1] == ([1] if victim == 0 else [])


def lose(rank: int, port: int, folder: str, victim: int, how: str) -> tuple[tuple[str, str, int | None, float] | None, float]:
    """The victim's connections to the store end for good, by a refusal or without a word, while a plan is under way."""
    from proxy import Proxy

    proxy = Proxy(port)
    training = Training(rank, proxy.port if rank == victim else port, folder)

    def act(step: int, pipe: adaptra.Pipeline) -> None:
        if step == 3:
            suggest(pipe, "gpipe", "another order")
        if step == 4 and rank == victim:
            getattr(proxy, how)()

    begun = time.monotonic()
    # Steps take about 0.1 s; what ends training is the loss.
    found = fail_in(training, lambda step, plan: time.monotonic() - begun > 60, act)
    return found, time.monotonic() - begun


@pytest.mark.parametrize(("victim", "how"), [(0, "stall"), (1, "refuse")])
def test_a_control_store_out_of_reach_ends_training_everywhere(
    victim: int, how: str, store: dist.TCPStore, tmp_path: Path
) -> None:
    results = run_processes(lose, RANKS, store.port, str(tmp_path), victim, how)
    for rank, (found, seconds) in enumerate(results):
        assert found is not None, f"rank {rank} went on for {seconds} s"
        error, text, lost, last_step = found
        assert last_step < 100, text  # less than an op's own limit
        if rank == victim:
            # Whichever of its threads first needs the store, it is the same loss.
            assert error == "PeerLostError" and "the control store is lost" in text, text
        else:
            # By its silence, or by the connections that it ends.
            assert (error, lost) == ("PeerLostError", victim), text
    check_events(read_events(tmp_path), {})
