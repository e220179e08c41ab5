"""Runs the rounds of a sum over a process group of torch.distributed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from adaptra.collectives.algorithms import AlgorithmWithout
from adaptra.collectives.buckets import bucket_bytes
from adaptra.collectives.ports import MOST_OPEN
from adaptra.collectives.rounds import Algorithm, chain, direct, to_owners
from adaptra.runtime.data_parallel.collectives.carriers import (
    HostCarrier,
    NcclCarrier,
    Post,
    TransportPosts,
    Waits,
    posts_over,
)
from adaptra.runtime.data_parallel.collectives.memory import SpareMemory
from adaptra.runtime.data_parallel.collectives.moves import Moves, take_again
from adaptra.runtime.data_parallel.collectives.owned_chunks import OwnedChunks, real, write_real
from adaptra.runtime.data_parallel.collectives.some_ranks import SomeRanks
from adaptra.runtime.data_parallel.collectives.sum_layout import SumLayout, SumSettings, layout_of, layout_of_parts
from adaptra.runtime.data_parallel.collectives.sum_names import SumName, digest_of_tensors, name_of, rounds_between
from adaptra.runtime.data_parallel.collectives.terms import Terms
from adaptra.runtime.devices.events import recorded
from adaptra.runtime.devices.read_later import ReadLater
from adaptra.runtime.transports.nccl.communicator import failure_of
from adaptra.runtime.transports.process_groups import from_rank, is_gloo
from adaptra.simulation.links import Link

_BUSY_SECONDS: Final = 0.02
"""Seconds that a port takes for one message to each other rank, from which no second one is sent beside it.

The pause between two messages is short beside them then, and the port has those to other ranks. Two at a time would only share
it: results come later, and so does an activation, which waits behind all that was sent."""


class GroupSum:
    """The canonical sum, see :mod:`.fold`, over the ranks of a group. It keeps the memory of what arrives for the next one.

    Values stay on their device and are added there, on the calling thread's stream. With gloo, those of a GPU cross by way of
    pinned memory; the calling thread waits for what it sends.

    Args:
        group: Its ranks in the order of the sum. Some ranks of a group can only :meth:`combine` tensors of hosts.
        algorithm: The rounds; all give the same bits.
        limit: The most bytes of a bucket, or None for :func:`.buckets.bucket_bytes`.
        dtype: The least precise dtype of additions, or None for that of the tensors.
        ranks: The ranks as errors name them; None for their numbers in the group.
        over: What carries the messages of numbered sums between hosts; None for the group.
        link: The slowest link between two of them, None where it is not known.

    Attributes:
        tag: Of the messages of the next sums; with gloo, those of other tags never meet.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | SomeRanks,
        *,
        algorithm: Algorithm = direct,
        limit: int | None = None,
        dtype: torch.dtype | None = None,
        ranks: Sequence[int] | None = None,
        over: TransportPosts | None = None,
        link: Link | None = None,
    ) -> None:
        self._over = over
        self._group: Any = group  # torch's annotations lack some of its methods
        self._replicas, self._rank = group.size(), group.rank()
        self._algorithm = algorithm
        self._limit = limit or bucket_bytes(self._replicas)
        self._dtype = dtype
        port_seconds = 0.0 if link is None else (self._replicas - 1) * self._limit / self._replicas * link.per_byte
        least = 2 * _BUSY_SECONDS if self._replicas == 2 else _BUSY_SECONDS  # with one other rank nothing fills the pause
        self._sends_one = over is not None and over.sends_whole and port_seconds >= least
        self._names = range(self._replicas) if ranks is None else ranks
        self.tag = 0
        self._memory = SpareMemory()
        self._through_host = isinstance(group, SomeRanks) or is_gloo(group)
        self._waits = Waits()
        self._unchecked: list[tuple[torch.cuda.Event, list[dist.Work]]] = []

    def combine(self, tensors: Sequence[Tensor], *, mean: bool) -> None:
        """Replace tensors by their sum or mean over the group's ranks, which call it together.

        A complex tensor is added, and divided, as its real and imaginary parts. The bits of a NaN are not specified.

        Args:
            tensors: Of the same shapes and dtypes on all ranks, dense.
            mean: Whether the sum is divided by the number of ranks.

        Raises:
            RuntimeError: A message failed or took longer than the group's timeout.
        """
        self.combine_late(tensors, tensors.__getitem__, mean=mean)

    def combine_late(
        self,
        like: Sequence[Tensor],
        get: Callable[[int], Tensor],
        *,
        mean: bool,
        owners: Sequence[int] = (),
        number: int | None = None,
    ) -> None:
        """Do what :meth:`combine` does for tensors that are still being computed.

        Args:
            like: Tensors of their shapes, dtypes and devices.
            get: Returns a tensor by its number, once it is computed. They are asked for in their order, bucket by bucket, while
                the buckets before travel.
            mean: As of :meth:`combine`.
            owners: The rank that owns each tensor, the only one that gets its result. Other ranks' have any values then.
            number: The number of the sum, the same on all ranks. Over a job's transport they find out if they don't add alike.
                None where something else tells.

        Raises:
            RuntimeError: As :meth:`combine`, or what ``get`` raises.
            TransportError: Another rank adds other tensors, in other buckets or by other rounds; names both.
        """
        if self._replicas == 1:
            return
        tensors = _Contiguous(get)
        self._run(list(map(real, like)), tensors, mean, owners, number)
        tensors.write_back()

    def reduce_scatter(self, output: Tensor, parts: Sequence[Tensor], *, mean: bool) -> None:
        """Write the sum or mean of this rank's part to ``output``. All ranks of the group call it together.

        Args:
            output: Of one part's shape.
            parts: This rank's terms, of a part of each rank, by rank: flat, contiguous, of one size and dtype.
            mean: As of :meth:`combine`.

        Raises:
            RuntimeError: As :meth:`combine`.
        """
        results, parts = real(output), [real(one).view(-1) for one in parts]
        result = results.view(-1)
        # Terms are sent from where they are, so results don't go there.
        terms_in = {one.untyped_storage().data_ptr() for one in parts}
        own = torch.empty_like(result) if result.untyped_storage().data_ptr() in terms_in else result
        layout = layout_of_parts(own.numel(), own.dtype, self._settings(to_owners, mean))
        ranges = (bucket.pieces[self._rank] for bucket in layout.buckets)
        of_buckets = [own[each.begin : each.end] for each in ranges]
        terms = self._terms(parts.__getitem__, parts, layout, of_buckets)
        self._move(layout, terms, terms.end_own, own)
        write_real(own.view_as(results), output)

    def all_gather(self, parts: Sequence[Tensor]) -> None:
        """Fill the parts of other ranks by theirs. All ranks of the group call it together.

        Args:
            parts: Flat, contiguous, of one size and dtype, by rank; this rank's has its values.

        Raises:
            RuntimeError: As :meth:`combine`.
        """
        if self._through_host:
            self._give_and_take([[one] for one in parts])
        else:
            self._group.allgather([[*parts]], [parts[self._rank]]).wait()

    def bring_from_owners(self, tensors: Sequence[Tensor], owners: Sequence[int]) -> None:
        """Replace tensors by their owners' values. All ranks of the group call it together.

        Small ones of an owner travel as one message, and others from where they are.

        Args:
            tensors: Of the same shapes and dtypes on all ranks, dense, on one device.
            owners: The rank whose values each one gets.

        Raises:
            RuntimeError: As :meth:`combine`.
        """
        if self._replicas == 1:
            return
        chunks = [OwnedChunks([one for one, its in zip(tensors, owners, strict=True) if its == rank]) for rank in self._ranks]
        if self._through_host:
            self._give_and_take([one.flat for one in chunks])
        else:
            works = [self._group.broadcast([one], from_rank(rank)) for rank in self._ranks for one in chunks[rank].flat]
            for work in works:
                work.wait()
        for rank in self._ranks:
            if rank != self._rank:
                chunks[rank].write_back()

    @property
    def _ranks(self) -> range:
        return range(self._replicas)

    def _give_and_take(self, parts: Sequence[Sequence[Tensor]]) -> None:
        """Send this rank's tensors to all others over gloo, and receive theirs, by rank: flat and contiguous."""
        peers = [(self._rank + shift) % self._replicas for shift in range(1, self._replicas)]
        arriving = [
            (peer, one, torch.empty_like(one, device="cpu", pin_memory=True) if one.is_cuda else one)
            for peer in peers
            for one in parts[peer]
        ]
        works = [self._group.recv([memory], peer, self.tag) for peer, _, memory in arriving]
        leaving = [ReadLater(one).wait() for one in parts[self._rank]]
        works += [self._group.send([one], peer, self.tag) for peer in reversed(peers) for one in leaving]
        for work in works:
            work.wait()
        for _, one, memory in arriving:
            if one is not memory:
                one.copy_(memory, non_blocking=True)

    def check(self) -> None:
        """Wait until messages between GPUs have ended, and raise if one of them failed. What it was to bring is no result.

        Raises:
            RuntimeError: A message failed.
        """
        unchecked, self._unchecked = self._unchecked, []
        for ended, works in unchecked:
            if not ended.query():
                ended.synchronize()
            for error in map(failure_of, works):
                if error is not None:
                    raise RuntimeError(f"a message of a sum over replicas failed: {error}") from error

    def _run(self, like: Sequence[Tensor], tensors: _Contiguous, mean: bool, owners: Sequence[int], number: int | None) -> None:
        algorithm = to_owners if owners else self._algorithm
        sizes = tuple((one.numel(), one.dtype, one.device) for one in like)
        layout = layout_of(sizes, tuple(owners), self._settings(algorithm, mean))
        terms = self._terms(tensors.of, like, layout)
        end = terms.end_own if owners else terms.end_bucket
        name: SumName | None = None
        if number is not None and self._over is not None and self._through_host:
            added_in = "" if self._dtype is None else f", in {str(self._dtype).removeprefix('torch.')} at least"
            what = f"{len(like)} tensors of {sum(one.nbytes for one in like)} bytes by {name_of(algorithm)}"
            text = f"{what}, {'mean' if mean else 'sum'} {number}, in buckets of {self._limit} bytes{added_in}"
            name = SumName(number, text, digest_of_tensors(like, owners))
        self._move(layout, terms, end, like[0] if like else None, name)

    def _settings(self, algorithm: Algorithm, mean: bool) -> SumSettings:
        most_sent = 1 if self._sends_one and algorithm in (direct, to_owners) else MOST_OPEN
        in_rounds = not self._through_host
        return SumSettings(algorithm, self._replicas, self._rank, self._limit, in_rounds, self._dtype, mean, most_sent)

    def _terms(
        self,
        get: Callable[[int], Tensor],
        like: Sequence[Tensor],
        layout: SumLayout,
        results: Sequence[Tensor] | None = None,
    ) -> Terms:
        mean = layout.settings.mean
        return Terms(get, like, layout.buckets, self._replicas, self._rank, mean, self._memory, self._dtype, results)

    def _move(
        self,
        layout: SumLayout,
        terms: Terms,
        end: Callable[[int], object],
        like: Tensor | None,
        sum_name: SumName | None = None,
    ) -> None:
        """Run the rounds of some buckets, and ``end`` each bucket once nothing of it is under way."""
        algorithm = layout.settings.algorithm
        # With these, who waits for the earliest message has nothing else to do: each part needs the terms of all.
        waits = None if algorithm in (direct, chain, to_owners) else self._waits
        if self._through_host:
            carrier = HostCarrier(self._rank, self._post_of(sum_name, layout), waits)
        else:
            carrier = NcclCarrier(self._group)
        if layout.turns is not None:
            take_again(layout.turns, terms, self._rank, end, carrier)
        else:
            keeps_round = algorithm.keeps_round if isinstance(algorithm, AlgorithmWithout) else None
            moves = Moves(
                terms,
                layout.messages,
                self._rank,
                end,
                in_rounds=not self._through_host,
                keeps_round=keeps_round,
                most_sent=layout.settings.most_sent,
            )
            turns = moves.run(carrier)
            if carrier.ends_in_order:
                layout.turns = turns
        if isinstance(carrier, NcclCarrier) and carrier.works and like is not None and like.is_cuda:
            self._unchecked.append((recorded(torch.cuda.current_stream(like.device)), carrier.works))

    def _post_of(self, name: SumName | None, layout: SumLayout) -> Post:
        if name is None or self._over is None:
            return posts_over(self._group, self.tag)

        def code_with(peer: int) -> int:
            return name.code(rounds_between(layout.settings.algorithm, self._replicas, layout.parts, (self._rank, peer)))

        return self._over.of(name.number, f"rank {self._names[self._rank]} adds {name.text}", code_with)


class _Contiguous:
    """Contiguous tensors with the values of others, made as they are asked for."""

    def __init__(self, get: Callable[[int], Tensor]) -> None:
        self._get = get
        self._made: dict[int, tuple[Tensor, Tensor]] = {}

    def of(self, number: int) -> Tensor:
        """Return a tensor by its number."""
        if number not in self._made:
            given = self._get(number)
            self._made[number] = given, real(given).contiguous()
        return self._made[number][1]

    def write_back(self) -> None:
        """Write the values to the others that have memory of their own."""
        for tensor, result in self._made.values():
            write_real(result, tensor)
