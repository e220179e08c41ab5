"""Calls of a pipeline that are done again where they break: in the next epoch, from what they began with.

A call is certain once every process has completed it: see :mod:`adaptra.runtime.survival.epochs`. Only then does it change what
a user sees. Until then it has changed nothing but buffers, such as BatchNorm's, of which copies are kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeVar

import torch
from torch import Tensor
from torch.distributed import DistError

from adaptra.errors import ControlError, DataLostError, FencedError, LaunchError, PeerLostError, StageLostError, TransportError
from adaptra.runtime.control.plans.events import EventKind

if TYPE_CHECKING:
    from adaptra.frontend.running.local_workers import LocalWorkers
    from adaptra.runtime.survival.keeper import EpochKeeper
    from adaptra.runtime.world.world import World

Result = TypeVar("Result")

_MOST_TIMES: Final = 8
"""How often a call is begun at most. What breaks it every time is no accident."""


class RedoneCalls:
    """Makes the calls of this process, each until it is certain.

    Args:
        local: The workers of this process.
        keeper: Keeps this process in the job's epochs.
        enter: Has this process go on in the world of a later epoch.
    """

    def __init__(self, local: LocalWorkers, keeper: EpochKeeper, enter: Callable[[World, str], None]) -> None:
        self._local = local
        self._keeper = keeper
        self._enter = enter
        self._number = 0
        self._name: str | None = None

    def made(self, name: str, call: Callable[[], Result]) -> Result:
        """Make a call that all processes make, and return its result once it is certain. A call within it belongs to it.

        Raises:
            StageLostError, FencedError, PeerLostError: The job can't go on, or not with this process.
            Exception: An error of the call itself, which ends the job.
        """
        if self._name is not None:
            return call()
        self._local.require_running()
        self._name = name
        self._number += 1
        self._keeper.begin_call()
        try:
            self._catch_up()
            for times in range(_MOST_TIMES):
                kept = _Changing(self._local)  # each time, as workers that were lost meanwhile are guests by now
                try:
                    return call()
                except Exception as error:
                    self._break_by(error, is_last=times == _MOST_TIMES - 1)
                kept.restore()
                self._catch_up()
                if self._local.launched.is_first:
                    self._local.workers[0].controller.recorder.emit_now(EventKind.REDONE, name)
            raise AssertionError("the last time ends the job")
        finally:
            self._keeper.end_call()
            self._name = None

    def certify(self, name: str) -> None:
        """Wait until all processes have completed the call of this name, unless it belongs to another one.

        Raises:
            PeerLostError: One has not, and never will in this epoch.
        """
        if name != self._name:
            return
        number = self._local.launched.world.epoch
        if self._keeper.complete(self._number, number):
            try:
                self._local.at_certificate()
                self._local.launched.wait_for_all()
            except (RuntimeError, TransportError) as error:
                self._keeper.broke(number, error)
            else:
                return
        if not self._keeper.counts(self._number, number):
            raise PeerLostError(f"{name}: epoch {number} has broken before all ranks had completed it")

    def _break_by(self, error: Exception, *, is_last: bool) -> None:
        """Break the epoch by an error of a call, unless it is this process's own. Returns once another follows."""
        number = self._local.launched.world.epoch
        if is_last or not self._comes_of_a_break(error, number):
            self._keeper.fail(error)
            raise error
        self._keeper.broke(number, error)
        self._following(number, error)
        # It is made again, and so must not count: nothing that may break follows what makes it certain.
        assert not self._keeper.counts(self._number, number), f"call {self._number} is certain, and has broken: {error}"

    def _following(self, number: int, error: Exception) -> World:
        try:
            return self._keeper.follower(number)
        except PeerLostError as end:
            if isinstance(end, StageLostError | DataLostError):
                steps = self._local.workers[0].numbers.training_step
                end = type(end)(f"{end}: training has completed {steps} steps; start again with the last checkpoint")
            self._local.fail_by(end)
            if isinstance(end, FencedError):
                self._local.workers[0].controller.recorder.emit_now(EventKind.FENCED, str(end))
            raise end from error

    def _catch_up(self) -> None:
        """Go on in the newest epoch."""
        number, unexplained = self._local.launched.world.epoch, 0
        while (lost := self._keeper.broken(number)) is not None:
            world = self._following(number, lost)
            number = world.epoch
            try:
                self._enter(world, str(lost))
            except Exception as error:
                unexplained += self._keeper.broken(number) is None
                if unexplained == _MOST_TIMES or not self._comes_of_a_break(error, number):
                    self._keeper.fail(error)
                    raise
                self._keeper.broke(number, error)

    def _comes_of_a_break(self, error: Exception, number: int) -> bool:
        if isinstance(error, TransportError | ControlError | DistError):
            return True
        if not isinstance(error, LaunchError):
            return False
        return isinstance(error.__cause__, TransportError) or self._keeper.broken(number) is not None


class _Changing:
    """Copies of the buffers that training changes, of all workers of this process."""

    def __init__(self, local: LocalWorkers) -> None:
        changing = local.compiled.changing
        tensors = {id(one): one for worker in local.workers for name, one in worker.state.items() if name in changing}
        self._copies: list[tuple[Tensor, Tensor]] = [(one, one.detach().clone()) for one in tensors.values()]

    def restore(self) -> None:
        """Give the buffers the values that they had."""
        with torch.no_grad():
            for tensor, copy in self._copies:
                tensor.copy_(copy)
