"""What a sum over replicas takes over given links: its rounds, played with the waits that the engine has."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, permutations
from typing import Final

from adaptra.collectives.buckets import best_bucket_bytes
from adaptra.collectives.rounds import ALGORITHMS, TermMessage
from adaptra.simulation.links import Link

_MOST_MESSAGES = 20_000
"""More are played with fewer, larger buckets. That many take some 30 ms, and a search for roles prices many columns."""


@dataclass(frozen=True, slots=True)
class SumPlan:
    """How a job adds up its gradients.

    Attributes:
        algorithm: A name in :data:`.rounds.ALGORITHMS`.
        bucket: The most bytes that travel as one tensor; None for what suits the links.
    """

    algorithm: str = "direct"
    bucket: int | None = None

    def seconds(self, nbytes: int, replicas: int, link: Callable[[int, int], Link]) -> float:
        """Return what a sum takes from the moment at which all terms are there until the last replica has it.

        A replica sends in the order of the rounds, as soon as it has the value. A message travels once its sender knows that
        its receive is posted, a number of rounds ahead. Each replica sends one message at a time, and receives one at a time.

        Args:
            nbytes: The bytes of one replica's terms.
            replicas: The number of replicas.
            link: The link between two of them, numbered from 0.
        """
        if replicas == 1 or nbytes == 0:
            return 0.0
        pairs = {(one, other): link(min(one, other), max(one, other)) for one, other in permutations(range(replicas), 2)}
        limit = self.bucket or best_bucket_bytes(nbytes, replicas, slowest([*pairs.values()]))
        most = max(1, _MOST_MESSAGES // (2 * replicas * (replicas - 1)))
        buckets = min(most, math.ceil(nbytes / limit))
        played = _Played(pairs, replicas, nbytes / (buckets * replicas))
        for _, messages in groupby(ALGORITHMS[self.algorithm](replicas, buckets * replicas, None), lambda one: one.round):
            played.play([*messages])
        return max(played.heard)


DIRECT: Final = SumPlan()
"""What runs where users ask for nothing else."""


class _Played:
    """The replicas between two rounds. All times are seconds since the begin.

    Args:
        links: The link from each replica to each.
        replicas: Their number.
        part: The bytes of a message.

    Attributes:
        heard: When each has received its last message.
    """

    def __init__(self, links: Mapping[tuple[int, int], Link], replicas: int, part: float) -> None:
        self._links = links
        self._part = part
        self._ahead = replicas - 1  # the engine posts receives that many of its own rounds before their turn
        self._began: list[list[float]] = [[] for _ in range(replicas)]
        self._sent = [0.0] * replicas
        self._has: dict[tuple[int, int], float] = {}
        self.heard = [0.0] * replicas

    def play(self, messages: Sequence[TermMessage]) -> None:
        """Play one round: each replica begins it once it has what it sends."""
        values = {one.source: one.value for one in messages}
        for replica in values.keys() | {one.destination for one in messages}:
            value, began = values.get(replica), self._began[replica]
            is_there = 0.0 if value is None or value.end == value.first + 1 else self._has[replica, value.part]
            began.append(max(is_there, began[-1] if began else 0.0))
        for source, destination, value in ((one.source, one.destination, one.value) for one in messages):
            link, turns = self._links[source, destination], self._began[destination]
            posted = turns[-1 - self._ahead] if len(turns) > self._ahead else 0.0
            ready = posted + link.latency  # the sender is told that there is a place for it
            leaves = max(self._began[source][-1], ready, self._sent[source], self.heard[destination] - link.latency)
            self._sent[source] = leaves + self._part * link.per_byte
            self.heard[destination] = self._sent[source] + link.latency
            self._has[destination, value.part] = self.heard[destination]


def slowest(links: Sequence[Link]) -> Link:
    """Return a link with the largest latency and the largest occupancy of all."""
    return Link(max(one.latency for one in links), max(one.per_byte for one in links))
