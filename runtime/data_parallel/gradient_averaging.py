"""Gradient averaging: the ranks with the same stage in other pipelines combine their gradients after every step.

The ranks of a job report failures to each other (see :mod:`adaptra.runtime.membership.membership`). That does not end the wait
for an operation of a group. So a rank that fails, or learns of a failure, closes the connections of its own groups. It asks no
store for that: the store may be what is lost.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from adaptra.collectives.buckets import LEAST_BYTES, LEAST_DEVICE_BYTES, best_bucket_bytes, bucket_bytes
from adaptra.collectives.ports import Ports, measured_ports
from adaptra.collectives.rounds import Algorithm
from adaptra.collectives.seconds import slowest
from adaptra.errors import ControlError, PeerLostError, TransportError
from adaptra.runtime.data_parallel.collectives.carriers import TransportPosts
from adaptra.runtime.data_parallel.collectives.engine import GroupSum
from adaptra.runtime.data_parallel.collectives.some_ranks import SomeRanks
from adaptra.runtime.devices.read_later import ReadLater, moved_to
from adaptra.runtime.transports.base import Transport
from adaptra.runtime.transports.link_probe import PROBE_BYTES, measure_links
from adaptra.runtime.transports.process_groups import (
    Members,
    broken_peer,
    end_group,
    end_waits,
    from_rank,
    is_gloo,
    new_group,
)
from adaptra.runtime.world.world import ProcessId, WorkerId, World
from adaptra.simulation.links import Link

T = TypeVar("T")

MEASURED_ROUNDS: Final = 3
"""The number of other replicas to which each one measures its link. So many replicas start no later than few."""

MEASURED_BYTES: Final = MEASURED_ROUNDS * PROBE_BYTES
"""The bytes that leave each port meanwhile."""


@dataclass(frozen=True, slots=True)
class PendingBroadcast:
    """A broadcast of a tensor by the first replica.

    Attributes:
        replicas: The ranks concerned.
        tensor: The first replica's values after :meth:`wait`; on that replica it must not change before.
        work: The operation under way.
    """

    replicas: Replicas
    tensor: Tensor
    work: dist.Work

    def wait(self) -> Tensor:
        """Wait for the tensor and return it.

        Raises:
            PeerLostError: The first replica has failed.
        """
        self.replicas.wait_for(self.work)
        return self.tensor


class Replicas:
    """Workers that have copies of one stage, and two groups of them, from the begin of a world to its end.

    One replica alone has no group, as it has all that there is. Everything but steps has a group of its own: a rank that alone
    evaluates must not meet a step's gradients.

    Args:
        world: The workers of the job and their processes.
        worker: This one.
        name: No other world's of this job, and with the place no other workers'.
        device: The device of this worker's gradients.
        backend: The backend of the groups, None for the job's own.
        among: These workers, in the order of sums; None for the worker's peers, which average gradients with it.

    Attributes:
        index: This worker's number among them.
        count: Their number.
        link: The slowest of the measured links between them; None before :meth:`measure`, and where none are measured.
        ports: The ports that the measured links show, one of each replica; None where ``link`` is.
    """

    def __init__(
        self,
        world: World,
        worker: WorkerId,
        name: str,
        device: torch.device,
        backend: str | None = None,
        among: Sequence[WorkerId] | None = None,
    ) -> None:
        self._world = world
        self._gradients_on = device
        self._column = world.peers(worker) if among is None else tuple(among)
        self.index, self.count = self._column.index(worker), len(self._column)
        place = world.seat(worker).place
        self._groups: tuple[dist.ProcessGroup, ...] = tuple(
            new_group(Members(f"{name}/stage {place}{part}", self.index, self.count), backend)
            for part in (("", " aside") if self.count > 1 else ())
        )
        self.link: Link | None = None
        self.ports: Ports | None = None
        self._sums = {one: GroupSum(one, ranks=self.ranks) for one in self._groups}
        self._gradients = self._sums[self._groups[0]] if self._groups else None
        self._over: TransportPosts | None = None
        self._dtype: torch.dtype | None = None
        self._number = 0  # of sums of gradients
        self._lock = threading.Lock()
        self._ended = False

    def carry_over(self, transport: Transport) -> None:
        """Have gradients on hosts carried by the transport of all workers, from the next :meth:`add_by` on."""
        _, place = self._world.seat(WorkerId(transport.rank))
        self._over = TransportPosts(transport, self._column, place)

    def add_by(self, algorithm: Algorithm, *, limit: int | None, dtype: torch.dtype | None) -> None:
        """Set how sums are computed from now on; arguments are those of :class:`.collectives.engine.GroupSum`."""
        self._dtype = dtype
        self._sums = {one: self._sum_by(one, algorithm, limit) for one in self._sums}
        self._gradients = self._sums[self._group]

    def add_gradients_by(self, algorithm: Algorithm, limit: int) -> None:
        """Set how gradients alone are summed from now on. All replicas do, between the same two sums.

        Args:
            algorithm: The rounds.
            limit: The most bytes of a bucket.
        """
        self._gradients = self._sum_by(self._group, algorithm, limit)

    def add_gradients_as_losses(self) -> None:
        """Have gradients summed as :meth:`add_by` has set for all, from now on."""
        self._gradients = self._sums[self._group]

    def measure(self) -> None:
        """Measure the links between replicas, if there are several and their group is one of gloo.

        All of them call it, when nothing else travels; raises as :meth:`combine_gradients`.
        """
        if self.count > 1 and is_gloo(self._aside):
            with self._naming_the_lost():
                links = measure_links(self._aside, MEASURED_ROUNDS)
            self.link, self.ports = slowest([*links.values()]), measured_ports(links, self.count)

    def best_bucket(self, nbytes: int) -> int:
        """Return the bucket size that suits ``nbytes`` of gradients and the measured links, the same on all replicas."""
        least = LEAST_DEVICE_BYTES if self._gradients_on.type == "cuda" else LEAST_BYTES
        if self.link is None:
            return max(bucket_bytes(self.count), least)
        return best_bucket_bytes(nbytes, self.count, self.link, least)

    def combine_gradients(
        self,
        like: Sequence[Tensor],
        gradient: Callable[[int], Tensor],
        *,
        mean: bool = True,
        owners: Sequence[int] = (),
    ) -> int:
        """Replace every gradient by its mean over the replicas, or by their sum.

        The sum is the left fold in the replicas' order, see :mod:`.collectives.fold`, and the copies stay bitwise equal. Waits
        for the replicas' ranks of this stage alone: other stages may still compute.

        Args:
            like: The parameters, in the same order on all replicas.
            gradient: Returns the gradient of the parameter of this number once it is complete.
            mean: Whether to divide by the number of replicas.
            owners: The replica that owns each parameter, the only one that gets its sum. Other replicas' gradients of it have
                any values then.

        On a GPU that works on the current stream, and this thread may wait for it.

        Returns:
            The bytes of the gradients.

        Raises:
            PeerLostError: Another replica has failed; names its worker if that is known.
            ControlError: Another one adds something else; names both.
        """
        if self.count > 1:
            self._number += 1
            with self._naming_the_lost():
                assert self._gradients is not None, "several replicas have a sum"
                self._gradients.combine_late(like, gradient, mean=mean, owners=owners, number=self._number)
                self._gradients.check()
        return sum(one.nbytes for one in like)

    def combine_losses(
        self, losses: Tensor, *, mean: bool = True, aside: bool = False, beside: Sequence[Tensor] = ()
    ) -> Tensor:
        """Return the mean of the replicas' losses, or their sum, ``aside`` from a step or in it; raises as
        :meth:`combine_gradients`. Tensors ``beside`` them, on the host, are replaced by theirs.
        """
        combined = moved_to(self._device, losses)
        if combined is losses:
            combined = losses.clone()  # the original may still be under way to other ranks
        others = [moved_to(self._device, one) for one in beside]
        sums = self._sums[self._aside if aside else self._group]
        with self._naming_the_lost():
            sums.combine([combined, *others], mean=mean)
            for one, other in zip(beside, others, strict=True):
                if other is not one:
                    one.copy_(ReadLater(other).wait())
            sums.check()
        return moved_to(losses.device, combined)

    def bring_from_owners(self, tensors: Sequence[Tensor], owners: Sequence[int]) -> None:
        """Replace tensors by those of the replicas that own them. All replicas call it between two steps, or at the begin of
        one; raises as :meth:`combine_gradients`.
        """
        if self.count > 1:
            with self._naming_the_lost():
                self._sums[self._group].bring_from_owners(tensors, owners)

    def any_has(self, has_property: bool) -> bool:
        """Return whether ``has_property`` is true on a replica. All of them call it before a step; raises as
        :meth:`combine_gradients`.
        """
        return bool(self.largest([int(has_property)])[0])

    def largest(self, numbers: Sequence[int]) -> list[int]:
        """Return the largest of each of equally many numbers over the replicas; called and raises as :meth:`any_has`."""
        if self.count == 1:
            return [*numbers]
        answer = torch.tensor(numbers, dtype=torch.int64, device=self._device)
        options: Any = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX
        with self._naming_the_lost():
            self._group.allreduce([answer], options).wait()
        return answer.tolist()

    def _sum_by(self, group: dist.ProcessGroup, algorithm: Algorithm, limit: int | None) -> GroupSum:
        return GroupSum(
            group,
            algorithm=algorithm,
            limit=limit,
            dtype=self._dtype,
            ranks=self.ranks,
            over=self._over,
            link=self.link,
        )

    @property
    def _group(self) -> dist.ProcessGroup:
        return self._groups[0]

    @property
    def _aside(self) -> dist.ProcessGroup:
        return self._groups[1]

    @property
    def _device(self) -> torch.device:
        return torch.device("cpu") if is_gloo(self._group) else self._gradients_on

    @property
    def pipeline(self) -> Sequence[ProcessId]:
        """The job's ranks that make up this rank's pipeline, by place."""
        return self._world.hosts_of(self._world.pipeline(self._world.seat(self._column[self.index]).replica))

    @property
    def ranks(self) -> Sequence[ProcessId]:
        """The job's ranks that have copies of this stage, by replica."""
        return self._world.hosts_of(self._column)

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """Gather equally many 64-bit numbers of each replica, by replica; raises as :meth:`combine_gradients`."""
        own = torch.tensor(numbers, dtype=torch.int64, device=self._device)
        gathered = [torch.empty_like(own) for _ in range(self.count)]
        with self._naming_the_lost():
            self._aside.allgather([gathered], [own]).wait()
        return [one.tolist() for one in gathered]

    def values_of(self, replica: int, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return copies of a replica's tensors, of any dtype. All call it; raises as :meth:`combine_gradients`."""
        copies = [one.detach().clone(memory_format=torch.contiguous_format) for one in tensors]
        with self._naming_the_lost():
            works = [self._aside.broadcast([one.reshape(-1).view(torch.uint8)], from_rank(replica)) for one in copies]
            for work in works:
                work.wait()
        return copies

    def combine_among(
        self,
        members: Sequence[int],
        tensors: Sequence[Tensor],
        *,
        mean: bool,
        algorithm: Algorithm,
        limit: int | None,
        dtype: torch.dtype | None,
    ) -> None:
        """Replace tensors of the host by their mean over some replicas, this one included, or by their sum.

        Args:
            members: These replicas, which alone call it, in the order of the sum.
            tensors: Of the same shapes and dtypes on all of them, dense.
            mean: Whether to divide by their number.
            algorithm, limit, dtype: As of :meth:`add_by`.

        Raises:
            PeerLostError: As :meth:`combine_gradients`.
        """
        with self._naming_the_lost():
            some, names = SomeRanks(self._group, members), [self.ranks[one] for one in members]
            GroupSum(some, algorithm=algorithm, limit=limit, dtype=dtype, ranks=names).combine(tensors, mean=mean)

    def aside(self, run: Callable[[dist.ProcessGroup], T]) -> T:
        """Call a function with the group that no step uses; raises as :meth:`combine_gradients`."""
        with self._naming_the_lost():
            return run(self._aside)

    def broadcast(self, packed: Tensor, *, aside: bool) -> PendingBroadcast:
        """Begin to replace ``packed`` by the first replica's, which has the same dtype and size. Does not wait.

        All replicas of a stage must begin their operations in the same order.
        """
        with self._naming_the_lost():
            work = (self._aside if aside else self._group).broadcast([packed], from_rank(0))
        return PendingBroadcast(self, packed, work)

    def wait_for(self, work: dist.Work) -> None:
        """Wait for an operation under way; raises as :meth:`combine_gradients`."""
        with self._naming_the_lost():
            work.wait()

    @contextlib.contextmanager
    def _naming_the_lost(self) -> Generator[None]:
        try:
            yield
        except (ControlError, TransportError):
            raise
        except RuntimeError as error:
            lost = self._lost_worker()
            who = "" if lost is None else f"rank {lost} is lost: "
            raise PeerLostError(f"{who}a data-parallel replica is lost: {error}", rank=lost) from error

    def _lost_worker(self) -> WorkerId | None:
        """Return the worker of the replica to which a connection is broken, None if none is known to be."""
        peers = [replica for replica in range(self.count) if replica != self.index]
        broken = [peer for group in self._groups if (peer := broken_peer(group)) is not None]
        lost = peers[0] if len(peers) == 1 else next(iter(broken), None)
        return None if lost is None else self._column[lost]

    def abort(self) -> None:
        """End the waits of the peers in other pipelines and of this rank, which has failed. Only once."""
        with self._lock:
            if self._ended:
                return
            self._ended = True
        for group in self._groups:
            end_waits(group)

    def release(self) -> None:
        """Release the groups of an epoch that has broken: their descriptors and threads end with the last reference."""
        self._groups, self._sums, self._gradients, self._over = (), {}, None, None

    def end(self) -> None:
        """End the groups, once nothing is under way and nothing has failed. May be called again."""
        with self._lock:
            is_first, self._ended = not self._ended, True
        for group in self._groups if is_first else ():
            end_group(group)
