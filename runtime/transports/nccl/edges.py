"""The directed edges between neighbours, each of which has a communicator of its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from adaptra.runtime.transports.base import ChannelClass


class Edge(NamedTuple):
    """A directed edge between two ranks, for activations or for gradients of activations.

    Attributes:
        source: The rank that sends.
        destination: The rank that receives.
        channel: The class of its messages.
    """

    source: int
    destination: int
    channel: ChannelClass

    def __str__(self) -> str:
        return f"{self.source}→{self.destination} {self.channel.name.lower()}"


def edges_of(placement: Sequence[int], pipelines: Iterable[Sequence[int]]) -> tuple[Edge, ...]:
    """Return the edges over which neighbouring stages exchange activations and their gradients.

    All ranks make their communicators in the order returned. So two ranks never wait for each other at different ones. Pairs
    that begin at an even rank come first, so that a straight pipeline of any length makes all of them in two rounds.

    Args:
        placement: The place of each stage.
        pipelines: The ranks of each pipeline by place.
    """
    edges: set[Edge] = set()
    for ranks in pipelines:
        for place, after in pairwise(placement):
            if place != after:
                edges.add(Edge(ranks[place], ranks[after], ChannelClass.FORWARD))
                edges.add(Edge(ranks[after], ranks[place], ChannelClass.BACKWARD))
    return tuple(sorted(edges, key=lambda edge: (min(edge[:2]) % 2, edge)))
