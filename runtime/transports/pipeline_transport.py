"""One replica's pipeline in the transport of a job: its ranks count from 0, as if there were no other replica."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from torch import Tensor

from adaptra.graph.ops.specs import MessageSpec
from adaptra.program import Program
from adaptra.runtime.control_store.signed_store import under
from adaptra.runtime.transports.base import Identity, LaneTraffic, PathCounts, Pending, Transport
from adaptra.runtime.world.world import Attempt, WorkerId


class PipelineTransport(Transport):
    """The part of a job's transport that joins the ranks of one pipeline. It ends when the job's transport does.

    Args:
        job: The job's transport.
        replica: The pipeline's replica, which gives its records in the store a name of their own.
        members: The workers of the pipeline, as ranks of the job's transport, by their rank in the pipeline.
    """

    def __init__(self, job: Transport, replica: int, members: Sequence[WorkerId]) -> None:
        self.contract = job.contract
        self.members: Final = tuple(members)
        self.rank = self.members.index(WorkerId(job.rank))
        self.world_size = len(self.members)
        self.store = under(f"replica {replica}", job.store)
        self.rdma_devices = job.rdma_devices
        self._job = job

    @property
    def attempt(self) -> Attempt:
        """See :meth:`Transport.attempt`."""
        return self._job.attempt

    def begin(self, attempt: Attempt) -> None:
        """See :meth:`Transport.begin`."""
        self._job.begin(attempt)

    @property
    def dropped(self) -> int:
        """See :meth:`Transport.dropped`."""
        return self._job.dropped

    def worker_of(self, rank: int) -> WorkerId:
        """See :meth:`Transport.worker_of`."""
        return self.members[rank]

    def clock_of(self, rank: int) -> float:
        """See :meth:`Transport.clock_of`."""
        return self._job.clock_of(self.members[rank])

    def send(
        self, destination_rank: int, identity: Identity, tensors: Sequence[Tensor], *, posted_at: float | None = None
    ) -> Pending:
        """See :meth:`Transport.send`."""
        return self._job.send(self.members[destination_rank], identity, tensors, posted_at=posted_at)

    def receive(self, source_rank: int, identity: Identity, into: Tensor | None = None) -> Pending:
        """See :meth:`Transport.receive`."""
        return self._job.receive(self.members[source_rank], identity, into)

    def release(self, pending: Pending) -> None:
        """See :meth:`Transport.release`."""
        self._job.release(pending)

    def reserve(self, counts: Mapping[tuple[int, MessageSpec], int]) -> None:
        """See :meth:`Transport.reserve`. The reservation is that of the whole job."""
        self._job.reserve(self._of_job(counts))

    def prepare(self, traffic: LaneTraffic) -> None:
        """See :meth:`Transport.prepare`."""
        self._job.prepare(replace(traffic, received=self._of_job(traffic.received)))

    def _of_job(self, counts: Mapping[tuple[int, MessageSpec], int]) -> dict[tuple[int, MessageSpec], int]:
        return {(self.members[rank], specs): count for (rank, specs), count in counts.items()}

    def stand_by(self, source_rank: int, like: Identity, count: int) -> None:
        """See :meth:`Transport.stand_by`."""
        self._job.stand_by(self.members[source_rank], like, count)

    def use_lanes(self, step: int, program: Program) -> None:
        """See :meth:`Transport.use_lanes`."""
        self._job.use_lanes(step, program)

    def waiting_for(self, rank: int) -> Identity | None:
        """See :meth:`Transport.waiting_for`."""
        return self._job.waiting_for(self.members[rank])

    def path_counts(self) -> tuple[PathCounts, ...]:
        """See :meth:`Transport.path_counts`. Edges to workers of other replicas are left out."""
        rank_of: dict[int, int] = {member: rank for rank, member in enumerate(self.members)}
        return tuple(
            one._replace(source=rank_of[one.source], destination=rank_of[one.destination])
            for one in self._job.path_counts()
            if one.source in rank_of and one.destination in rank_of
        )

    def abort(self, error: Exception) -> None:
        """See :meth:`Transport.abort`."""
        self._job.abort(error)

    def close(self) -> None:
        """See :meth:`Transport.close`."""
        self._job.close()
