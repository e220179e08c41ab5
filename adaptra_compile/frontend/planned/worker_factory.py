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
from adaptra.runtime.data_parallel.gradient_averaging import Replicas
from adaptra.runtime.data_parallel.sites import Sites
from adaptra.runtime.devices.device_clock import OpClock
from adaptra.runtime.injection.emulation import Pacing
from adaptra.runtime.injection.failures import FailureLog, Failures
from adaptra.runtime.injection.faults import Fault, faults_of_worker
from adaptra.runtime.injection.faulty_transport import FaultyTransport
from adaptra.runtime.launch.connecting import on_threads
from adaptra.runtime.launch.job import Launch
from adaptra.runtime.measuring.monitor import Monitor
from adaptra.runtime.options import Options
from adaptra.runtime.options.recording_options import RecordingOptions
from adaptra.runtime.telemetry.options import Telemetry
from adaptra.runtime.telemetry.rank import RankTelemetry
from adaptra.runtime.telemetry.recorder import Recorder
from adaptra.runtime.telemetry.start import of_replica, start_recorder
from adaptra.runtime.transports.base import Transport
from adaptra.runtime.worker.stages.loss_reduction import Reduction
from adaptra.runtime.worker.step.device_turns import DeviceTurns
from adaptra.runtime.worker.step.rank_context import RankContext
from adaptra.runtime.worker.worker import Worker
from adaptra.runtime.world.world import WorkerId

Recorders = dict[int, Recorder]
"""The recorder of each replica whose workers this process has."""


@dataclass(frozen=True, slots=True)
class WorkerFactory:
    """Starts workers with the settings that do not depend on their role.

    Attributes:
        compiled: The stages.
        microbatches: Microbatches per step.
        planning: Functions that make later plans.
        faults: Faults to inject, of all workers.
        failed: The failures among them that have happened.
        options: Options of the runtime.
        reduction: How the losses of microbatches and replicas are reduced to that of the batch.
    """

    compiled: CompiledStages
    microbatches: int
    planning: Planning
    faults: Sequence[Fault]
    failed: FailureLog
    options: Options
    reduction: Reduction

    def workers(
        self,
        launched: Launch,
        recorders: Recorders,
        states: Sequence[Mapping[str, Tensor]],
        initial: Plan,
        first_step: int = 0,
    ) -> tuple[Worker, ...]:
        """Start the workers of this process. If one can't be started, those already started are closed.

        Args:
            launched: The ranks of this process.
            recorders: The recorders of events.
            states: Per worker, its stages' parameters and buffers by name.
            initial: The plan of the first step.
            first_step: The number of the first step.
        """
        emulated = initial.case.cost if self.options.emulate is not None else None
        run, hosts_guests = launched.job.run, len(launched.transports) > 1 and not launched.in_threads
        turns = DeviceTurns() if hosts_guests else None

        def start(parts: tuple[Transport, Replicas, Sites | None, Mapping[str, Tensor]]) -> Worker:
            transport, replicas, sites, state = parts
            replica = launched.replica_of(transport)
            folder = _telemetry(self.options, launched, replica).folder
            stages = stages_of(launched.pipeline_of(transport).rank, initial.case.placement)
            faults, number = tuple(faults_of_worker(self.faults, replica, stages)), WorkerId(transport.rank)
            may_fail_from = self.failed.enters(number, launched.world, first_step)
            faulty = FaultyTransport(transport, faults) if faults else None
            carrier = transport if faulty is None else faulty
            cut = _nothing if faulty is None else faulty.cut
            opened.callback(carrier.close)
            replicas.carry_over(carrier)
            pipeline = launched.pipeline_of(carrier)
            device = next((one.device for one in state.values()), launched.device)
            clock, placement = OpClock(device), tuple(initial.case.placement)
            context = RankContext(
                placement,
                pipeline,
                carrier,
                launched.world,
                launched.membership,
                replicas,
                sites,
                Monitor(pipeline.rank, placement, read=clock.read),
                clock,
                Pacing(emulated, faults),
                Failures(faults, self.failed, number, may_fail_from, cut, in_threads=launched.in_threads),
                device,
                self.options,
                turns,
            )
            recorder, path = recorders[replica], None if folder is None else Path(folder)
            telemetry = RankTelemetry(pipeline.rank, run, recorder, pipeline, path, perfetto.write)
            worker = Worker(
                self.compiled,
                state,
                self.microbatches,
                context,
                initial,
                self.planning,
                telemetry,
                first_step,
                self.reduction,
            )
            opened.callback(worker.close)
            return worker

        with ExitStack() as opened:
            parts = [*zip(launched.transports, launched.replicas, launched.sites, states, strict=True)]
            # Replicas measure their links as workers start, and each waits for the others.
            workers = on_threads(start, parts, launched.device) if hosts_guests else [*map(start, parts)]
            opened.pop_all()
        return tuple(workers)


def states_with_guests(
    launched: Launch, states: Sequence[Mapping[str, Tensor]], compiled: CompiledStages, before: Sequence[Worker] = ()
) -> list[Mapping[str, Tensor]]:
    """Return the state of each worker of this process, given those of its home replica.

    Guests have the same parameters. Buffers that training changes are a replica's own.

    Args:
        launched: The ranks of this process.
        states: Per worker of the home replica, its stages' parameters and buffers by name.
        compiled: The stages.
        before: The workers that end, whose guests' buffers go on where the home's are the same tensors. Those of a replica
            that was not hosted here go on with what was kept of it.
    """
    (home, *others), known = states, {worker.replica: worker for worker in before}
    earlier = known.get(launched.replica)

    def of_guest(replica: int) -> dict[str, Tensor]:
        last: Mapping[str, Tensor] = {}
        if earlier is not None:
            last = known[replica].state if replica in known else earlier.kept.values_of(replica)
        kept = {name: one for name, one in last.items() if earlier is not None and earlier.state.get(name) is home[name]}
        return {name: kept.get(name, one.clone()) if name in compiled.changing else one for name, one in home.items()}

    guests = [of_guest(replica) for replica in launched.replicas_here if replica != launched.replica]
    return [home, *others, *guests]


def open_recorders(
    options: RecordingOptions, launched: Launch, open_already: Mapping[int, Recorder] | None = None
) -> Recorders:
    """Open the recorders of events that the options ask for, beside those that are open already.

    That of this process's home has all sinks. Workers of other replicas have a folder's files alone.
    """
    recorders: Recorders = dict(open_already or {})
    with ExitStack() as opened:
        for replica in set(launched.replicas_here).difference(recorders):
            telemetry, on_event = _telemetry(options, launched, replica), options.on_event
            if replica != launched.replica:
                telemetry, on_event = Telemetry(folder=telemetry.folder), None
            recorders[replica] = start_recorder(telemetry, on_event, launched.ranks, launched.process)
            opened.callback(recorders[replica].close)
        opened.pop_all()
    return recorders


def _nothing(_seconds: float) -> None:
    """Cut nothing, as the worker has no faults."""


def close_all(recorders: Recorders) -> None:
    """Close the recorders of events."""
    for recorder in recorders.values():
        recorder.close()


def _telemetry(options: RecordingOptions, launched: Launch, replica: int) -> Telemetry:
    return options.telemetry if launched.world.replicas == 1 else of_replica(options.telemetry, replica)
