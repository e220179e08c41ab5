"""The next epoch of a running pipeline: workers that begin anew after the loss of processes, where the old ones stood."""

from __future__ import annotations

from collections.abc import Sequence

from adaptra.frontend.planned.stage_planning import PipelineSpec
from adaptra.frontend.running.local_workers import LocalWorkers
from adaptra.frontend.running.next_workers import NextWorkers
from adaptra.runtime.control.plans.events import EventKind
from adaptra.runtime.world.world import World


class NextEpoch:
    """Begins epochs in this process.

    Args:
        spec: Plans the pipeline.
        local: The workers of this process.
        next_workers: Begins those in their place.
    """

    def __init__(self, spec: PipelineSpec, local: LocalWorkers, next_workers: NextWorkers) -> None:
        self._spec = spec
        self._local = local
        self._next_workers = next_workers

    def enter(self, world: World, why: str) -> None:
        """Go on with new workers in a world, at the step at which the old ones ended. All its processes call it.

        Args:
            world: The world.
            why: How the epoch before it has broken.

        Raises:
            PeerLostError, TransportError, ControlError: This epoch has broken too.
        """
        local = self._local
        ended = local.launched.world.processes
        planned = self._spec.within(world).planned(local.compiled)
        local.leave()
        with self._next_workers.joined(world) as (launched, opened):
            states = [worker.state for worker in local.home]
            self._next_workers.begin(planned, launched, states, opened, local.recorders)
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
