"""What rounds of messages take over ports of given or measured rates, and what no rounds can go below."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import groupby
from typing import Final, NamedTuple

from adaptra.collectives.rounds import TermMessage
from adaptra.collectives.seconds import slowest
from adaptra.equations.sums import sum_equations
from adaptra.simulation.links import Link

MOST_OPEN: Final = 2
"""Messages of a lane under way. While one travels, its receiver already has a place for the next."""

_Waiting = deque[tuple[TermMessage, int]]
"""The messages of a lane that have not begun, each with the number of those that its value needs."""

LEAST_NARROWNESS: Final = 1.5
"""A port is narrow if a byte takes so many times as long on all its links as on the slowest link between others.
Links through ports of one rate were measured within 3 % of each other on a busy machine, a port of half the rate as 1.8.
"""


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


def measured_ports(links: Mapping[tuple[int, int], Link], ranks: int) -> Ports:
    """Return the ports of ranks: what a byte takes is that of the slowest link, but for narrow ports and links to them.

    Between two ranks it is the narrower port that counts. So a narrow port is seen on all links of its rank. Where ranks share
    hosts, one of them alone has no narrow port: the links within a host are faster, but not those to others.

    Args:
        links: The links of some pairs of ranks, numbered from 0, at least one.
        ranks: The number of ranks.
    """
    link, of_rank = slowest([*links.values()]), {rank: [links[pair] for pair in links if rank in pair] for rank in range(ranks)}
    fastest = {rank: min(one.per_byte for one in its) for rank, its in of_rank.items() if its}
    narrowest_first = sorted(fastest, key=lambda rank: (-fastest[rank], rank))
    for count in range(len(fastest) - 2, 0, -1):
        narrow = {*narrowest_first[:count]}
        others = [one.per_byte for pair, one in links.items() if narrow.isdisjoint(pair)]
        if others and max(others) > 0 and min(fastest[rank] for rank in narrow) >= LEAST_NARROWNESS * max(others):
            return Ports(link.latency, tuple(fastest[rank] if rank in narrow else max(others) for rank in range(ranks)))
    return Ports(link.latency, (link.per_byte,) * ranks)


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


def lane_flights(messages: Iterable[TermMessage], part: float, ports: Ports) -> Iterator[Flight]:
    """Yield each message of a sum with its times, in the order in which they begin.

    As in :func:`flights`, but messages keep their order on each lane alone. Lanes with messages to send take turns on
    their rank's port. A message takes each of its two ports for as long as that port needs for it. So a narrow port
    does not keep from others the ports that it talks to.

    Args:
        messages: In the order of their rounds.
        part: The bytes of one message.
        ports: The ports that they travel through.
    """
    taken = [ports.latency + part * per_byte for per_byte in ports.per_byte]
    sent, heard = [*ports.arrivals], [*ports.arrivals]
    lanes = _lanes(messages, ports.ranks)
    ends: defaultdict[tuple[int, int], deque[float]] = defaultdict(lambda: deque(maxlen=MOST_OPEN))
    begun: defaultdict[tuple[int, int], float] = defaultdict(lambda: -1.0)
    arrived: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
    moments = [(arrival, rank) for arrival in {*ports.arrivals} for rank in range(ports.ranks)]
    heapify(moments)
    while moments:
        now, source = heappop(moments)
        if sent[source] > now:
            continue  # it is asked again by then
        first: tuple[tuple[float, int], _Waiting] | None = None
        for destination, waiting in lanes[source].items():
            if not waiting or ports.arrivals[destination] > now:
                continue
            message, needed = waiting[0]
            turn = begun[source, destination], message.round
            if first is not None and turn > first[0]:
                continue
            under_way, there = ends[source, destination], arrived[source, message.value.part]
            is_full = len(under_way) == MOST_OPEN and under_way[0] > now
            if not is_full and (not needed or sum(end <= now for end in there) >= needed):
                first = turn, waiting
        if first is None:
            continue
        message, _ = first[1].popleft()
        destination = message.destination
        begun[source, destination] = now
        sent[source] = now + taken[source]
        heard[destination] = max(heard[destination], now) + taken[destination]
        end = max(sent[source], heard[destination])
        ends[source, destination].append(end)
        arrived[destination, message.value.part].append(end)
        for moment in {(sent[source], source), (end, source), (end, destination)}:
            heappush(moments, moment)
        yield Flight(message, now, end)


def _lanes(messages: Iterable[TermMessage], ranks: int) -> list[defaultdict[int, _Waiting]]:
    """Return the messages of each lane, by source and destination. A rank's own term needs no other message."""
    lanes: list[defaultdict[int, _Waiting]] = [defaultdict(deque) for _ in range(ranks)]
    before: Counter[tuple[int, int]] = Counter()
    for message in messages:
        source, value = message.source, message.value
        is_own = value.first == source and value.end == source + 1
        lanes[source][message.destination].append((message, 0 if is_own else before[source, value.part]))
        before[message.destination, value.part] += 1
    return lanes


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
