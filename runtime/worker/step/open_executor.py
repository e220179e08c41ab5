"""The executor of programs with an open tail: it asks what each slot holds, and skips the ops of empty ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Final

from torch import Tensor

from adaptra.program import Kind, Op
from adaptra.program.dependencies import SENT_BY
from adaptra.runtime.synchrony.slots import SlotMicrobatch
from adaptra.runtime.worker.stages.open_microbatches import OpenMicrobatches
from adaptra.runtime.worker.stages.stage import Stage
from adaptra.runtime.worker.step.executor import ExecutedStep, Executor


class OpenTail:
    """The slots of one rank's order, and the receives that wait for them.

    A receive is posted at its place in the order, or once it is known that its slot is not empty.

    Args:
        work: What slots hold, and what computes it.
        microbatches: The number of results with which a step's are complete; 0 if only its end shows that.

    Attributes:
        work, microbatches: As given.
    """

    def __init__(self, work: OpenMicrobatches, microbatches: int) -> None:
        self.work: Final = work
        self.microbatches: Final = microbatches
        self._waiting = {kind: deque[Op]() for kind in SENT_BY}

    def begin_step(self) -> None:
        """Forget the receives of an interrupted step."""
        for receives in self._waiting.values():
            receives.clear()

    def held_by(self, op: Op) -> SlotMicrobatch | None:
        """Return what an op's slot holds, once it is known; None if it is empty."""
        slots = self.work.slots
        return slots.fill(op.microbatch) if op.kind is Kind.F else slots.of(op.microbatch)

    def wait_for(self, receive: Op) -> None:
        """Take note of a receive, whose slot may be empty."""
        self._waiting[receive.kind].append(receive)

    def to_post(self) -> list[Op]:
        """Return the receives that can be posted now."""
        known: list[Op] = []
        for receives in self._waiting.values():
            while receives and self.work.slots.is_known(receives[0].microbatch):
                receive = receives.popleft()
                if self.work.slots.of(receive.microbatch) is not None:
                    known.append(receive)
        return known


class OpenExecutor(Executor):
    """Runs one rank's order of a program with an open tail, in which the microbatches of ops are slots."""

    _tail: OpenTail
    _next: Mapping[Op, int]
    """The slot of the F behind an op."""

    def follow(self, tail: OpenTail) -> None:
        """Take what slots hold from this tail, before the first step."""
        self._tail = tail
        computed = [op for op in self._order if op.kind.is_compute]
        self._next = {op: after.microbatch for op, after in pairwise(computed) if after.kind is Kind.F}

    def _begin(self) -> None:
        self._tail.begin_step()

    def _execute(self, op: Op, now: ExecutedStep) -> None:
        if op.kind in SENT_BY:
            self._tail.wait_for(op)
        elif self._tail.held_by(op) is None:
            return
        for receive in self._tail.to_post():
            super()._execute(receive, now)
        if op.kind not in SENT_BY:
            super()._execute(op, now)

    def _computing(self, op: Op) -> tuple[Stage, int]:
        if op in self._next:
            self._tail.work.slots.ask(self._next[op])
        held = self._held(op.microbatch)
        return self._tail.work.stage_of(held), held.microbatch

    def _inputs_of(self, op: Op, now: ExecutedStep) -> Sequence[Tensor]:
        return self._tail.work.inputs_of(self._held(op.microbatch), now.inputs)

    def _targets_of(self, op: Op, now: ExecutedStep) -> Sequence[Tensor]:
        return self._tail.work.targets_of(self._held(op.microbatch), now.targets)

    def _found(self, now: ExecutedStep, microbatch: int, results: tuple[Tensor, ...]) -> None:
        held, work = self._held(microbatch), self._tail.work
        if work.is_own(held):
            super()._found(now, held.microbatch, results)
        else:
            work.keep_results(held, tuple(one.detach() for one in results))

    @property
    def _count(self) -> int:
        return self._tail.microbatches

    def _held(self, slot: int) -> SlotMicrobatch:
        held = self._tail.work.slots.of(slot)
        assert held is not None, "ops of empty slots are skipped"
        return held
