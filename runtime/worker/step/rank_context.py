"""What the parts of one rank share."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from adaptra.runtime.data_parallel.gradient_averaging import Replicas
from adaptra.runtime.data_parallel.sites import Sites
from adaptra.runtime.devices.device_clock import OpClock
from adaptra.runtime.injection.emulation import Pacing
from adaptra.runtime.injection.failures import Failures
from adaptra.runtime.measuring.monitor import Monitor
from adaptra.runtime.membership.process_membership import ProcessMembership
from adaptra.runtime.options import Options
from adaptra.runtime.transports.base import Transport
from adaptra.runtime.worker.step.device_turns import DeviceTurns
from adaptra.runtime.world.world import WorkerId, World


@dataclass(frozen=True, slots=True)
class RankContext:
    """One rank's place in the job, and what its parts use in common.

    Attributes:
        placement: ``placement[stage]`` is the stage's rank.
        transport: This rank's transport, which joins the ranks of its pipeline.
        job: The transport of all ranks of the job, of which that is a part; the same without replicas.
        world: The world of the job's workers.
        membership: This process's.
        replicas: The ranks that have copies of these stages, and average gradients with this one.
        sites: Those that do so in other sites; None where all replicas are one site.
        monitor: Records ops, messages, the flights of probes and the sum over replicas.
        clock: Marks the start and end of ops on this rank's device.
        pacing: Lengthens ops on emulated devices and slowed stages.
        failures: Has the worker fail as injected.
        device: The device of this rank's stages.
        options: Options of the runtime.
        turns: The turns of the workers of this process at its device; None if there is one worker.
        replica: This pipeline's number among the replicas.
    """

    placement: tuple[int, ...]
    transport: Transport
    job: Transport
    world: World
    membership: ProcessMembership
    replicas: Replicas
    sites: Sites | None
    monitor: Monitor
    clock: OpClock
    pacing: Pacing
    failures: Failures
    device: torch.device
    options: Options
    turns: DeviceTurns | None = None
    replica: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "replica", self.world.seat(WorkerId(self.worker)).replica)  # each step asks for it some times

    @property
    def is_guest(self) -> bool:
        """Whether this worker is of another replica than its process's home, whose worker has the same parameters."""
        return self.world.is_guest(WorkerId(self.worker))

    @property
    def rank(self) -> int:
        """This rank in its pipeline."""
        return self.transport.rank

    @property
    def ranks(self) -> int:
        """The number of ranks of the pipeline."""
        return len(set(self.placement))

    @property
    def worker(self) -> int:
        """This rank's worker in the job."""
        return self.transport.worker_of(self.rank)
