"""The last rounds of a sum with a late rank: every result reaches everyone in as few rounds as doubling needs.

Each round is one maximum flow from ranks that send, through parts that they have, to ranks that lack these. It must leave
each part with enough holders for doubling to reach all in time. And no rank may miss more parts than rounds are left.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Holdings = list[set[int]]
"""The parts that each rank has."""


def closing_rounds(holdings: Sequence[Iterable[int]], parts: int, rounds: int) -> list[list[tuple[int, int, int]]] | None:
    """Return rounds after which every rank has every part, or None if this way finds none.

    Args:
        holdings: The parts that each rank has, of which it may send one in each round.
        parts: The number of parts.
        rounds: The number of rounds.

    Returns:
        For each round the sender, the receiver and the part of each message.
    """
    have = [set(each) for each in holdings]
    closing: list[list[tuple[int, int, int]]] = []
    for left in reversed(range(rounds)):
        messages = _round(have, parts, left)
        if messages is None:
            return None
        for _, receiver, part in messages:
            have[receiver].add(part)
        closing.append(messages)
    return closing if all(len(each) == parts for each in have) else None


def _round(have: Holdings, parts: int, left: int) -> list[tuple[int, int, int]] | None:
    ranks = len(have)
    holders = [sum(part in each for each in have) for part in range(parts)]
    youngest = sorted(range(parts), key=holders.__getitem__)
    # Nodes: where the musts begin and end, where all begins and ends, senders, parts as sent, parts as received, receivers.
    must_begin, must_end, begin, end = range(4)
    sent, received, receivers = 4 + ranks, 4 + ranks + parts, 4 + ranks + 2 * parts
    flow = _Flow(receivers + ranks)
    needed = 0
    for rank in range(ranks):
        flow.add(begin, 4 + rank, 1)
        for part in youngest:
            if part in have[rank]:
                flow.add(4 + rank, sent + part, 1)
    for part in youngest:
        least = max(0, -(-ranks // 2**left) - holders[part])
        flow.add(must_begin, received + part, least)
        flow.add(sent + part, must_end, least)
        needed += least
        flow.add(sent + part, received + part, ranks)
        for rank in range(ranks):
            if part not in have[rank]:
                flow.add(received + part, receivers + rank, 1)
    for rank in range(ranks):
        is_must = parts - len(have[rank]) > left
        needed += is_must
        if is_must:
            flow.add(must_begin, end, 1)
        flow.add(receivers + rank, must_end if is_must else end, 1)
    back = flow.add(end, begin, ranks)
    if flow.push(must_begin, must_end) < needed:
        return None
    flow.close(end, back)
    flow.push(begin, end)
    messages: list[tuple[int, int, int]] = []
    for part in range(parts):
        senders = [rank for rank in range(ranks) if flow.is_used(4 + rank, sent + part)]
        takers = [rank for rank in range(ranks) if flow.is_used(received + part, receivers + rank)]
        messages += [(*pair, part) for pair in zip(senders, takers, strict=True)]
    return messages


class _Flow:
    """A network and the flow through it, by Dinic's algorithm.

    Args:
        nodes: Their number.
    """

    def __init__(self, nodes: int) -> None:
        self._edges: list[list[list[int]]] = [[] for _ in range(nodes)]  # each: target, room, number of the edge back

    def add(self, source: int, target: int, room: int) -> int:
        """Add an edge and return its number among the source's."""
        edges, back = self._edges[source], self._edges[target]
        edges.append([target, room, len(back)])
        back.append([source, 0, len(edges) - 1])
        return len(edges) - 1

    def close(self, source: int, number: int) -> None:
        """Take the room from an edge and from the edge back, so that its flow stays."""
        target, _, back = self._edges[source][number]
        self._edges[source][number][1] = self._edges[target][back][1] = 0

    def is_used(self, source: int, target: int) -> bool:
        """Return True if an edge of room 1, added from source to target, is full."""
        return any(edge[0] == target and not edge[1] and self._edges[target][edge[2]][1] for edge in self._edges[source])

    def push(self, source: int, target: int) -> int:
        """Push as much as there is room for, and return it."""
        total = 0
        while (levels := self._levels(source, target))[target] >= 0:
            turns = [0] * len(self._edges)
            while amount := self._push_once(source, target, levels, turns):
                total += amount
        return total

    def _levels(self, source: int, target: int) -> list[int]:
        levels = [-1] * len(self._edges)
        levels[source] = 0
        nodes = [source]
        for node in nodes:
            if node == target:
                break
            for other, room, _ in self._edges[node]:
                if room and levels[other] < 0:
                    levels[other] = levels[node] + 1
                    nodes.append(other)
        return levels

    def _push_once(self, source: int, target: int, levels: list[int], turns: list[int]) -> int:
        path: list[int] = []
        node = source
        while node != target:
            edges = self._edges[node]
            while turns[node] < len(edges):
                other, room, _ = edges[turns[node]]
                if room and levels[other] == levels[node] + 1:
                    break
                turns[node] += 1
            if turns[node] < len(edges):
                path.append(node)
                node = edges[turns[node]][0]
            elif path:
                node = path.pop()
                turns[node] += 1
            else:
                return 0
        steps = [self._edges[node][turns[node]] for node in path]
        amount = min(step[1] for step in steps)
        for step in steps:
            step[1] -= amount
            self._edges[step[0]][step[2]][1] += amount
        return amount
