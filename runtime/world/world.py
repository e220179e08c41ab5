"""The world of a job: its workers, the process that hosts each, and the epoch in which that is so.

Four numberings meet here, so each has a type of its own. A worker is a place of one replica's pipeline, and keeps its number
for the life of the job. Processes are numbered by their launcher. A change of roles gives workers to other processes, a change
of cut points gives places other stages. Either begins a new epoch.

A process is at home in one replica, whose batch it is given. Where processes are fewer than workers, some host workers of other
replicas too. All workers of a process are at one place, so they have one copy of the parameters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import Final, NamedTuple, NewType

from adaptra.errors import DataLostError, OptionError, StageLostError
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


class Survival(Enum):
    """How far a job goes on after the loss of processes."""

    NOT = "a loss ends it"
    WITH_HOMES = "as long as each place and each replica has a process"
    WITHOUT_HOMES = "as long as each place has a process"


@dataclass(frozen=True)
class World:
    """The workers of a job and their processes, from one change of these to the next.

    Attributes:
        epoch: The number of changes before.
        places: The number of workers of each replica's pipeline.
        hosts: The process of each worker, by worker.
        homes: The replica in which each of :attr:`processes` is at home.
        needs_homes: Whether each replica needs a process at home, which is given its batch.
        sites: The number of sites, each of as many consecutive replicas. Gradients are averaged within a site.
    """

    epoch: int
    places: int
    hosts: tuple[ProcessId, ...]
    homes: tuple[int, ...]
    needs_homes: bool = True
    sites: int = 1

    @staticmethod
    def of_roles(roles: Roles) -> World:
        """Return the first world of a job in which each process hosts the worker of its role."""
        return World(0, roles.stages, *_of_roles(roles))

    @staticmethod
    def of_threads(places: int) -> World:
        """Return the first world of one pipeline whose workers are threads of one process."""
        return World(0, places, (ProcessId(0),) * places, (0,))

    @staticmethod
    def of_fewer(processes: int, places: int, replicas: int) -> World:
        """Return the first world of a job in which the processes of each place host its workers evenly.

        With as many processes as workers it is that of consecutive roles.

        Raises:
            OptionError: A place has no process, or a replica is no process's home.
        """
        columns = [range(place, processes, places) for place in range(places)]
        if not min(processes, replicas) or not all(columns):
            raise OptionError(f"{processes} processes for {replicas} replicas of {places} ranks: expected at least {places}")
        hosts = [ProcessId(column[replica % len(column)]) for replica in range(replicas) for column in columns]
        homes = [min(_replicas_on(process, hosts, places)) for process in range(min(processes, len(hosts)))]
        for replica in sorted(set(range(replicas)).difference(homes)):
            others = sorted(hosts[replica * places : (replica + 1) * places], reverse=True)
            moved = next((one for one in others if homes.count(homes[one]) > 1), None)
            if moved is None:
                raise OptionError(f"{processes} processes for {replicas} replicas: expected one at home in each of them")
            homes[moved] = replica
        return World(0, places, tuple(hosts), tuple(homes))

    def followed_by(self, roles: Roles | None = None, *, sites: int | None = None) -> World:
        """Return the world of the next epoch, with other roles of its processes or other sites if they are given."""
        hosts, homes = (self.hosts, self.homes) if roles is None else _of_roles(roles)
        return replace(self, epoch=self.epoch + 1, hosts=hosts, homes=homes, sites=self.sites if sites is None else sites)

    def without(self, lost: Collection[ProcessId]) -> World:
        """Return the world of the next epoch, in which others of their columns host the workers of lost processes.

        Each worker goes to the process with the fewest workers, of these to the lowest one.

        Raises:
            StageLostError: All processes of a place are lost.
            DataLostError: All processes that are given the batch of a replica are lost, and it needs one.
        """
        hosts = [*self.hosts]
        for place in map(Place, range(self.places)):
            column = self.column(place)
            loads = Counter(host for host in self.hosts_of(column) if host not in lost)
            if not loads:
                who = ", ".join(map(str, sorted(set(self.hosts_of(column)))))
                raise StageLostError(f"all processes with the stages of place {place} are lost: rank {who}")
            for worker in column:
                if hosts[worker] in lost:
                    hosts[worker] = min(loads, key=lambda process: (loads[process], process))
                    loads[hosts[worker]] += 1
        homes = tuple(self.home(process) for process in self.processes if process not in lost)
        if self.needs_homes and (missing := sorted(set(range(self.replicas)).difference(homes))):
            raise DataLostError(f"all processes that are given the batch of replica {missing[0]} are lost")
        return replace(self, epoch=self.epoch + 1, hosts=tuple(hosts), homes=homes)

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

    @cached_property
    def processes(self) -> tuple[ProcessId, ...]:
        """The processes that host workers, in order."""
        return tuple(sorted(set(self.hosts)))

    def number(self, process: ProcessId) -> int:
        """Return a process's number among those of this world, as groups of all of them count."""
        return self.processes.index(process)

    def seat(self, worker: WorkerId) -> Seat:
        """Return the replica and the place that a worker is."""
        replica, place = divmod(worker, self.places)
        return Seat(replica, Place(place))

    def pipeline(self, replica: int) -> tuple[WorkerId, ...]:
        """Return the workers of a replica's pipeline, by place."""
        return tuple(WorkerId(replica * self.places + place) for place in range(self.places))

    def column(self, place: Place) -> tuple[WorkerId, ...]:
        """Return the workers that have copies of a place's stages, by replica."""
        return tuple(WorkerId(replica * self.places + place) for replica in range(self.replicas))

    def site(self, replica: int) -> int:
        """Return the site of a replica."""
        return replica // (self.replicas // self.sites)

    def peers(self, worker: WorkerId) -> tuple[WorkerId, ...]:
        """Return the workers that average gradients with a worker, by replica: those of its column in its site."""
        replica, place = self.seat(worker)
        size = self.replicas // self.sites
        first = replica // size * size
        return self.column(place)[first : first + size]

    def site_of(self, process: ProcessId) -> tuple[ProcessId, ...]:
        """Return the processes of the site in which a process is at home, in order."""
        site = self.site(self.home(process))
        return tuple(one for one in self.processes if self.site(self.home(one)) == site)

    def counterparts(self, worker: WorkerId) -> tuple[WorkerId, ...]:
        """Return the worker of each site that has the same place, and the same number among its peers."""
        peers = self.peers(worker)
        return self.column(self.seat(worker).place)[peers.index(worker) :: len(peers)]

    def hosted(self, process: ProcessId) -> tuple[WorkerId, ...]:
        """Return the workers that a process hosts, those of its home first."""
        home = self.home(process)
        here = [WorkerId(worker) for worker, host in enumerate(self.hosts) if host == process]
        return tuple(sorted(here, key=lambda worker: (self.seat(worker).replica != home, worker)))

    def home(self, process: ProcessId) -> int:
        """Return the replica in which a process is at home."""
        return self._home_of[process]

    @cached_property
    def _home_of(self) -> Mapping[ProcessId, int]:
        return dict(zip(self.processes, self.homes, strict=True))

    def is_guest(self, worker: WorkerId) -> bool:
        """Return whether a worker is of another replica than its process's home."""
        return self.home(self.hosts[worker]) != self.seat(worker).replica

    @cached_property
    def guests(self) -> frozenset[WorkerId]:
        """The workers that are guests."""
        return frozenset(filter(self.is_guest, map(WorkerId, range(len(self.hosts)))))

    @property
    def crowd(self) -> tuple[int, ...]:
        """The most workers that a process hosts, by place."""
        return tuple(max(Counter(self.hosts_of(self.column(Place(place)))).values()) for place in range(self.places))

    @property
    def has_guests(self) -> bool:
        """Whether any worker is a guest."""
        return bool(self.guests)

    def giver(self, replica: int) -> ProcessId:
        """Return the process that gives a replica's batch to those that host its workers and are at home elsewhere."""
        return self.processes[self.homes.index(replica)]

    def takers(self, replica: int) -> tuple[ProcessId, ...]:
        """Return the processes that host workers of a replica and are at home elsewhere."""
        return tuple(sorted({self.hosts[worker] for worker in self.pipeline(replica) if self.is_guest(worker)}))

    def hosts_of(self, workers: Iterable[WorkerId]) -> tuple[ProcessId, ...]:
        """Return the processes of some workers, one for each."""
        return tuple(self.hosts[worker] for worker in workers)


def _of_roles(roles: Roles) -> tuple[tuple[ProcessId, ...], tuple[int, ...]]:
    """Return the hosts and homes of processes that each have one role."""
    return tuple(map(ProcessId, roles.ranks)), tuple(roles.of(rank)[0] for rank in sorted(roles.ranks))


def _replicas_on(process: int, hosts: Sequence[ProcessId], places: int) -> list[int]:
    return [worker // places for worker, host in enumerate(hosts) if host == process]
