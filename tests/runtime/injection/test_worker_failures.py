"""Failures of workers: at which points, how often, and what becomes of the process."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from errors_table import check_documented

from adaptra.errors import TransportError
from adaptra.program import Kind, Op
from adaptra.runtime.injection.failures import FailureLog, Failures
from adaptra.runtime.injection.faults import Fault
from adaptra.runtime.injection.points import Moment, Point
from adaptra.runtime.world.world import ProcessId, WorkerId, World

HERE = WorkerId(3)
CUT: list[float] = []


def failures(*texts: str, log: FailureLog | None = None, first_step: int = 0, in_threads: bool = False) -> Failures:
    return Failures(map(Fault.parse, texts), log or FailureLog(), HERE, first_step, CUT.append, in_threads=in_threads)


def breaks(worker: Failures, step: int, point: Point) -> bool:
    """Whether the worker breaks here. If so, it names the fault and itself."""
    try:
        worker.at(step, point)
    except TransportError as error:
        check_documented(
            "TransportError", str(error), "fault '…': the connections of worker … are broken: Connection reset by peer"
        )
        assert f"worker {HERE} " in str(error)
        return True
    return False


POINTS = [*Moment, *(Op(stage, kind, number) for stage in (1, 2) for kind in Kind for number in (2, 3))]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("break 2 @8", [Moment.BEGIN]),
        ("break 2 @8:REDUCE", [Moment.REDUCE]),
        ("break 2 @8:certificate", [Moment.CERTIFICATE]),
        ("break 2 @8:optimizer", [Moment.OPTIMIZER]),
        ("break 2 @8:clip", [Moment.CLIP]),
        ("break 2 @8:2F3", [Op(2, Kind.F, 3)]),
        ("break 2 @8:2I3", [Op(2, Kind.I, 3), Op(2, Kind.B, 3)]),
        ("break 2 @8:2W3", [Op(2, Kind.W, 3), Op(2, Kind.B, 3)]),
        ("break 2 @8:2B3", [Op(2, Kind.W, 3), Op(2, Kind.B, 3)]),
    ],
)
def test_a_worker_fails_at_its_point_of_its_step(text: str, expected: list[Point]) -> None:
    """B is I and W at once."""
    assert set(filter(lambda point: breaks(failures(text), 8, point), POINTS)) == set(expected)
    assert not any(breaks(failures(text), step, point) for step in (7, 9, -8) for point in POINTS)


def test_other_faults_are_no_failures() -> None:
    assert not any(breaks(failures("slow 2 2x @8", "delay 1-2 5ms @8"), 8, point) for point in POINTS)


def test_each_failure_acts_once_in_a_process_and_several_act_each() -> None:
    log = FailureLog()
    texts = ("break 2 @8", "break 2 @8:2F3", "break 2 @9")
    before, after = failures(*texts, log=log), failures(*texts, log=log)
    assert breaks(before, 8, Moment.BEGIN)
    assert not breaks(before, 8, Moment.BEGIN) and not breaks(after, 8, Moment.BEGIN)
    assert breaks(after, 8, Op(2, Kind.F, 3)) and breaks(after, 9, Moment.BEGIN)


def test_what_ended_a_process_does_not_end_the_one_that_goes_on_for_it() -> None:
    """Process 1 of 2 × 1 is lost in step 8. Its worker is a guest of process 0 from then on, also in epochs that follow."""
    log, texts = FailureLog(), ("break 1.0 @8", "break 1.0 @8:REDUCE", "break 1.0 @9")
    assert log.enters(WorkerId(0), World.of_fewer(2, 1, 2), 0) == 0
    second = World(1, 1, (ProcessId(0), ProcessId(0)), (0,))
    for first_step, world in ((8, second), (9, second.followed_by())):
        since = log.enters(WorkerId(1), world, first_step)
        guest = failures(*texts, log=log, first_step=since)
        assert not any(breaks(guest, 8, point) for point in POINTS)
    assert breaks(guest, 9, Moment.BEGIN)
    assert log.enters(WorkerId(0), second, 8) == 0, "the worker that was here from the begin may fail as before"
    assert FailureLog().enters(WorkerId(1), replace(second, epoch=0), 0) == 0, "so may a guest of the first epoch"


def forked(run: Callable[[], object]) -> int:
    """Run a function in a fork of this process, and return its process id. The fork's status is 0 if it returns."""
    child = os.fork()
    if child == 0:
        try:
            run()
        finally:
            os._exit(0)
    return child


@pytest.mark.filterwarnings("ignore:.*use of fork")
def test_a_kill_is_a_kill() -> None:
    _, status = os.waitpid(forked(lambda: failures("kill 2 @8:2F3").at(8, Op(2, Kind.F, 3))), 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    _, status = os.waitpid(forked(lambda: failures("kill 2 @8:2F3").at(8, Op(2, Kind.W, 3))), 0)
    assert os.WIFEXITED(status)


@pytest.mark.filterwarnings("ignore:.*use of fork")
def test_a_frozen_process_is_stopped_and_goes_on() -> None:
    child = forked(lambda: failures("freeze 2 @8 400ms").at(8, Moment.BEGIN))
    _, status = os.waitpid(child, os.WUNTRACED)
    stopped = time.monotonic()
    assert os.WIFSTOPPED(status) and os.WSTOPSIG(status) == signal.SIGSTOP
    _, status = os.waitpid(child, 0)
    assert os.WIFEXITED(status) and time.monotonic() - stopped > 0.3


def test_a_cut_is_of_the_workers_messages() -> None:
    CUT.clear()
    worker = failures("cut 2 @8:clip 3s", "cut 2 @9 1s")
    for step in (8, 9, 8):
        worker.at(step, Moment.CLIP)
    assert CUT == [3]


def test_a_frozen_thread_waits_by_itself() -> None:
    started = time.monotonic()
    failures("freeze 2 @8 50ms", in_threads=True).at(8, Moment.BEGIN)
    assert time.monotonic() - started >= 0.05
