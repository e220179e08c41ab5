"""The start of this process's workers: first in each rank's initial role, and again after every change of roles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from adaptra.graph import CompiledStages
from adaptra.program.placement import stages_of
from adaptra.report import perfetto
from adaptra.runtime.control.deciding.replanning import Planning
from adaptra.runtime.control.plans.plan import Plan
from adaptra.runtime.devices.device_clock import OpClock
from adaptra.runtime.injection.emulation import Pacing
from adaptra.runtime.injection.faults import Fault, faults_of_worker
from adaptra.runtime.injection.faulty_transport import FaultyTransport
from adaptra.runtime.launch.launch import Launch
from adaptra.runtime.measuring.monitor import Monitor
from adaptra.runtime.options import Options
from adaptra.runtime.options.recording_options import RecordingOptions
from adaptra.runtime.telemetry.options import Telemetry
from adaptra.runtime.telemetry.rank import RankTelemetry
from adaptra.runtime.telemetry.recorder import Recorder
from adaptra.runtime.telemetry.start import of_replica, start_recorder
from adaptra.runtime.worker.stages.loss_reduction import Reduction
from adaptra.runtime.worker.step.rank_context import RankContext
from adaptra.runtime.worker.worker import Worker


@dataclass(frozen=True, slots=True)
class WorkerFactory:
    """Starts workers with the settings that do not depend on their role.

    Attributes:
        compiled: The stages.
        microbatches: Microbatches per step.
        planning: Functions that make later plans.
        faults: Faults to inject, of all workers.
        options: Options of the runtime.
        reduction: How the losses of microbatches and replicas are reduced to that of the batch.
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
        """Start a worker for every rank of this process. If one can't be started, those already started are closed.

        Args:
            launched: The ranks of this process.
            recorder: The recorder of events.
            states: Per rank, its stage's parameters and buffers by name.
            initial: The plan of the first step.
            first_step: The number of the first step.
        """
        folder = _telemetry(self.options, launched).folder
        folder = None if folder is None else Path(folder)
        emulated = initial.case.cost if self.options.emulate is not None else None
        replica, run = launched.replica, launched.job.run
        workers: list[Worker] = []
        with ExitStack() as opened:
            for transport, state in zip(launched.transports, states, strict=True):
                stages = stages_of(launched.pipeline_of(transport).rank, initial.case.placement)
                faults = tuple(faults_of_worker(self.faults, replica, stages))
                carrier = FaultyTransport(transport, faults) if faults else transport
                opened.callback(carrier.close)
                pipeline = launched.pipeline_of(carrier)
                device = next((one.device for one in state.values()), launched.device)
                clock, placement = OpClock(device), tuple(initial.case.placement)
                context = RankContext(
                    placement,
                    pipeline,
                    carrier,
                    launched.world,
                    launched.membership,
                    launched.replicas,
                    Monitor(pipeline.rank, placement, read=clock.read),
                    clock,
                    Pacing(emulated, faults),
                    device,
                    self.options,
                )
                worker = Worker(
                    self.compiled,
                    state,
                    self.microbatches,
                    context,
                    initial,
                    self.planning,
                    RankTelemetry(pipeline.rank, run, recorder, pipeline, folder, perfetto.write),
                    first_step,
                    self.reduction,
                )
                opened.callback(worker.close)
                workers.append(worker)
            opened.pop_all()
        return tuple(workers)


def open_recorder(options: RecordingOptions, launched: Launch) -> Recorder:
    """Open the recorder of events that the options ask for."""
    return start_recorder(_telemetry(options, launched), options.on_event, launched.ranks, launched.process)


def _telemetry(options: RecordingOptions, launched: Launch) -> Telemetry:
    return options.telemetry if launched.world.replicas == 1 else of_replica(options.telemetry, launched.replica)
