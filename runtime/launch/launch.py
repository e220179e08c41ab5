"""The ranks of a pipeline: threads of this process, or the processes that a launcher such as torchrun started."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Final, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import DistError

from adaptra.checks import nearest_multiple
from adaptra.errors import LaunchError, OptionError, PeerLostError
from adaptra.planning.synchrony.modes import Apart, Local, XOrder, check_mode
from adaptra.program.roles import Roles
from adaptra.runtime.control_store.secret import VARIABLE, fingerprint, given_secret
from adaptra.runtime.control_store.signed_store import signed, under
from adaptra.runtime.control_store.spare_clients import Reservation
from adaptra.runtime.control_store.stores import Connection, own_address, rank_0_has
from adaptra.runtime.data_parallel.gradient_averaging import Replicas
from adaptra.runtime.data_parallel.sites import Sites
from adaptra.runtime.exchange.store_exchange import Check, exchange, no_check
from adaptra.runtime.launch.arguments import agree_on_arguments
from adaptra.runtime.launch.carriers import NO_DELEGATE, Carriers, DelegateSetup
from adaptra.runtime.launch.connecting import connect, on_threads
from adaptra.runtime.launch.environment import is_told_of_others
from adaptra.runtime.launch.several_hosts import check_launcher
from adaptra.runtime.membership.membership import Membership
from adaptra.runtime.membership.process_membership import Awaited, Listener, ProcessMembership, Told
from adaptra.runtime.survival.keeper import EpochKeeper
from adaptra.runtime.transports.base import Transport
from adaptra.runtime.transports.local import LocalHub
from adaptra.runtime.transports.nccl.join import check_device
from adaptra.runtime.transports.pipeline_transport import PipelineTransport
from adaptra.runtime.transports.process_groups import (
    Members,
    end_group,
    end_keys,
    end_waits,
    end_waits_of_user,
    forget,
    job_store,
    keys_of,
    new_group,
    new_group_of_user,
    own_client,
    sweep,
)
from adaptra.runtime.world.world import Attempt, Place, ProcessId, Survival, WorkerId, World

logger = logging.getLogger(__name__)

T = TypeVar("T")

HOST: Final = torch.device("cpu")
_ADOPTED: Final = 3
"""The workers that a process has clients of the store for, beside those that it hosts from the start."""


class Wanted(NamedTuple):
    """What a job's first world is to be.

    Attributes:
        roles: The replica and stage of each rank of the job. Or the number of replicas: with fewer ranks than workers, ranks
            host several. None for as many replicas as consecutive ranks make.
        survives: How far the job goes on after the loss of processes.
        apart: How sites update by themselves; None where all replicas are one site.
    """

    roles: Roles | int | None = None
    survives: Survival = Survival.NOT
    apart: Apart | None = None


NO_WISH: Final = Wanted()
"""The world that consecutive ranks make."""


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
        call: The number of this launch in the job.
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
        call: int,
        contributed: str,
        timeout: float,
        spares: Reservation,
        averages: bool = True,
        survives_in: World | None = None,
    ) -> None:
        self.rank = dist.get_rank()
        self.ranks = dist.get_world_size()
        self._carriers = carriers
        self._keys = _name_of_call(call)
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


def is_launched() -> bool:
    """Return True if this process is one of several that a launcher started or that have joined a process group.

    Raises:
        LaunchError: See :func:`.environment.is_told_of_others`.
    """
    if not dist.is_available():
        return False
    return dist.is_initialized() or dist.is_torchelastic_launched() or is_told_of_others(os.environ)


def world_size() -> int:
    """Return the number of ranks of the job, also before they have met; 1 without a launcher."""
    if not is_launched():
        return 1
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def launch(
    size: int,
    transport: str | None,
    arguments: Mapping[str, str],
    timeout: float,
    *,
    device: torch.device = HOST,
    placement: Sequence[int] | None = None,
    delegate: DelegateSetup = NO_DELEGATE,
    wanted: Wanted = NO_WISH,
) -> Launch:
    """Find the ranks of a pipeline. Under a launcher all ranks call it at the same time.

    Args:
        size: The number of ranks of the pipeline.
        transport: ``"local"``, ``"c10d"``, ``"delegate"``, ``"nccl"``, the name of an installed transport, or None. None is
            local without a launcher, else c10d between hosts' memory and the delegate between GPUs.
        arguments: The user's arguments by name, which the ranks compare first.
        timeout: Seconds to wait for the other ranks.
        device: The device on which this process trains.
        placement: The place of each stage in its pipeline; None for one on each.
        delegate: How the delegate is set up.
        wanted: The replicas and sites of the job, and how far it survives.

    Raises:
        OptionError: Its replicas can't be such sites; says why.
        LaunchError: The job can't survive a loss; says why.
        LaunchError: The delegate is requested beside a transport other than c10d and NCCL. Or NCCL is for a model that is on no
            GPU. Or the ranks don't make ``replicas`` of ``size``, or are not a multiple of it; says what to change. Or a rank
            has other arguments or has not come; names it.
        PeerLostError: A rank failed or died while the ranks connected; names it.
    """
    roles, survives, apart = wanted
    goes_on = survives is not Survival.NOT
    between = "delegate" if goes_on or (device.type == "cuda" and not delegate.is_beside) else "c10d"
    name = transport or (between if is_launched() else "local")
    if delegate.is_beside and name not in ("c10d", "nccl"):
        raise LaunchError(
            f"Options(delegate=...) with transport {name!r}: expected c10d or nccl, whose slow edges the delegate takes over"
        )
    if name == "nccl":
        check_device(device)
    if name == "local" and not goes_on:
        return _in_threads(size, device, wanted)
    if goes_on and name != "delegate":
        raise LaunchError(
            f"Options(survive=True) with transport {name!r}: expected several processes over 'delegate', whose connections "
            "begin anew without a lost rank"
        )
    if not is_launched():
        raise LaunchError(
            f"transport {name!r} needs {size} processes: start this script with torchrun --nproc-per-node={size}, or call "
            "torch.distributed.init_process_group yourself; without a launcher use transport='local'"
        )
    if not dist.is_initialized():
        check_launcher(os.environ, socket.gethostname())
        dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    in_a_column = max(1, ranks // size)
    replicas = roles if isinstance(roles, int) else in_a_column
    hosted = -(-replicas // in_a_column)
    carriers = Carriers(name, delegate, device, tuple(range(size)) if placement is None else placement)
    most = min(hosted + _ADOPTED, replicas) if goes_on else hosted
    spares = Reservation(carriers.clients(most, survives=goes_on))
    # Making groups waits for all ranks, so the ranks first agree on which groups to make.
    call = job_store().add(f"adaptra launches/{rank}", 1)
    contributed = agree_on_arguments(
        keys_of(_name_of_call(call)), rank, ranks, {**arguments, VARIABLE: fingerprint(given_secret())}, timeout
    )
    if rank == 0:
        sweep()
    world = replace(_world(size, ranks, roles, name), needs_homes=survives is not Survival.WITHOUT_HOMES)
    if apart is not None:
        world = replace(world, sites=sites_of(world, apart))
    if goes_on and rank == 0 and rank_0_has(job_store()):
        logger.warning(
            "Options(survive=True): rank 0 has the job's store, so its loss ends the job: start the processes by adaptra run, "
            "whose supervisor has the store"
        )
    if goes_on and world.replicas == 1:
        raise LaunchError(
            f"Options(survive=True) with {ranks} ranks for one replica of {size}: expected several replicas, as those of other "
            "replicas go on with a lost rank's stages"
        )
    averages = world.replicas > 1 or world.hosts != tuple(range(size))
    job = Job(carriers, call, contributed, timeout, spares, averages, world if goes_on else None)
    try:
        return job.enter(world)
    except BaseException:
        job.membership.close()
        raise


def _in_threads(size: int, device: torch.device, wanted: Wanted) -> Launch:
    """Join threads of this process.

    Raises:
        LaunchError: Several replicas are wanted.
        OptionError: Sites are wanted.
    """
    if isinstance(wanted.roles, int) and wanted.roles != 1:
        raise LaunchError(
            f"replicas={wanted.roles}: expected 1 without a launcher; start {size} to {wanted.roles * size} processes"
        )
    world = World.of_threads(size)
    if wanted.apart is not None:
        check_mode(wanted.apart, world.replicas)
    return OneProcess(ProcessMembership(), device).enter(world)


def sites_of(world: World, apart: Apart | None) -> int:
    """Return the number of sites that a world's replicas make up in a mode; one where every update has all gradients.

    Raises:
        OptionError: They can't; says why.
    """
    if apart is None:
        return 1
    check_mode(apart, world.replicas)
    if isinstance(apart, XOrder) and apart.x == world.replicas:
        return 1  # all of them are exact
    if world.has_guests:
        raise OptionError(
            f"{apart!r} with {len(world.processes)} ranks for {len(world.hosts)} workers: expected a rank for each worker, as "
            "the workers of a rank have the same parameters, and those of sites differ"
        )
    return (apart.sites if isinstance(apart, Local) else None) or world.replicas


def _world(size: int, ranks: int, roles: Roles | int | None, transport: str) -> World:
    """Return the job's first world.

    Raises:
        LaunchError: The ranks don't make such a job; says what to change.
    """
    if isinstance(roles, Roles):
        return World.of_roles(roles)
    if roles is None and ranks % size:
        raise LaunchError(
            f"{ranks} ranks for a pipeline of {size}: expected a multiple of {size} ranks (more make data-parallel replicas); "
            f"start {nearest_multiple(ranks, size)} processes, ask for another number of stages, or give replicas= to have "
            "some ranks host several workers"
        )
    count = ranks // size if roles is None else roles
    least, most = max(size, count), count * size
    if not least <= ranks <= most:
        raise LaunchError(
            f"{ranks} ranks for replicas={count} of {size} ranks: expected {least} to {most}: each of its {most} workers needs "
            "one, which may host others of the same stages, and each replica one that is given its batch"
        )
    if ranks < most and transport == "nccl":
        raise LaunchError(
            f"transport 'nccl' with {ranks} ranks for {most} workers: expected transport='delegate', as NCCL takes a GPU once"
        )
    try:
        return World.of_fewer(ranks, size, count)
    except OptionError as error:
        raise LaunchError(str(error)) from error


def _name_of_call(call: int) -> str:
    """Return the name that all ranks share for their first, second, … call of :func:`launch`."""
    return f"adaptra launch {call}"
