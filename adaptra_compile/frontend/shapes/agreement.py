"""The agreement of a replica's ranks on a shape of batch that is new to them."""

from __future__ import annotations

from typing import Final

from adaptra.errors import BatchError
from adaptra.frontend.shapes.shapes import NewShape
from adaptra.runtime.control.calls import Calls
from adaptra.runtime.exchange.store_exchange import exchange, not_set, records_of
from adaptra.runtime.launch.job import Launch
from adaptra.runtime.worker.worker import Worker

_ONE_SHAPE: Final = "expected one shape on all ranks of a replica; give each of them the same inputs and targets, not None"


def agree_on_shape(new: NewShape, number: int, launched: Launch, worker: Worker, calls: Calls | None, timeout: float) -> None:
    """Wait until all ranks of a replica have compiled the same shape of batch.

    Args:
        new: The shape.
        number: The number of shapes that were new to this rank, this one included. It names the agreement.
        launched: The ranks of this process.
        worker: The worker of this process in that replica.
        calls: The calls of all ranks, by which a rank that knows the shape already is noticed.
        timeout: Seconds to wait for the others.

    Raises:
        BatchError: Another rank has a batch of another shape.
    """
    own_transport = launched.transports[launched.replicas_here.index(worker.replica)]
    transport, world = launched.pipeline_of(own_transport), launched.world
    job_ranks, store = world.hosts_of(world.pipeline(worker.replica)), records_of(transport)
    name, own = f"agree/shape/{number}", transport.rank
    others = [rank for rank in range(transport.world_size) if job_ranks[rank] != launched.process]
    if not others:
        return
    told: dict[int, int] = {job_ranks[rank]: rank for rank in others}

    def check() -> None:
        worker.errors.check()
        ahead = [] if calls is None else calls.ahead(list(told))
        late = not_set(store, [f"{name}/{told[rank]}" for rank in ahead]) if ahead else []
        if late:
            ranks = ", ".join(str(rank) for rank in ahead if f"{name}/{told[rank]}" in late)
            raise BatchError(
                f"rank {job_ranks[own]} has a batch of {new.name}, a shape that is new to it, rank {ranks} one of a known "
                f"shape: {_ONE_SHAPE}"
            )

    said = new.name + new.use
    found = exchange(store, name, own, said, others, timeout, check)
    for rank, text in zip(others, found, strict=True):
        if text != said:
            raise BatchError(f"rank {job_ranks[own]} has a batch of {said}, rank {job_ranks[rank]} one of {text}: {_ONE_SHAPE}")
