"""What rounds of messages take over ports of given rates, and what no rounds can go below."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

from adaptra.collectives.rounds import TermMessage
from adaptra.equations.sums import sum_equations


@dataclass(frozen=True, slots=True)
class Ports:
    """The ports of ranks, one of each rank, and when each rank begins. All times are seconds.

    Attributes:
        latency: What a message without bytes takes, the alpha of the equations.
        per_byte: What a byte takes through each rank's port, sent or received: beta.
        arrivals: When each rank has its terms, and receives; by default all at 0.
    """

    latency: float
    per_byte: tuple[float, ...]
    arrivals: tuple[float, ...] = field(default=())

    def __post_init__(self) -> None:
        object.__setattr__(self, "arrivals", self.arrivals or (0.0,) * len(self.per_byte))

    @property
    def ranks(self) -> int:
        """The number N of ranks."""
        return len(self.per_byte)


class Flight(NamedTuple):
    """A message and when it travels, in seconds."""

    message: TermMessage
    start: float
    end: float


def flights(messages: Iterable[TermMessage], part: float, ports: Ports) -> Iterator[Flight]:
    """Yield each message of a sum with its times.

    Each rank sends in the order of the rounds, one message at a time, and receives so too. A message takes the latency and the
    time of its bytes through the slower of both ports. A rank's own term leaves from its arrival on. Any other value leaves
    once the rank has all messages about that part of earlier rounds.

    Args:
        messages: In the order of their rounds.
        part: The bytes of one message.
        ports: The ports that they travel through.
    """
    sent, heard = [*ports.arrivals], [*ports.arrivals]
    has: dict[tuple[int, int], float] = defaultdict(float)
    for _, together in groupby(messages, lambda message: message.round):
        arrived: list[tuple[tuple[int, int], float]] = []
        for message in together:
            source, destination, value = message.source, message.destination, message.value
            is_own = value.first == source and value.end == source + 1
            ready = 0.0 if is_own else has[source, value.part]
            start = max(sent[source], heard[destination], ready)
            end = start + ports.latency + part * max(ports.per_byte[source], ports.per_byte[destination])
            sent[source] = heard[destination] = end
            arrived.append(((destination, value.part), end))
            yield Flight(message, start, end)
        has.update(arrived)


class WaterLevel(NamedTuple):
    """What bounds every way to share a sum among ranks.

    Attributes:
        seconds: No sum ends before.
        shares: The share of the sum that each rank owns where all ports are busy until the level.
    """

    seconds: float
    shares: tuple[float, ...]


def water_level(nbytes: float, ports: Ports) -> WaterLevel:
    """Return the least time of a sum over these ports, whoever owns what.

    2(N-1) copies of the whole leave the ports together, whichever way they take. Each port sends at least its own rank's terms,
    and what the last rank brings reaches all others by ⌈log2 N⌉ messages at least.
    """
    model, ranks = sum_equations(), ports.ranks
    alone = [
        model.alone.evaluate(arrival, nbytes, ports.latency, beta)
        for arrival, beta in zip(ports.arrivals, ports.per_byte, strict=True)
    ]
    least = max(*alone, max(ports.arrivals) + ports.latency * (ranks - 1).bit_length())
    if ranks == 2:
        return WaterLevel(least, (0.5, 0.5))
    level = _level(nbytes, ports)
    shares = [
        model.share.evaluate(level, arrival, ranks, nbytes, beta)
        for arrival, beta in zip(ports.arrivals, ports.per_byte, strict=True)
    ]
    return WaterLevel(max(level, least), tuple(shares))


def _level(nbytes: float, ports: Ports) -> float:
    """Return the level at which the shares of all ranks together are 1: rank by rank, from the one that is ready first."""
    ready = sorted(
        (arrival + nbytes * beta, 1 / (nbytes * beta)) for arrival, beta in zip(ports.arrivals, ports.per_byte, strict=True)
    )
    weight = filled = level = 0.0
    for index, (begin, rate) in enumerate(ready):
        weight, filled = weight + rate, filled + rate * begin
        level = (ports.ranks - 2 + filled) / weight
        if index + 1 == len(ready) or level <= ready[index + 1][0]:
            break
    return level


def seconds_of(messages: Iterable[TermMessage], part: float, ports: Ports) -> float:
    """Return when the last message of a sum has arrived; see :func:`flights`."""
    return max((flight.end for flight in flights(messages, part, ports)), default=0.0)
