"""What the updates of one rank's parameters have in them: gradients of all, or of some replicas, and what sites have learnt."""

from __future__ import annotations

from collections.abc import Callable

import torch

from adaptra.runtime.control.event_recorder import EventRecorder
from adaptra.runtime.control.plans.events import EventKind
from adaptra.runtime.synchrony.deferral import Deferral
from adaptra.runtime.synchrony.local_steps import LocalSteps
from adaptra.runtime.worker.call_numbers import CallNumbers
from adaptra.runtime.worker.ends.x_order import XOrderSteps
from adaptra.runtime.worker.stages.deferred_microbatches import DeferredMicrobatches
from adaptra.runtime.worker.stages.open_microbatches import OpenMicrobatches
from adaptra.runtime.worker.step.step_parts import StepParts


class RankUpdates:
    """Counts a rank's updates, exchanges what its site has learnt with other sites, and tells what the clock has decided.

    Args:
        parts: The parts of the rank's steps.
        numbers: The numbers of its calls.
        recorder: Records its events.
        check: Raises the error that has ended this rank's waits, if there is one.
    """

    def __init__(self, parts: StepParts, numbers: CallNumbers, recorder: EventRecorder, check: Callable[[], None]) -> None:
        self._parts = parts
        self._numbers = numbers
        self._recorder = recorder
        self._check = check

    @property
    def tail(self) -> OpenMicrobatches | None:
        """What this rank computes of a step that is not known before it; None where all is known."""
        return self._parts.tail

    @property
    def deferral(self) -> Deferral | None:
        """Which microbatches are deferred to the next step; None where none ever is."""
        tail = self._parts.tail
        return tail.deferral if isinstance(tail, DeferredMicrobatches) else None

    @property
    def local(self) -> LocalSteps | None:
        """The exchanges with other sites that take local steps; None in other modes."""
        return self._parts.local

    @property
    def apart(self) -> LocalSteps | XOrderSteps | None:
        """What sites do that update by themselves; None where all replicas are one site."""
        return self._parts.local or self._parts.order

    @property
    def logged(self) -> LocalSteps | XOrderSteps | Deferral | None:
        """What keeps a log of updates that the clock decides on; None where every update has all gradients."""
        return self.apart or self.deferral

    @property
    def count(self) -> int:
        """The number of updates of the parameters in the whole training."""
        order, numbers = self._parts.order, self._numbers
        return numbers.updates_before + (numbers.next_step - numbers.first_step if order is None else order.made)

    def go_on_at(self, count: int) -> None:
        """Set the number of updates before the next step."""
        self._numbers.updates_before += count - self.count

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Let the state of this optimizer go to replicas that have missed updates, where there are any."""
        if self._parts.order is not None:
            self._parts.order.attach(optimizer)

    def hand_over(self) -> None:
        """Give replicas what they lack of updates, as those that all wait for can't go on without it."""
        if self._parts.order is not None:
            self._parts.order.hand_over()

    def restart(self) -> None:
        """Let sites update by themselves from the parameters that all of them have now; all ranks call it."""
        if self._parts.order is not None:
            self._numbers.updates_before = self.count  # which goes on
        if self.apart is not None:
            self.apart.restart(self._check)

    def exchange(self, *, all_now: bool = False) -> None:
        """Exchange with other sites what is due at the begin of a step, or all that there is."""
        local, order = self._parts.local, self._parts.order
        if local is not None:
            for one in local.exchange_all() if all_now else local.begin():
                self._recorder.emit_now(EventKind.EXCHANGED, str(one))
        elif order is not None and all_now:
            self._recorder.emit_now(EventKind.UPDATED, str(order.exchange_all()))

    def tell_tail(self) -> None:
        """Tell what of this replica others have computed in the step that has run, or what is deferred to the next one."""
        tail = self._parts.tail
        if tail is not None and tail.told is not None and 0 in self._parts.factory.own:
            self._recorder.emit_now(tail.event, tail.told)

    def end_step(self) -> None:
        """Count a step that is committed, and tell of its update where the clock has decided on it."""
        if self._parts.local is not None:
            self._parts.local.end_step()
        if self._parts.order is not None:
            self._recorder.emit_now(EventKind.UPDATED, str(self._parts.order.last))
