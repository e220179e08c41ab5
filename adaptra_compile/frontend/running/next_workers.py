"""The next workers of a process: they begin where those before them ended, and take their place."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

from torch import Tensor

from adaptra.frontend.planned.stage_planning import PlannedPipeline
from adaptra.frontend.planned.worker_factory import Recorders, close_all, open_recorders, states_with_guests
from adaptra.frontend.running.hosted_batches import HostedBatches
from adaptra.frontend.running.local_workers import LocalWorkers
from adaptra.runtime.launch.job import Launch
from adaptra.runtime.options.recording_options import RecordingOptions
from adaptra.runtime.world.world import World


class NextWorkers:
    """Begins workers in a later world.

    Args:
        options: What records their events.
        local: The workers of this process, in whose place others begin.
        batches: The batches of its workers.
    """

    def __init__(self, options: RecordingOptions, local: LocalWorkers, batches: HostedBatches) -> None:
        self._options = options
        self._local = local
        self._batches = batches

    @contextmanager
    def joined(self, world: World) -> Generator[tuple[Launch, ExitStack]]:
        """Yield what joins the workers in a world, and a stack that closes it unless :meth:`begin` is reached.

        Raises:
            PeerLostError: As :meth:`adaptra.runtime.launch.job.Launch.enter`.
        """
        with ExitStack() as opened:
            launched = self._local.launched.enter(world)
            for transport in launched.transports:
                opened.callback(transport.close)
            yield launched, opened

    def begin(
        self,
        planned: PlannedPipeline,
        launched: Launch,
        states: Sequence[Mapping[str, Tensor]],
        opened: ExitStack,
        recorders: Recorders | None = None,
        owners: Mapping[str, int] | None = None,
    ) -> Sequence[Mapping[str, Tensor]]:
        """Go on with new workers, at the step at which the old ones ended.

        Args:
            planned: What they run.
            launched: What joins them.
            states: Per worker of the home replica, its stages' parameters and buffers by name.
            opened: Closes what they use until they have begun, and nothing afterwards.
            recorders: The recorders that are open still.
            owners: The replica that owns each parameter of a sharded optimizer; None where all are as before.

        Returns:
            The state of each worker, with those of guests.
        """
        before, kept_open = self._local.workers, recorders or {}
        (first, *_), earlier = before, {(worker.replica, worker.rank): worker for worker in before}
        recorders = open_recorders(self._options, launched, kept_open)
        opened.callback(close_all, {replica: one for replica, one in recorders.items() if replica not in kept_open})
        states = states_with_guests(launched, states, planned.compiled, before)
        workers = planned.factory.workers(launched, recorders, states, planned.initial, first.numbers.next_step)
        opened.pop_all()
        for worker in workers:
            worker.go_on_at(first.numbers.training_step, first.updates.count)
            worker.kept.kept = first.kept.kept
            worker.go_on_with(first.owners if owners is None else owners)
            if worker.updates.tail is not None and first.updates.tail is not None:
                worker.updates.tail.go_on_after(first.updates.tail)
            # With another role it goes on from that of this process.
            same = earlier.get((worker.replica, worker.rank), first if worker is workers[0] else None)
            if same is not None:
                worker.controller.go_on_after(same.controller)
        self._local.run_by(planned, launched, workers, recorders)
        self._batches.begin()
        return states
