"""The training thread's wait for the plan log: it asks the coordinator again and again, and gives up where nobody hears it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from adaptra.errors import ControlError
from adaptra.runtime.control.deciding.policy import ControllerOptions
from adaptra.runtime.control.plans.plan_log import Coverage

DEAF_WAITS = 8
"""The number of control timeouts without a sign of the control thread after which the store counts as lost."""


class LogWait:
    """Waits until the plan log covers a step. The control thread hears of it by :meth:`asks`.

    Args:
        rank: This rank.
        coverage: The steps that the log covers.
        wake: Wakes the control thread.
        options: How long to wait before asking, and in all.
    """

    def __init__(self, rank: int, coverage: Coverage, wake: Callable[[], None], options: ControllerOptions) -> None:
        self._rank = rank
        self._coverage = coverage
        self._wake = wake
        self._options = options
        self._is_impatient = threading.Event()

    def until_covered(self, step: int) -> None:
        """Return at once if the log covers a step, else wait, and have the coordinator asked after each control timeout.

        Raises:
            Exception: The error that has ended the coverage.
            ControlError: The store does not answer, or the log does not reach the step in time.
        """
        if self._coverage.wait_for(step, 0.0):
            return
        waited, unheard, limit = 0.0, 0, self._options.plan_seconds
        while True:
            left = self._options.answer_seconds if limit is None else min(self._options.answer_seconds, limit - waited)
            started = time.monotonic()
            if self._coverage.wait_for(step, left):
                return
            waited += time.monotonic() - started
            if limit is not None and waited >= limit:
                raise ControlError(
                    f"step {step} has no plan after {limit} s: a rank has not reported its last step, or has not confirmed the "
                    "first plan"
                )
            unheard = unheard + 1 if self._is_impatient.is_set() else 0
            if unheard == DEAF_WAITS:
                raise ControlError(
                    f"step {step} has no plan: rank {self._rank} lost the control channel: the store has not answered for "
                    f"{unheard * self._options.answer_seconds:g} s"
                )
            self._is_impatient.set()
            self._wake()

    def asks(self) -> bool:
        """Return whether the coordinator is to be asked, once for each control timeout. The control thread calls it."""
        if not self._is_impatient.is_set():
            return False
        self._is_impatient.clear()
        return True
