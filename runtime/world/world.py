"""The world of a job: its workers, the process that hosts each, and the epoch in which that is so.

Four numberings meet here, so each has a type of its own. A worker is a place of one replica's pipeline, and keeps its number
for the life of the job. Processes are numbered by their launcher. A change of roles gives workers to other processes, a change
of cut points gives places other stages. Either begins a new epoch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final, NamedTuple, NewType

from adaptra.program.roles import Roles

WorkerId = NewType("WorkerId", int)
"""A worker's number in the job: its replica times the places of a pipeline, plus its place."""
ProcessId = NewType("ProcessId", int)
"""A process's number in the job, which its launcher gave it."""
Place = NewType("Place", int)
"""A worker's number in the pipeline of its replica."""


class Seat(NamedTuple):
    """The replica and the place that a worker is."""

    replica: int
    place: Place


class Attempt(NamedTuple):
    """An attempt at the calls of a world. Of two attempts the later one is greater.

    Attributes:
        epoch: The world's epoch.
        number: The number of attempts in the world before.
    """

    epoch: int = 0
    number: int = 0

    def __str__(self) -> str:
        return f"attempt {self.number} of epoch {self.epoch}"


FIRST_ATTEMPT: Final = Attempt()
"""The attempt with which a job begins."""


@dataclass(frozen=True, slots=True)
class World:
    """The workers of a job and their processes, from one change of these to the next.

    Attributes:
        epoch: The number of changes before.
        places: The number of workers of each replica's pipeline.
        hosts: The process of each worker, by worker.
    """

    epoch: int
    places: int
    hosts: tuple[ProcessId, ...]

    @staticmethod
    def of_roles(roles: Roles) -> World:
        """Return the first world of a job in which each process hosts the worker of its role."""
        return World(0, roles.stages, tuple(map(ProcessId, roles.ranks)))

    @staticmethod
    def of_threads(places: int) -> World:
        """Return the first world of one pipeline whose workers are threads of one process."""
        return World(0, places, (ProcessId(0),) * places)

    def followed_by(self, roles: Roles | None = None) -> World:
        """Return the world of the next epoch, with other roles of its processes if they are given."""
        hosts = self.hosts if roles is None else tuple(map(ProcessId, roles.ranks))
        return replace(self, epoch=self.epoch + 1, hosts=hosts)

    @property
    def roles(self) -> Roles:
        """The role of each process.

        Raises:
            OptionError: A process hosts several workers.
        """
        return Roles(self.places, self.hosts)

    @property
    def replicas(self) -> int:
        """The number of replicas."""
        return len(self.hosts) // self.places

    @property
    def processes(self) -> tuple[ProcessId, ...]:
        """The processes that host workers, in order."""
        return tuple(sorted(set(self.hosts)))

    def seat(self, worker: WorkerId) -> Seat:
        """Return the replica and the place that a worker is."""
        replica, place = divmod(worker, self.places)
        return Seat(replica, Place(place))

    def pipeline(self, replica: int) -> tuple[WorkerId, ...]:
        """Return the workers of a replica's pipeline, by place."""
        return tuple(WorkerId(replica * self.places + place) for place in range(self.places))

    def column(self, place: Place) -> tuple[WorkerId, ...]:
        """Return the workers that have copies of a place's stages and average their gradients, by replica."""
        return tuple(WorkerId(replica * self.places + place) for replica in range(self.replicas))

    def hosted(self, process: ProcessId) -> tuple[WorkerId, ...]:
        """Return the workers that a process hosts."""
        return tuple(WorkerId(worker) for worker, host in enumerate(self.hosts) if host == process)

    def hosts_of(self, workers: Iterable[WorkerId]) -> tuple[ProcessId, ...]:
        """Return the processes of some workers, one for each."""
        return tuple(self.hosts[worker] for worker in workers)
