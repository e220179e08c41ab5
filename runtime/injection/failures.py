"""Workers that fail as injected: their connections break, or are cut for a while, or their process is killed or stopped.

Each failure acts once in a process, also where its step is done again by other workers.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Final

from adaptra.errors import TransportError
from adaptra.runtime.injection.faults import FAILURES, Effect, Fault
from adaptra.runtime.injection.points import Point, fits
from adaptra.runtime.world.world import WorkerId, World

_RESET: Final = os.strerror(errno.ECONNRESET)
_STOP: Final = """
import os, signal, sys, time
parent = os.getppid()
os.kill(parent, signal.SIGSTOP)
time.sleep(float(sys.argv[1]))
if os.getppid() == parent:
    os.kill(parent, signal.SIGCONT)
"""


class FailureLog:
    """The failures that have happened in a process, from one epoch of its workers to the next.

    A worker whose own process is lost goes on as a guest of another one, from the call that was under way. What ended the first
    process does not end the second: a new guest has no failures in its first step, nor in those before.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._acted: set[Fault] = set()
        self._guest_since: dict[WorkerId, int] = {}

    def enters(self, worker: WorkerId, world: World, first_step: int) -> int:
        """Take note of a worker of this process, and return the first step in which it may fail."""
        if world.epoch == 0 or not world.is_guest(worker):
            return 0
        return self._guest_since.setdefault(worker, first_step + 1)

    def is_first(self, failure: Fault) -> bool:
        """Return whether a failure has not acted yet. From now on it has."""
        with self._lock:
            if failure in self._acted:
                return False
            self._acted.add(failure)
            return True


class Failures:
    """The failures that one worker is to have.

    Args:
        faults: The worker's own faults, see :func:`.faults.faults_of_worker`; only failures change something here.
        log: Those that have happened in this process.
        worker: The worker.
        first_step: The first step in which it may fail.
        cut: Holds the worker's messages back for some seconds.
        in_threads: Whether all workers of the job are threads of this process.
    """

    def __init__(
        self,
        faults: Iterable[Fault],
        log: FailureLog,
        worker: WorkerId,
        first_step: int,
        cut: Callable[[float], None],
        *,
        in_threads: bool,
    ) -> None:
        self._to_come = [one for one in faults if one.effect in FAILURES and one.from_step >= first_step]
        self._log = log
        self._worker = worker
        self._cut = cut
        self._in_threads = in_threads

    def at(self, step: int, point: Point) -> None:
        """Have the worker fail if it is to fail here.

        Args:
            step: The number of the step that runs; at a moment after a step, that step's.
            point: Where the worker is. An op is of the worker's own replica.

        Raises:
            TransportError: Its connections break.
        """
        for failure in self._to_come:
            if failure.from_step == step and fits(failure.point, point) and self._log.is_first(failure):
                self._act(failure)

    def _act(self, failure: Fault) -> None:
        match failure.effect:
            case Effect.KILL:
                os.kill(os.getpid(), signal.SIGKILL)
            case Effect.FREEZE if self._in_threads:
                time.sleep(failure.amount)
            case Effect.FREEZE:
                stop_for(failure.amount)
            case Effect.CUT:
                self._cut(failure.amount)
            case _:
                raise TransportError(f"fault '{failure}': the connections of worker {self._worker} are broken: {_RESET}")


def stop_for(seconds: float) -> None:
    """Have a child process stop this one, with all its threads, and wake it again."""
    subprocess.run([sys.executable, "-I", "-S", "-c", _STOP, str(seconds)], check=True)
