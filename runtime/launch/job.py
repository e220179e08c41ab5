"""The processes of a job, and the workers that this one runs: threads of it alone, or its part of those of all processes."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Final, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import DistError

from adaptra.errors import PeerLostError
from adaptra.program.roles import Roles
from adaptra.runtime.control_store.signed_store import signed, under
from adaptra.runtime.control_store.spare_clients import Reservation
from adaptra.runtime.control_store.stores import Connection, own_address, rank_0_has
from adaptra.runtime.data_parallel.gradient_averaging import Replicas
from adaptra.runtime.data_parallel.sites import Sites
from adaptra.runtime.exchange.store_exchange import Check, exchange, no_check
from adaptra.runtime.launch.carriers import Carriers
from adaptra.runtime.launch.connecting import connect, on_threads
from adaptra.runtime.membership.membership import Membership
from adaptra.runtime.membership.process_membership import Awaited, Listener, ProcessMembership, Told
from adaptra.runtime.survival.keeper import EpochKeeper
from adaptra.runtime.transports.base import Transport
from adaptra.runtime.transports.local import LocalHub
from adaptra.runtime.transports.pipeline_transport import PipelineTransport
from adaptra.runtime.transports.process_groups import (
    Members,
    end_group,
    end_keys,
    end_waits,
    end_waits_of_user,
    forget,
    keys_of,
    new_group,
    new_group_of_user,
    own_client,
    sweep,
)
from adaptra.runtime.world.world import Attempt, Place, ProcessId, WorkerId, World

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Launch:
    """The workers that this process runs, and what joins them to others.

    Attributes:
        transports: The job's, one per worker run here: all of one pipeline as threads, or those that this process hosts, of its
            home first. Their ranks are workers.
        world: The world that they are in.
        process: This process.
        membership: This process's, from its launch on.
        replicas: The peers in other pipelines, of each worker run here.
        sites: The counterparts in other sites, of each worker run here; None where all replicas are one site.
        device: The device on which this process trains, with its number if there are several.
        job: Joins this process to others.
    """

    transports: tuple[Transport, ...]
    world: World
    process: ProcessId
    membership: ProcessMembership
    replicas: tuple[Replicas, ...]
    sites: tuple[Sites | None, ...]
    device: torch.device
    job: Job | OneProcess

    @property
    def in_order(self) -> bool:
        """Whether a transport has one queue for all messages between two ranks, as NCCL has."""
        return any(transport.contract.in_order for transport in self.transports)

    @property
    def ranks(self) -> list[Place]:
        """The places of the workers run here in their pipelines, each once."""
        return list(dict.fromkeys(self.world.seat(worker).place for worker in self.world.hosted(self.process)))

    @property
    def replica(self) -> int:
        """The replica in which this process is at home."""
        return self.world.home(self.process)

    @property
    def replicas_here(self) -> list[int]:
        """The replica of each worker run here."""
        return [*map(self.replica_of, self.transports)]

    def replica_of(self, transport: Transport) -> int:
        """Return the replica of a worker run here, by its transport or one that wraps it."""
        return self.world.seat(WorkerId(transport.rank)).replica

    @property
    def is_first(self) -> bool:
        """Whether this process is the first of the job."""
        return self.process == self.world.processes[0]

    @property
    def row(self) -> tuple[ProcessId, ...]:
        """The processes of this process's pipeline, by place."""
        return self.world.hosts_of(self.world.pipeline(self.replica))

    @property
    def roles(self) -> Roles | None:
        """The roles of all processes; None if they can't change."""
        return self.world.roles if self.job.averages and not self.world.has_guests else None

    @property
    def in_threads(self) -> bool:
        """Whether all workers are threads of this process, which share its memory."""
        return isinstance(self.job, OneProcess)

    @property
    def everyone(self) -> dist.ProcessGroup:
        """The group of all processes of the world, as of :attr:`Job.everyone`."""
        assert isinstance(self.job, Job), "threads of one process need no group"
        return self.job.everyone

    @contextmanager
    def waiting(self) -> Generator[None]:
        """Enclose a wait in the group of :attr:`everyone`, which ends with a RuntimeError once a process is lost."""
        listener = Listener(lambda _: end_waits(self.everyone))
        self.membership.add(listener)
        try:
            yield
        finally:
            self.membership.remove(listener)

    def wait_for_all(self) -> None:
        """Wait until all processes of the world come here.

        Raises:
            RuntimeError: One is lost.
        """
        with self.waiting():
            self.everyone.allreduce([torch.zeros(1)]).wait()

    def group_of_user(self) -> dist.ProcessGroup:
        """Make a group as :meth:`Job.group_of_user`."""
        assert isinstance(self.job, Job), "threads of one process need no group"
        return self.job.group_of_user()

    def pipeline_of(self, transport: Transport) -> Transport:
        """Return the part of one of these transports, or of one that wraps it, that joins the workers of its pipeline."""
        if self.world.replicas == 1:
            return transport
        replica = self.replica_of(transport)
        return PipelineTransport(transport, replica, self.world.pipeline(replica))

    @property
    def attempt(self) -> Attempt:
        """The attempt that its transports are in."""
        return self.transports[0].attempt

    def tell(self, what: str, text: str, timeout: float, check: Check = no_check) -> list[str]:
        """Tell all processes of the job a text; all of them call it. Texts of one attempt alone meet.

        Args:
            what: What is told, for errors.
            text: This process's text.
            timeout: Seconds to wait for the others.
            check: As of :func:`.exchange.gather`.

        Returns:
            The text of every process, by its number.

        Raises:
            LaunchError: Processes have not come within ``timeout`` seconds; names them.
            ControlError: The store is lost.
        """
        return self.job.tell(self.attempt, what, text, timeout, check)

    def meet(self, timeout: float, check: Check = no_check, text: str = "") -> list[str]:
        """Tell a text as :meth:`tell` before a change of all processes, for which those of the job then have a group.

        Raises:
            PeerLostError: A rank failed or died when all had come; names it.
            As :meth:`tell`.
        """
        said = self.tell("change", text, timeout, check)
        self.job.prepare_change()
        return said

    def give_up(self) -> None:
        """Leave the job before a worker has begun."""
        self.job.leave()
        self.membership.leave()
        for transport in self.transports:
            transport.close()
        self.membership.close()

    def end(self) -> None:
        """Release the groups that were made for this world, once its transports are closed and nothing has failed."""
        for joined in filter(None, (*self.replicas, *self.sites)):
            joined.end()

    def enter(self, world: World) -> Launch:
        """Join the workers of this process in a later world. All processes call it with the same one.

        What joins them in this world stays until it is ended.

        Raises:
            PeerLostError: As :meth:`Job.enter`.
        """
        return self.job.enter(world)


class OneProcess:
    """The only process of a job, whose workers are threads.

    Args:
        membership: This process's.
        device: The device on which it trains.

    Attributes:
        averages: False: roles can't change.
        ranks: One.
        keeper: None: there is no other process to lose.
        run: The name of this start of the job.
    """

    averages: Final = False
    ranks: Final = 1
    keeper: Final = None

    def __init__(self, membership: ProcessMembership, device: torch.device) -> None:
        self._membership = membership
        self._device = device
        self.run: Final = _new_run()

    def enter(self, world: World) -> Launch:
        """Join the workers in a world."""
        hub, workers = LocalHub(world.places), world.pipeline(0)
        transports = tuple(map(hub.transport, workers))
        replicas = (Replicas(world, workers[0], "threads", self._device),) * len(workers)
        sites = (None,) * len(workers)
        return Launch(transports, world, ProcessId(0), self._membership, replicas, sites, self._device, self)

    def tell(self, _attempt: Attempt, _what: str, text: str, _timeout: float, _check: Check) -> list[str]:
        """Return the only text."""
        return [text]

    def prepare_change(self) -> None:
        """Do nothing, as nothing joins a process to itself."""

    def forget_before(self, world: World) -> None:
        """Do nothing, as no epoch breaks."""

    def leave(self) -> None:
        """Do nothing, as nobody hears of this process."""

    def close(self) -> None:
        """Do nothing, as no group was made."""


class Job:
    """This process among those of a job.

    Args:
        carriers: What carries the messages of its workers.
        keys: The name of this launch, which all ranks of the job share and no other launch has.
        contributed: A digest over what all ranks sent in this launch; see :func:`.signed_store.signed`.
        timeout: As of :func:`launch`.
        spares: The store's clients that this job may use.
        averages: Whether there are replicas, or roles that were given, which can change.
        survives_in: The first world of a job that survives the loss of processes; None if a loss ends the job.

    Attributes:
        rank: This process's rank in the job.
        averages: As given.
        store: The store of this launch, shared by all its ranks.
        ranks: The number of ranks of the job.
        membership: This process's in this launch, or in the present epoch of a job that survives. Its user closes it.
        keeper: Keeps this process in the epochs of a job that survives; None if a loss ends the job.
    """

    def __init__(
        self,
        carriers: Carriers,
        keys: str,
        contributed: str,
        timeout: float,
        spares: Reservation,
        averages: bool = True,
        survives_in: World | None = None,
    ) -> None:
        self.rank = dist.get_rank()
        self.ranks = dist.get_world_size()
        self._carriers = carriers
        self._keys = keys
        self.store = signed(keys_of(self._keys), self._keys, [contributed])
        self._spares = spares
        self._told: dict[str, tuple[Attempt, int]] = {}
        self._forgotten = 0
        self.averages = averages
        self._everyone: dist.ProcessGroup | None = None
        self._joined: tuple[int, tuple[ProcessId, ...]] | None = None
        self._timeout = timeout
        self.membership = ProcessMembership(self._join if self.ranks > 1 and survives_in is None else None)
        self.keeper = None
        if survives_in is not None:
            self.keeper = EpochKeeper(self.store, ProcessId(self.rank), survives_in, self._lose, end_waits_of_user)

    def _lose(self, lost: PeerLostError) -> None:
        self.membership.lose(lost)

    def _join(self, told: Told, awaited: Awaited) -> Membership:
        return Membership(
            Connection(under("membership", self.store)),
            self.rank,
            self.ranks,
            told,
            waiting_for=awaited,
            busy_after=self._timeout,
            address=own_address(self.store),
            store_host=0 if rank_0_has(self.store) else None,
        )

    @property
    def run(self) -> str:
        """The name of this start of the job, the same on all of its ranks and no other's, from one world to the next."""
        return self.store.compare_set("run", "", _new_run()).decode()

    @property
    def everyone(self) -> dist.ProcessGroup:
        """The group of all processes of the world, in their order. If roles can't change, it exists once all have met."""
        assert self._everyone is not None, "the ranks of the job have met"
        return self._everyone

    def enter(self, world: World) -> Launch:
        """Join the workers of this process in a world. All processes call it with the same one, having met.

        Raises:
            PeerLostError: Another rank failed or died before all had joined; names it.
        """
        self._world = world
        if self.keeper is not None:
            if world.epoch > self.keeper.epoch.world.epoch:
                self.keeper.move(world)
            self.membership = ProcessMembership()
            # What has broken before is told to nobody again.
            if (lost := self.keeper.broken(world.epoch)) is not None:
                self.membership.lose(lost)
        if self.averages:
            self._join_everyone()
        launched = self.connect(lambda: self._enter(world, f"{self._keys}/{world.epoch}"))
        if self.keeper is not None and world.epoch:
            threading.Thread(target=self._fill_spares, name="adaptra opens clients", daemon=True).start()
        return launched

    def _fill_spares(self) -> None:
        with suppress(DistError):  # who needs the store finds it lost
            self._spares.fill()

    def connect(self, make: Callable[[], T]) -> T:
        """Connect this rank to others; see :func:`.connecting.connect`."""
        return make() if self.ranks == 1 else connect(self.membership, self.rank, make)

    def _enter(self, world: World, name: str) -> Launch:
        process, device = ProcessId(self.rank), self._carriers.device
        workers = world.hosted(process)
        backend = "gloo" if world.has_guests else None  # NCCL takes each device once

        def join(worker: WorkerId) -> tuple[Transport, Replicas, Sites | None]:
            with own_client() if len(workers) > 1 else nullcontext():
                transport = self._carriers.join(Members(f"{name}/workers", worker, len(world.hosts)), world)
                if world.epoch:
                    transport.begin(Attempt(world.epoch))
                of_site = f"{name}/site {world.site(world.seat(worker).replica)}" if world.sites > 1 else name
                replicas = Replicas(world, worker, of_site, device, backend)
                return transport, replicas, Sites(world, worker, name, self.connect) if world.sites > 1 else None

        joined = on_threads(join, workers, device)
        transports, replicas, sites = zip(*joined, strict=True)
        return Launch(transports, world, process, self.membership, replicas, sites, device, self)

    def _join_everyone(self) -> None:
        """Make the group of all processes of the world, unless there is one of the same processes."""
        epoch, processes = self._world.epoch, self._world.processes
        for_epoch = 0 if self.keeper is None else epoch  # whose predecessor may have broken
        if self._joined == (for_epoch, processes):
            return
        members = Members(f"{self._keys}/{epoch}/all", processes.index(ProcessId(self.rank)), len(processes))
        before, self._everyone = self._everyone, self.connect(lambda: new_group(members, "gloo"))
        self._joined = (for_epoch, processes)
        if before is not None:
            end_group(before)

    def group_of_user(self) -> dist.ProcessGroup:
        """Make a group of the processes of the world for collectives of the user's. All of them call it, once for each epoch.

        Raises:
            RuntimeError: One is lost. The epoch has broken then.
        """
        assert self.keeper is not None, "no process is lost but in a job that survives"
        world = self._world
        number = world.processes.index(ProcessId(self.rank))
        members = Members(f"{self._keys}/{world.epoch}/user", number, len(world.processes))
        self.keeper.begin_call()
        try:
            return self.connect(lambda: new_group_of_user(members, world.processes))
        except RuntimeError as error:
            self.keeper.broke(world.epoch, error)
            raise
        finally:
            self.keeper.end_call()

    def forget_before(self, world: World) -> None:
        """Remove what the epochs before that of a world have left in the store, once that one has broken too.

        All its processes had left the others by then. Their records stay: a process that wakes late finds its way by them.
        """
        if self.rank != world.processes[0]:
            return
        for epoch in range(self._forgotten, world.epoch):
            forget(f"{self._keys}/{epoch}")
            forget(f"{self._keys}//survival/{epoch}/census")
        self._forgotten = world.epoch

    def leave(self) -> None:
        """Take no part in later epochs."""
        if self.keeper is not None:
            self.keeper.close()

    def close(self) -> None:
        """Release the objects made for role changes and cut changes. Nothing may have failed."""
        everyone, self._everyone = self._everyone, None
        if everyone is not None:
            end_group(everyone)
        end_keys(self._keys, self.rank, dist.get_world_size())
        self._spares.end()

    def tell(self, attempt: Attempt, what: str, text: str, timeout: float, check: Check) -> list[str]:
        """See :meth:`Launch.tell`."""
        before, count = self._told.get(what, (attempt, 0))
        number = count + 1 if before == attempt else 1
        self._told[what] = attempt, number
        name, store = f"{what}/{number}", under(str(attempt), self.store)
        said = exchange(store, name, self.rank, text, self._world.processes, timeout, check)
        if count:  # all ranks have read the previous text, since all are here
            under(str(before), self.store).delete_key(f"{what}/{count}/{self.rank}")
        return said

    def prepare_change(self) -> None:
        """Remove what groups have left in the store, and join all processes of the world. All of them have met."""
        if self.rank == 0:
            sweep()
        self._join_everyone()


def _new_run() -> str:
    return secrets.token_hex(6)
