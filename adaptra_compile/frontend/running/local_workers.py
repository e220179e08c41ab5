"""The workers of this process: called all together, and ended for good once one has failed."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, TypeVar

import torch

from adaptra.errors import AdaptraError, LaunchError, OptionError, PeerLostError, PipelineError, StateError
from adaptra.frontend.arguments.shared_models import Sharing
from adaptra.frontend.planned.stage_planning import PlannedPipeline
from adaptra.frontend.planned.worker_factory import Recorders, close_all
from adaptra.graph import CompiledStages
from adaptra.graph.capture.collectives import refuse_context_parallel
from adaptra.graph.ops.autocast import refuse_autocast
from adaptra.planning.synchrony.modes import Local, XOrder
from adaptra.runtime.control.calls import Calls
from adaptra.runtime.launch.job import Job, Launch
from adaptra.runtime.options.stage_options import Synchrony
from adaptra.runtime.reconfigure.consent import Consent, check_consents
from adaptra.runtime.worker.worker import Worker

if TYPE_CHECKING:
    from adaptra.frontend.running.redone_calls import RedoneCalls
    from adaptra.frontend.running.sharded_parameters import ShardedParameters

Result = TypeVar("Result")

logger = logging.getLogger(__name__)


class LocalWorkers:
    """The workers of this process, one per rank here. All of them run a call, and after a failure no further one.

    Others begin in their place after a change of roles, of cut points or of the model.

    Args:
        planned: The planned pipeline with which the workers were started.
        launched: The ranks of this process.
        workers: One worker per rank of this process, in order of ranks.
        recorders: The recorders of the workers' events.
        sharing: The pipeline's use of the model's tensors.

    Attributes:
        planned, launched, workers: Those that run now.
        home: The workers of this process's home replica. Others have the same parameters.
        sharing: As given.
        calls: Compares the calls of all processes; None for one process.
        redone: Does calls again in a job that survives; None in others.
        recorders: As given, those of the workers that run now.
        shards: The parameters of each sharded optimizer.
    """

    def __init__(
        self, planned: PlannedPipeline, launched: Launch, workers: Sequence[Worker], recorders: Recorders, sharing: Sharing
    ) -> None:
        self.sharing = sharing
        self.redone: RedoneCalls | None = None
        self.shards: weakref.WeakKeyDictionary[torch.optim.Optimizer, ShardedParameters] = weakref.WeakKeyDictionary()
        self._failure: BaseException | None = None
        self._warned: set[str] = set()
        self.calls: Calls | None = None
        job = launched.job
        if isinstance(job, Job) and job.ranks > 1:
            end_by = weakref.WeakMethod(self._end_by)
            self.calls = Calls(job.store, job.rank, job.ranks, lambda error: _call(end_by, error))
            weakref.finalize(self, self.calls.close)
        self._end_membership = weakref.finalize(self, launched.membership.close)
        weakref.finalize(self, job.leave)
        self.run_by(planned, launched, workers, recorders)
        sharing.begin(self)

    def _end_by(self, error: Exception) -> None:
        """End all waits of this process, since ranks have called different methods."""
        for worker in self.workers:
            worker.errors.abort(error)

    def run_by(self, planned: PlannedPipeline, launched: Launch, workers: Sequence[Worker], recorders: Recorders) -> None:
        """Run by these workers from now on. Those before them have ended: see :meth:`end`."""
        self.planned = planned
        self._threads = ThreadPoolExecutor(len(workers), "adaptra-rank") if len(workers) > 1 else None
        self.launched = launched
        self.workers = tuple(workers)
        self.home = tuple(worker for worker in workers if worker.replica == launched.replica)
        self.recorders = recorders
        self._failure = None
        if self.calls is not None:
            # Where some sites suffice, one may have made more calls than another.
            apart, world = planned.factory.options.apart, launched.world
            by_site = world.sites > 1 and not (isinstance(apart, Local) and apart.quorum is None)
            self.calls.begin(world.site_of(launched.process) if by_site else world.processes, lambda: launched.attempt)
            for worker in self.workers if launched.job.keeper is None else ():  # a call that breaks is done again at once
                worker.errors.explain = self.calls.explain
        # Also if the process ends without a close, since the transports' threads must not outlive the interpreter.
        self._end = weakref.finalize(self, _end_for_good, self.workers, self._threads, recorders, launched)

    @property
    def compiled(self) -> CompiledStages:
        """The stages."""
        return self.planned.compiled

    @property
    def synchrony(self) -> Synchrony:
        """What an update waits for now."""
        return self.planned.factory.options.first_synchrony

    @property
    def have_copies(self) -> bool:
        """Whether ranks of other processes have copies of this process's state, and all can compare them."""
        return not self.launched.in_threads and self.workers[0].values.shares_values and self.go_on

    @property
    def go_on(self) -> bool:
        """Whether they have neither been closed nor failed."""
        return self.is_open and self._failure is None

    @property
    def is_open(self) -> bool:
        """Return whether they have not been closed."""
        return self._end.alive

    def require_running(self) -> None:
        """Refuse further calls after the end.

        Raises:
            PipelineError: The pipeline is closed or has failed.
        """
        if not self._end.alive and self._failure is None:
            raise PipelineError("this pipeline is closed: call adaptra.compile for another one")
        if self._failure is not None:
            raise PipelineError(
                "this pipeline has failed and can't go on: close it, call adaptra.compile again and load the last checkpoint; "
                f"it failed by {type(self._failure).__name__}: {self._failure}"
            ) from self._failure

    @contextmanager
    def at_the_door(self) -> Generator[None]:
        """Check a batch within this context, before anything runs.

        If all ranks are in this process, a refused batch changes nothing. Ranks of other processes may already wait for this
        one's messages, so a refused batch then ends the pipeline on all of them.
        """
        self.require_running()
        with self._reporting_errors(others_wait=not self.workers[0].is_alone):
            refuse_autocast("a pipeline's step")
            refuse_context_parallel("a pipeline's step")
            yield

    @contextmanager
    def _reporting_errors(self, *, others_wait: bool) -> Generator[None]:
        try:
            yield
        except Exception as error:
            if not self.launched.in_threads and others_wait:
                self._failure = error
                self.workers[0].errors.fail(error)
            raise

    def on_every_rank(
        self,
        run: Callable[[Worker], Result],
        call: str,
        commit: Callable[[Worker], None] | None = None,
        settle: Callable[[], None] = lambda: None,
    ) -> list[Result]:
        """Run a function on every worker of this process, each on its own thread, and wait for all.

        In a job that survives, it is done again where it breaks.

        Args:
            run: The function to run.
            call: The method of the pipeline that the user has called. All ranks call it.
            commit: Run in the same way once that has run on all of them. It waits for no other rank.
            settle: Called between the two.

        Raises:
            PipelineError: The pipeline is closed or has failed.
            Exception: The error of the first worker that failed; the others' errors only say that it failed. The pipeline has
                failed then.
        """
        if self.redone is not None:
            return self.redone.made(call, lambda: self._on_every_rank(run, call, commit, settle))
        return self._on_every_rank(run, call, commit, settle)

    def made(self, name: str, call: Callable[[], Result]) -> Result:
        """Make a call that all ranks make. In a job that survives, all of it is done again where it breaks."""
        return call() if self.redone is None else self.redone.made(name, call)

    def _on_every_rank(
        self,
        run: Callable[[Worker], Result],
        call: str,
        commit: Callable[[Worker], None] | None,
        settle: Callable[[], None],
    ) -> list[Result]:
        self.require_running()
        try:
            with self.called(call):
                results = self._run(run)
                settle()
                if self.redone is None:
                    self.at_certificate()
                else:
                    self.redone.certify(call)
                if commit is not None:
                    self._run(commit)
            self.sharing.has_trained = self.workers[0].numbers.next_step > 0
            return results
        except BaseException as error:
            self._failure = error
            raise

    def at_certificate(self) -> None:
        """Have each worker fail that is to fail once a step has run."""
        for worker in self.workers:
            worker.at_certificate()

    def fail_by(self, error: Exception) -> None:
        """Make no further call, since the job has ended by this error."""
        self._failure = error
        if self.calls is not None:  # which may have asked while this process was cut off
            self.calls.interrupt()

    def _run(self, run: Callable[[Worker], Result]) -> list[Result]:
        if self._threads is None:
            return [run(self.workers[0])]
        run_as_here = _as_on_this_thread(run)
        futures = [self._threads.submit(run_as_here, worker) for worker in self.workers]
        try:
            errors = [error for error in (future.exception() for future in futures) if error is not None]
        except BaseException as error:
            # Ctrl-C, for example, reaches this thread only, and the ranks would continue without it.
            for worker in self.workers:
                worker.errors.abort(PipelineError(f"the step was interrupted: {type(error).__name__}"))
            raise
        if errors:
            raise next((error for error in errors if not isinstance(error, PeerLostError)), errors[0])
        return [future.result() for future in futures]

    def meet_sites(self, call: str) -> None:
        """Exchange what sites have learnt, where they may be steps apart, before a call for which all ranks wait.

        One that is behind needs the others for its updates until it comes here.

        Args:
            call: The method of the pipeline that the user has called.
        """
        mode, numbers = self.synchrony, self.workers[0].numbers
        are_apart = isinstance(mode, XOrder) or (isinstance(mode, Local) and mode.quorum is not None)
        if are_apart and numbers.next_step > numbers.first_step:
            self.on_every_rank(Worker.exchange, call)

    @contextmanager
    def called(self, call: str) -> Generator[None]:
        """Check within this context that the ranks of all processes call the same method: see :class:`Calls`."""
        with nullcontext() if self.calls is None else self.calls.during(call):
            yield

    @contextmanager
    def changing(self, what: str) -> Generator[None]:
        """Fail the pipeline on any error in this context, since all ranks of the job make the change together.

        A rank that ends stays until the others know why, since the store of the job may end with it.
        """
        try:
            yield
        except BaseException as error:
            self._failure = error
            if isinstance(error, Exception):
                is_group = isinstance(error, RuntimeError) and not isinstance(error, AdaptraError)
                failed = PeerLostError(f"{what}: a rank is lost: {error}") if is_group else error
                cause = failed if self.launched.in_threads else self.workers[0].errors.fail(failed)
                if what != "batch" and self.launched.job.keeper is not None:  # a change can't be made again
                    self.launched.job.keeper.fail(error)
                # Each rank finds by itself that ranks differ or are late, and says it better than another's report does.
                self._failure = error if isinstance(error, LaunchError) else cause
                if self._failure is not error:
                    raise self._failure from error
            raise

    def agreed(
        self,
        what: str,
        call: str,
        ready: Callable[[], tuple[Result, Consent]],
        timeout: float,
        *,
        carries_deferred: bool = False,
    ) -> Result:
        """Prepare a move and wait until every rank of the job can move. Otherwise no rank moves.

        Args:
            what: The kind of move, for error texts.
            call: The method of the pipeline that the user has called. All ranks call it.
            ready: Prepares the move, and returns its result and this process's consent.
            timeout: Seconds to wait for the other ranks.
            carries_deferred: Whether microbatches that are deferred to the next step are in it after the move.

        Returns:
            The result of ``ready``.

        Raises:
            StateError: A rank can't move. The pipeline continues as before.
        """

        def meet(consent: Consent) -> list[str]:
            with self.called(call), self.changing(what):
                return self.launched.meet(timeout, self.check, consent.encode())

        try:
            if not carries_deferred:
                self.require_nothing_deferred(call)
            for worker in self.workers:
                worker.updates.hand_over()
            result, consent = ready()
        except Exception as error:
            meet(Consent.refused(error))
            raise
        check_consents(what, meet(consent))
        return result

    def require_nothing_deferred(self, call: str) -> None:
        """Refuse a call that would lose microbatches, or compute them with other parameters. All ranks refuse it alike.

        Raises:
            StateError: Some are deferred to the next step.
        """
        deferral = self.workers[0].updates.deferral
        if deferral is not None and any(deferral.deferred):
            raise StateError(
                f"{call}: {sum(deferral.deferred)} microbatches are deferred to the next step: expected a call after a step "
                "that defers nothing, for which all ranks call pipe.defer_nothing() before"
            )

    def warn_of_deferred(self, call: str) -> None:
        """Log once for a method that what it returns lacks microbatches, if any are deferred to the next step."""
        deferral = self.workers[0].updates.deferral
        if deferral is not None and any(deferral.deferred) and call not in self._warned:
            self._warned.add(call)
            logger.warning(
                f"{call}: {sum(deferral.deferred)} microbatches are deferred to the next step, and are not in this state: call "
                "pipe.defer_nothing() before the step after which you save"
            )

    def defer_nothing(self) -> None:
        """Have the next step take in all microbatches.

        Raises:
            OptionError: Steps have no deadline.
        """
        for worker in self.workers:
            if worker.updates.deferral is None:
                raise OptionError("defer_nothing: steps have no deadline: expected Options(synchrony=adaptra.Deadline(...))")
            worker.updates.deferral.defers_nothing = True

    def check(self) -> None:
        """Raise the error that has ended this process's waits for other ranks, if there is one."""
        self.workers[0].errors.check()

    def end(self) -> None:
        """End the workers, for others in their place. This process stays in the job."""
        if (found := self._end.detach()) is not None:
            _end(*found[2])

    def leave(self) -> None:
        """End the workers of an epoch that has broken, beside what follows. What records their events stays open."""
        if (found := self._end.detach()) is not None:
            workers, threads, _, launched = found[2]
            ended = workers, threads, launched
            threading.Thread(target=_end_beside, args=ended, name="adaptra ends an epoch", daemon=True).start()

    def close(self) -> None:
        """End all workers. It may be called again."""
        if self.calls is not None:
            self.calls.close(informs=True)
        was_open = self._end.alive
        self._end()
        self.redone = None  # which refers to this
        self.launched.job.leave()
        self._end_membership()
        if was_open and self._failure is None:
            self.launched.job.close()


def _as_on_this_thread(run: Callable[[Worker], Result]) -> Callable[[Worker], Result]:
    """Return the same function for another thread, with this thread's number of threads for kernels, and the rank's device.

    Libraries below torch, such as MKL, use torch's number only on threads on which it was set or read. On other threads they
    use their own number, which changes the order of sums.
    """
    count = torch.get_num_threads()

    def run_so(worker: Worker) -> Result:
        if torch.get_num_threads() != count:
            torch.set_num_threads(count)
        if worker.device.type == "cuda":
            torch.cuda.set_device(worker.device)
        return run(worker)

    return run_so


def _call(method: weakref.WeakMethod[Callable[[Exception], None]], error: Exception) -> None:
    if (bound := method()) is not None:
        bound(error)


def _end_for_good(
    workers: Sequence[Worker], threads: ThreadPoolExecutor | None, recorders: Recorders, launched: Launch
) -> None:
    """Close all workers of this process, having told the others that it leaves the job.

    It also ends a process that has not closed its pipeline.
    """
    deferral = workers[0].updates.deferral
    if deferral is not None and deferral.deferred[deferral.replica] and not any(worker.errors.has_failed for worker in workers):
        logger.warning(
            f"{deferral.deferred[deferral.replica]} microbatches of replica {deferral.replica} were deferred to a step "
            "that does not come: call pipe.defer_nothing() before the last step"
        )
    launched.membership.leave()
    _end(workers, threads, recorders, launched)


def _end_beside(workers: Sequence[Worker], threads: ThreadPoolExecutor | None, launched: Launch) -> None:
    """Close the workers of an epoch that has broken, and what joined them to others."""
    for worker in workers:
        worker.close(goes_on=True)
    if threads is not None:
        threads.shutdown()
    for replicas in launched.replicas:
        replicas.release()
    launched.job.forget_before(launched.world)


def _end(workers: Sequence[Worker], threads: ThreadPoolExecutor | None, recorders: Recorders, launched: Launch) -> None:
    """Close all workers of this process."""
    for worker in workers:
        worker.close()
    if threads is not None:
        threads.shutdown()
    close_all(recorders)
    if not any(worker.errors.has_failed for worker in workers):
        launched.end()
