"""Starting the workers of this process: in the role that each rank has first, and again whenever it takes another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from adaptra.graph import CompiledStages
from adaptra.report import perfetto
from adaptra.runtime.control.plan import Plan
from adaptra.runtime.control.replanning import Planning
from adaptra.runtime.injection.emulation import Pacing
from adaptra.runtime.injection.faults import Fault
from adaptra.runtime.injection.faulty_transport import FaultyTransport
from adaptra.runtime.launch.launch import Launch
from adaptra.runtime.options import Options
from adaptra.runtime.telemetry.options import Telemetry
from adaptra.runtime.telemetry.rank import RankTelemetry
from adaptra.runtime.telemetry.recorder import Recorder
from adaptra.runtime.telemetry.start import of_replica, start_recorder
from adaptra.runtime.worker.loss_reduction import Reduction
from adaptra.runtime.worker.worker import Worker


@dataclass(frozen=True, slots=True)
class WorkerFactory:
    """What workers are started with, whatever their role.

    Attributes:
        compiled: The stages.
        microbatches: Microbatches per step.
        planning: How to make later plans.
        faults: Faults to inject.
        options: How the runtime behaves.
        reduction: How the losses of microbatches and replicas become that of the batch.
    """

    compiled: CompiledStages
    microbatches: int
    planning: Planning
    faults: Sequence[Fault]
    options: Options
    reduction: Reduction

    def workers(
        self,
        launched: Launch,
        recorder: Recorder,
        states: Sequence[Mapping[str, Tensor]],
        initial: Plan,
        first_step: int = 0,
    ) -> tuple[Worker, ...]:
        """A worker for every rank run here. If one can't be started, those that were are closed.

        Args:
            launched: The ranks.
            recorder: Is told what happens.
            states: Per rank, its stage's parameters and buffers by name.
            initial: The plan of the first step.
            first_step: Its number.
        """
        folder = _telemetry(self.options, launched).folder
        pacing = Pacing(initial.case.cost if self.options.emulate is not None else None, self.faults)
        workers: list[Worker] = []
        with ExitStack() as opened:
            for transport, state in zip(launched.transports, states, strict=True):
                carrier = FaultyTransport(transport, self.faults) if self.faults else transport
                opened.callback(carrier.close)
                worker = Worker(
                    self.compiled,
                    state,
                    self.microbatches,
                    carrier,
                    initial,
                    self.planning,
                    launched.replicas,
                    pacing,
                    RankTelemetry(
                        transport.rank, recorder, transport, None if folder is None else Path(folder), perfetto.write
                    ),
                    self.options,
                    first_step,
                    self.reduction,
                )
                opened.callback(worker.close)
                workers.append(worker)
            opened.pop_all()
        return tuple(workers)


def open_recorder(options: Options, launched: Launch) -> Recorder:
    """Open what the user wants to be told by."""
    ranks = [transport.rank for transport in launched.transports]
    first = ranks[0] if launched.job is None else launched.job.rank
    return start_recorder(_telemetry(options, launched), options.on_event, ranks, first)


def _telemetry(options: Options, launched: Launch) -> Telemetry:
    return of_replica(options.telemetry, None if launched.replicas is None else launched.replicas.index)
