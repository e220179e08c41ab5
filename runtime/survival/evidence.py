"""Evidence that processes have ended, or are silent for certain. A broken connection is none: the living break theirs too.

There are three kinds. The launcher tells an end, see :mod:`.ends`. A process's host refuses connections to it: its listener for
direct questions lives as long as the process, and not only for an epoch. Or it answers no question for two seconds.

A process whose Python is busy answers, and so does one that a debugger on this host holds. If no question has ever got through
to a process, as behind a firewall, its launcher may still tell its end. Else it is taken for lost once others have waited for
it for ten seconds. A process that was stopped itself counts anew.

To a process that is cut off, all others are silent. It goes on asking, and learns by the first answer that its network is back.
TCP would take as long again as the network was away to repeat what was under way.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Final

from torch.distributed import Store

from adaptra.runtime.control_store.stores import get_all
from adaptra.runtime.membership.announcement import parse_announcement, write_announcement
from adaptra.runtime.membership.direct_questions import UNKNOWN, DirectQuestions, Sign
from adaptra.runtime.survival.ends import Ends

logger = logging.getLogger(__name__)

SILENT_SECONDS: Final = 2.0
"""Seconds without an answer after which a process is frozen or cut off."""
UNREACHED_SECONDS: Final = 10.0
"""The same for a process to which no question has ever got through."""
CUT_OFF_SECONDS: Final = 60.0
"""Seconds after which a process to which all others are silent gives up: they have long gone on without it."""
_LEAST_QUESTIONS: Final = 3
"""Questions without an answer, beside that. One alone may be lost on its way."""
_IDLE_SECONDS: Final = 0.5
_ASKING_SECONDS: Final = 0.02
"""Seconds between two looks for answers."""
_FORGET_SECONDS: Final = 1.0
"""Seconds without :meth:`Evidence.against` after which its next call counts silence anew, but for :meth:`Evidence.awaiting`.

It does in any case if this process was stopped for so long.
"""


def _nothing(*_: object) -> None:
    """Do nothing."""


class Evidence:
    """What this process knows for certain of other processes' ends, for the whole life of the job. Starts its threads at once.

    All processes make theirs at the same time: each waits for the others' announcements, as long as the store's timeout.

    Args:
        store: The job's part for this, whose records the processes have signed if they have a secret.
        process: This process.
        processes: All processes of the job.
        address: A numeric address of this host on which others reach it; None if it has none.
        on_end: Called from a thread when a launcher has told the end of another process, with how.
        on_return: Called from a thread when a process answers after all that were awaited had been silent.
        on_cut_off: Called from a thread once all of them have been silent for :data:`CUT_OFF_SECONDS`.

    Raises:
        ControlError: An announcement is none.
        torch.distributed.DistError: The store is lost, or a process did not come.
    """

    def __init__(
        self,
        store: Store,
        process: int,
        processes: Iterable[int],
        address: str | None,
        on_end: Callable[[int, str], object] = _nothing,
        on_return: Callable[[], object] = _nothing,
        on_cut_off: Callable[[], object] = _nothing,
    ) -> None:
        self._on_end = on_end
        self._on_return = on_return
        self._on_cut_off = on_cut_off
        self._lock = threading.Condition()
        self._process = process
        self._told: dict[int, str] = {}
        self._awaited: dict[int, float] = {}
        self._asked_at = self._awake_at = 0.0
        self._is_patient = False
        self._is_closed = False
        self._questions = _questions_of(address)
        others = [other for other in processes if other != process]
        if self._questions is not None:
            store.set(_key_of(process), write_announcement(self._questions.announcement))
        else:
            store.set(_key_of(process), "")
        for other, announced in zip(others, get_all(store, [*map(_key_of, others)]), strict=True):
            if announced and self._questions is not None:
                self._questions.know(other, parse_announcement(announced, other))
        self._ends = Ends(store, self.ended)
        self._thread = threading.Thread(target=self._watch, name="adaptra evidence", daemon=True)
        self._thread.start()

    def against(self, processes: Iterable[int]) -> dict[int, str]:
        """Return those of the processes that have ended or are silent for certain, and why, in words for users.

        It never waits. Call it again and again, more often than once a second, while others are awaited. Meanwhile they are
        asked, and silence counts from the first of these calls.
        """
        with self._lock:
            now = time.monotonic()
            before = self._still_awaited(now)
            self._awaited = {other: before.get(other, now) for other in processes if other != self._process}
            self._asked_at = now
            if not before:
                self._lock.notify()
            reasons = {other: self._told.get(other) or self._silence_of(other, now) for other in self._awaited}
        return {other: why for other, why in reasons.items() if why is not None}

    def told(self, processes: Iterable[int]) -> dict[int, str]:
        """Return those of the processes whose end has been told, and how they ended."""
        with self._lock:
            return {process: self._told[process] for process in processes if process in self._told}

    @contextmanager
    def awaiting(self) -> Generator[None]:
        """Count silence on between two calls of :meth:`against`, however late the second one is, until the context ends."""
        self._is_patient = True
        try:
            yield
        finally:
            with self._lock:
                self._is_patient, self._awaited = False, {}

    def ended(self, process: int, how: str) -> None:
        """Take it for certain that a process has ended, and how, such as ``was ended by SIGKILL``."""
        with self._lock:
            self._told[process] = how
        if process != self._process:
            self._on_end(process, how)

    def outlived(self, processes: Iterable[int]) -> None:
        """Tell launchers that the job goes on without processes, so that their ends are no failure. One process calls it."""
        self._ends.tell_outlived(processes)

    def close(self) -> None:
        """End the listener and all questions: from now on this process counts as ended. May be called again."""
        with self._lock:
            self._is_closed = True
            self._lock.notify()
        self._thread.join()
        self._ends.close()
        if self._questions is not None:
            self._questions.close()

    def _silence_of(self, other: int, now: float) -> str | None:
        sign = self._sign(other)
        quiet = now - max(self._awaited[other], sign.answered_at)
        if not sign.is_reachable:
            return f"has been missing for {quiet:.0f} s, and its host can't be asked" if quiet > UNREACHED_SECONDS else None
        if sign.is_gone:
            return "has ended: its host refuses connections to it"
        return f"has not answered for {quiet:.0f} s: it is frozen or cut off" if self._is_silent(other, now) else None

    def _is_silent(self, other: int, now: float) -> bool:
        sign = self._sign(other)
        is_late = now - max(self._awaited[other], sign.answered_at) > SILENT_SECONDS
        return sign.is_reachable and is_late and sign.unanswered >= _LEAST_QUESTIONS

    def _is_cut_off(self) -> bool:
        """Return True if all that are awaited are silent, but for those that have ended."""
        now = time.monotonic()
        left = [other for other in self._awaited if other not in self._told and not self._sign(other).is_gone]
        return bool(left) and all(self._is_silent(other, now) for other in left)

    def _sign(self, other: int) -> Sign:
        return UNKNOWN if self._questions is None else self._questions.sign(other)

    def _still_awaited(self, now: float) -> dict[int, float]:
        """Return whom this process has waited for without a pause, each with the time since when."""
        was_stopped = now - self._awake_at > _FORGET_SECONDS
        goes_on = now - self._asked_at < _FORGET_SECONDS or self._is_patient
        return self._awaited if goes_on and not was_stopped else {}

    def _watch(self) -> None:
        is_asking = True  # each is asked once, to learn whether questions get through
        act: Callable[[], object] = _nothing
        cut_off_at = math.inf
        while True:
            act()
            act = _nothing
            with self._lock:
                if self._is_closed:
                    return
                was_cut_off, now = self._is_cut_off(), time.monotonic()
                cut_off_at = min(cut_off_at, now) if was_cut_off else math.inf
                awaited = self._awaited = self._awaited if was_cut_off else self._still_awaited(now)
                self._awake_at = now
                if self._questions is not None:
                    is_asking = self._questions.step(awaited)
                if was_cut_off and not self._is_cut_off():
                    self._awaited = {}  # the others' answers are still on their way
                    act = self._return
                elif now - cut_off_at > CUT_OFF_SECONDS:
                    cut_off_at, act = now, self._on_cut_off
                else:
                    self._lock.wait(_ASKING_SECONDS if is_asking or awaited else _IDLE_SECONDS)

    def _return(self) -> None:
        self._ends.interrupt()
        self._on_return()


def _questions_of(address: str | None) -> DirectQuestions | None:
    """Return direct questions from an address of this host, or None if the system refuses a listener there."""
    try:
        return None if address is None else DirectQuestions(address, time.monotonic)
    except (RuntimeError, ValueError) as error:
        logger.warning("no direct questions from %s: %s: only its launcher can tell that a process has ended", address, error)
        return None


def _key_of(process: int) -> str:
    return f"listener/{process}"
