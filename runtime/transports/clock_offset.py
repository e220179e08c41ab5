"""The offset between the clocks of two ranks, by ping-pong.

``time.monotonic`` starts at another moment on every host. The initiator of a ping-pong sends at ``t0``, its peer answers with
its own time ``p``, and the answer arrives at ``t1``. So the peer's clock is ahead by ``p - (t0 + t1) / 2``, with an error of at
most half the round trip ``t1 - t0``. The shortest of several round trips counts.

If a link's two directions differ in latency, the estimate is wrong by half the difference. No exchange of messages can separate
that from an offset.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass

from torch.distributed import Store

from adaptra.runtime.control_store.schema import decode
from adaptra.runtime.control_store.stores import get_all

ROUNDS = 8


@dataclass(frozen=True, slots=True)
class Offset:
    """The time by which another clock is ahead of this one, and its uncertainty; both in seconds."""

    ahead: float
    uncertainty: float


def initiate(send: Callable[[float], None], receive: Callable[[], float]) -> Offset:
    """Measure the peer's offset; the peer runs :func:`answer` meanwhile."""
    best = Offset(0.0, float("inf"))
    for _ in range(ROUNDS):
        started = time.monotonic()
        send(started)
        peer = receive()
        ended = time.monotonic()
        if (ended - started) / 2 < best.uncertainty:
            best = Offset(peer - (started + ended) / 2, (ended - started) / 2)
    return best


def answer(send: Callable[[float], None], receive: Callable[[], float]) -> None:
    """Answer the peer that runs :func:`initiate`."""
    for _ in range(ROUNDS):
        receive()
        send(time.monotonic())


def share(store: Store, rank: int, world_size: int, to_next: Offset | None) -> tuple[Offset, ...]:
    """Broadcast the offset of the next rank's clock against this one's, and gather the offsets of all ranks.

    Args:
        store: Shared by all ranks and used for nothing else.
        rank: This rank.
        world_size: The number of ranks.
        to_next: The offset of rank + 1, None on the last rank.

    Returns:
        The offset of every rank's clock against this one's. For more distant ranks it is the sum of the offsets between.
    """
    if to_next is not None:
        store.set(str(rank), json.dumps({"ahead": to_next.ahead, "uncertainty": to_next.uncertainty}))
    steps: list[Offset] = []
    for lower, payload in enumerate(get_all(store, [str(lower) for lower in range(world_size - 1)])):
        fields = decode(payload, f"clock of rank {lower}")
        steps.append(Offset(fields.instant("ahead"), fields.number("uncertainty")))
        fields.end()
    return tuple(_between(steps, rank, other) for other in range(world_size))


def _between(steps: list[Offset], rank: int, other: int) -> Offset:
    between = steps[min(rank, other) : max(rank, other)]
    sign = 1.0 if other > rank else -1.0
    return Offset(sign * sum(step.ahead for step in between), sum(step.uncertainty for step in between))
