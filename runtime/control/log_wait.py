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
        self._patience = options.answer_seconds

    def until_covered(self, step: int) -> None:
        """Return at once if the log covers a step, else wait, and have the coordinator asked after each control timeout.

        From the second question on, each timeout is twice as long. Later steps begin with it, and shorten it if they need none.

        Raises:
            Exception: The error that has ended the coverage.
            ControlError: The store does not answer, or the log does not reach the step in time.
        """
        shortest = self._options.answer_seconds
        if self._coverage.wait_for(step, 0.0):
            self._patience = max(shortest, self._patience / 2)
            return
        waited, unheard, limit, has_asked = 0.0, 0.0, self._options.plan_seconds, False
        while True:
            left = self._patience if limit is None else min(self._patience, limit - waited)
            started = time.monotonic()
            if self._coverage.wait_for(step, left):
                return
            seconds = time.monotonic() - started
            waited += seconds
            if limit is not None and waited >= limit:
                raise ControlError(
                    f"step {step} has no plan after {limit} s: a rank has not reported its last step, or has not confirmed the "
                    "first plan"
                )
            is_heard = not self._is_impatient.is_set()
            unheard = 0.0 if is_heard else unheard + seconds
            if unheard >= DEAF_WAITS * shortest:
                raise ControlError(
                    f"step {step} has no plan: rank {self._rank} lost the control channel: the store has not answered for "
                    f"{unheard:.3g} s"
                )
            if has_asked and is_heard:  # where the store is late, more questions only add to what is to be answered
                self._patience *= 2
            has_asked = True
            self._is_impatient.set()
            self._wake()

    def asks(self) -> bool:
        """Return whether the coordinator is to be asked, once for each control timeout. The control thread calls it."""
        if not self._is_impatient.is_set():
            return False
        self._is_impatient.clear()
        return True
