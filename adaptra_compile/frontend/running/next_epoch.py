"""The next epoch of a running pipeline: workers that begin anew after the loss of processes, where the old ones stood."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from adaptra.frontend.planned.stage_planning import PipelineSpec
from adaptra.frontend.planned.worker_factory import open_recorders, states_with_guests
from adaptra.frontend.running.hosted_batches import HostedBatches
from adaptra.frontend.running.local_workers import LocalWorkers
from adaptra.runtime.control.plans.events import EventKind
from adaptra.runtime.world.world import World


class NextEpoch:
    """Begins epochs in this process.

    Args:
        spec: Plans the pipeline.
        local: The workers of this process.
        batches: The batches of its workers.
    """

    def __init__(self, spec: PipelineSpec, local: LocalWorkers, batches: HostedBatches) -> None:
        self._spec = spec
        self._local = local
        self._batches = batches

    def enter(self, world: World, why: str) -> None:
        """Go on with new workers in a world, at the step at which the old ones ended. All its processes call it.

        Args:
            world: The world.
            why: How the epoch before it has broken.

        Raises:
            PeerLostError, TransportError, ControlError: This epoch has broken too.
        """
        local, before = self._local, self._local.workers
        ended = local.launched.world.processes
        planned = self._spec.within(world).planned(local.compiled)
        local.leave()
        with ExitStack() as opened:
            launched = local.launched.enter(world)
            for transport in launched.transports:
                opened.callback(transport.close)
            recorders = open_recorders(self._spec.options, launched, local.recorders)
            states = states_with_guests(launched, [worker.state for worker in local.home], planned.compiled, before)
            first = before[0].numbers
            workers = planned.factory.workers(launched, recorders, states, planned.initial, first.next_step)
            opened.pop_all()
        earlier = {(worker.replica, worker.rank): worker for worker in before}
        for worker in workers:
            worker.numbers.steps_before = first.steps_before
            if (same := earlier.get((worker.replica, worker.rank))) is not None:
                worker.controller.go_on_after(same.controller)
            worker.kept.kept = before[0].kept.kept
        local.run_by(planned, launched, workers, recorders)
        self._batches.begin()
        if launched.is_first:
            self._tell(gone=sorted(set(ended).difference(world.processes)), why=why)

    def _tell(self, gone: Sequence[int], why: str) -> None:
        """Tell people what has been lost, and who hosts it now, by events of the first rank."""
        recorder, world = self._local.workers[0].controller.recorder, self._local.launched.world
        if not gone:
            return
        recorder.emit_now(EventKind.LOST, f"rank {', '.join(map(str, gone))}: {why}")
        for process in world.processes:
            seats = [world.seat(worker) for worker in world.hosted(process) if world.is_guest(worker)]
            if seats:
                guests = ", ".join(f"{seat.replica}.{seat.place}" for seat in seats)
                recorder.emit_now(EventKind.HOSTED, f"rank {process} hosts worker {guests} of replica and place")
