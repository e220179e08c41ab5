"""The end of one rank's waits: its own errors are reported to all ranks, and those of others end what it waits for."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager

from adaptra.errors import AdaptraError, LaunchError, PeerLostError
from adaptra.runtime.control.controller import Controller
from adaptra.runtime.control_store.stores import error_of_store
from adaptra.runtime.injection.points import Moment
from adaptra.runtime.membership.process_membership import Listener
from adaptra.runtime.telemetry.rank import RankTelemetry
from adaptra.runtime.transports.base import Identity
from adaptra.runtime.worker.call_numbers import CallNumbers
from adaptra.runtime.worker.step.rank_context import RankContext
from adaptra.runtime.world.world import ProcessId, WorkerId
from adaptra.weakly import weakly


class RankErrors:
    """Reports one rank's errors to all ranks, and ends its waits by the first failure of any.

    Args:
        context: The rank.
        numbers: The numbers of its calls.
        telemetry: Takes the failure.

    Attributes:
        explain: Returns the cause of an error, for the user and the other ranks.
    """

    def __init__(self, context: RankContext, numbers: CallNumbers, telemetry: RankTelemetry) -> None:
        self.explain: Callable[[Exception, Callable[[], bool]], Exception] = _as_it_is
        self._context = context
        self._numbers = numbers
        self._telemetry = telemetry
        self._aborted_by: Exception | None = None
        self._controller: Controller | None = None
        self._listener = Listener(weakly(self.abort), weakly(self._awaited_from), WorkerId(context.job.rank))

    def listen(self, controller: Controller) -> None:
        """Learn of other processes' failures from now on. They end the waits of this rank's control too."""
        self._controller = controller
        self._context.membership.add(self._listener)

    def close(self) -> None:
        """Learn of no more failures."""
        self._context.membership.remove(self._listener)

    def fail(self, error: Exception) -> Exception:
        """Report to all ranks that this rank can't continue.

        Returns:
            The first failure of any rank, to be raised in place of ``error``.
        """
        # A lost rank has its own name, whatever error showed it. A store that tells who is late has answered.
        of_store = None if isinstance(error, PeerLostError | LaunchError) else error_of_store(error)
        cause = self._context.membership.fail(self._listener, error, of_store=of_store)
        cause = cause if isinstance(cause, Exception) else error
        self.abort(cause)
        self._telemetry.failed(self._numbers.next_step, cause, self._context.monitor)
        return cause

    @property
    def has_failed(self) -> bool:
        """True if an error has ended this rank's waits."""
        return self._aborted_by is not None

    def abort(self, error: Exception) -> None:
        """End all waits of this rank, now and later, with this error. Any thread may call it."""
        if self._aborted_by is None:
            self._aborted_by = error
        self._context.transport.abort(error)
        if self._controller is not None:
            self._controller.abort(error)
        self._context.replicas.abort()
        if self._context.sites is not None:
            self._context.sites.abort()

    def abort_by_control(self, error: BaseException) -> None:
        """End this rank's waits for messages after a failure of the control plane, which informs the other ranks itself."""
        self._context.transport.abort(error if isinstance(error, Exception) else AdaptraError(str(error)))

    def check(self) -> None:
        """Raise the error that has ended this rank's waits, if there is one."""
        if self._aborted_by is not None:
            raise self._aborted_by

    @contextmanager
    def reporting(self) -> Generator[None]:
        """Report an error to all ranks, and raise the first failure of any rank in its place."""
        try:
            self._context.failures.at(self._numbers.next_step - 1, Moment.OPTIMIZER)
            yield
        except Exception as error:
            ended_by = self._aborted_by if isinstance(error, PeerLostError) else None
            cause = self.fail(ended_by or self._placed(self.explain(error, self._has_lost_a_process)))
            if cause is error:
                raise
            raise cause from error

    @contextmanager
    def meeting(self, *, all_ranks: bool = False) -> Generator[None]:
        """Enclose a call between steps in which ranks of the pipeline wait for each other; errors as in a step."""
        self._context.monitor.meet(all_ranks=all_ranks)
        with self.reporting():
            yield

    def _has_lost_a_process(self) -> bool:
        return self._context.membership.has_lost_a_process

    def _awaited_from(self, process: int) -> Identity | None:
        """Return the message that this rank waits for from a process."""
        hosted = self._context.world.hosted(ProcessId(process))
        return next(filter(None, map(self._context.job.waiting_for, hosted)), None)

    def _placed(self, error: Exception) -> Exception:
        """Convert an error that names a worker of another process to one with that process's number."""
        hosts = self._context.world.hosts
        if not isinstance(error, PeerLostError) or error.rank is None:
            return error
        lost = hosts[error.rank]
        if lost in (error.rank, hosts[self._context.job.rank]):
            return error
        message = f"{error} (worker {error.rank} is the job's rank {lost})"
        return PeerLostError(message, rank=lost, edge=error.edge, op=error.op)


def _as_it_is(error: Exception, is_known: Callable[[], bool]) -> Exception:
    """Return the error itself, as no other cause is known."""
    return error
