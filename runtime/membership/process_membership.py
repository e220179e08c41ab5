"""The membership of one process: its workers have it in common, through all changes of roles and of cut points.

A worker that fails here ends the waits of the others here at once. The job's other processes hear of it by
:class:`.membership.Membership`, which knows processes only.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from adaptra.errors import PeerLostError
from adaptra.runtime.membership.cause import failure_error, failure_of, placed

if TYPE_CHECKING:
    from adaptra.runtime.membership.membership import Membership
    from adaptra.runtime.transports.base import Identity
    from adaptra.runtime.world.world import WorkerId

Told = Callable[[PeerLostError], object]
Awaited = Callable[[int], "Identity | None"]


def _nothing(process: int) -> Identity | None:
    """Return None: no message is awaited."""


@dataclass(frozen=True, slots=True, eq=False)
class Listener:
    """One user of the membership.

    Attributes:
        end: Called when another process, another worker of this one or the store is lost; ends this user's waits.
        awaited_from: Returns the message that this user waits for from a process.
        worker: The worker that it is; None if it is none.
    """

    end: Told
    awaited_from: Awaited = _nothing
    worker: WorkerId | None = None


class ProcessMembership:
    """This process's part in a job, from the launch to the end of its pipeline.

    Args:
        join: Joins the job's other processes, given what to call after a loss, and what returns the message that is awaited
            from a process. None for a process that is alone.
    """

    def __init__(self, join: Callable[[Told, Awaited], Membership] | None = None) -> None:
        self._lock = threading.Lock()
        self._listeners: tuple[Listener, ...] = ()
        self._lost: PeerLostError | None = None
        self._failed: tuple[Listener, PeerLostError] | None = None
        self._others = None if join is None else join(self._end_all, self._awaited_from)

    def add(self, listener: Listener) -> None:
        """Tell a user of a loss, at once if one is known."""
        with self._lock:
            self._listeners = (*self._listeners, listener)
            lost = self._lost
        if lost is not None:
            listener.end(lost)

    def remove(self, listener: Listener) -> None:
        """Tell a user no more. May be called again."""
        with self._lock:
            self._listeners = tuple(one for one in self._listeners if one is not listener)

    def fail(self, listener: Listener, error: BaseException, *, of_store: BaseException | None = None) -> BaseException:
        """Report that a user failed: to the other processes, as :meth:`.Membership.fail`, then to the other workers here.

        Returns:
            The error to be raised: the failure of another worker, of another process or of the store if that was first.
        """
        worker, failure = listener.worker, failure_of(error, None, None)
        is_new = False
        if worker is not None:
            with self._lock:
                is_new = self._failed is None
                first, by_first = self._failed = self._failed or (listener, failure_error(worker, failure, worker))
            if first is not listener:
                return placed(self._lost or by_first, failure)
        cause = error if self._others is None else self._others.fail(error, of_store=of_store)
        if worker is not None and is_new and cause is error:
            for other in self._listeners:
                if other.worker is not None and other is not listener:
                    other.end(failure_error(worker, failure, other.worker))
        return cause

    @property
    def lost(self) -> PeerLostError | None:
        """The loss of another process or of the store, if there was one."""
        return self._lost

    @property
    def has_lost_a_process(self) -> bool:
        """See :attr:`.Membership.has_lost_a_process`."""
        return self._others is not None and self._others.has_lost_a_process

    @property
    def has_lost_the_store(self) -> bool:
        """See :attr:`.Membership.has_lost_the_store`."""
        return self._others is not None and self._others.has_lost_the_store

    def lose(self, lost: PeerLostError) -> None:
        """End the waits of all users, now and later, since the workers can't go on together."""
        self._end_all(lost)

    @property
    def tells_of_losses(self) -> bool:
        """Whether it finds by itself which process is lost."""
        return self._others is not None

    def leave(self) -> None:
        """Report that this process leaves the job; see :meth:`.Membership.leave`."""
        if self._others is not None:
            self._others.leave()

    def close(self) -> None:
        """Leave the job and wait until the others know; see :meth:`.Membership.close`. May be called again."""
        if self._others is not None:
            self._others.close()

    def _end_all(self, lost: PeerLostError) -> None:
        with self._lock:
            self._lost = self._lost or lost
            listeners = self._listeners
        for listener in listeners:
            listener.end(lost)

    def _awaited_from(self, process: int) -> Identity | None:
        return next(filter(None, (listener.awaited_from(process) for listener in self._listeners)), None)
