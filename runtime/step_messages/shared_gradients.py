"""Gradients of one rank's parameters: added up per microbatch, and combined if stages share a parameter.

W ops run in microbatch order on every stage under every plan. So sums are taken in one order and are bitwise the same (rule 1).

A parameter used by stages of several ranks has a copy on each rank. Autograd first adds the contributions of one microbatch,
the latest use first, and then adds up the microbatches. Floating-point sums depend on that order. So the contributions travel
to the stage that owns the parameter, one message per microbatch, each contribution as a tensor of its own. The owner adds them
in autograd's order as soon as all have arrived.

Contributions of all stages of a rank to owners on another one are in one message. It leaves when the last of them has run W.
Ranks with several stages send these messages in the bulk class of channels, since activations go both ways between them.

Contributions of stages on the owner's rank wait there. No op waits for them before the end of the step. Then the owner sends
the sum back, so that every copy takes the same optimizer step and all copies stay equal.

Where another replica's worker computes a microbatch, it sends its contributions to the owner at the microbatch's home.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import torch
from torch import Tensor

from adaptra.graph.ops.specs import MessageSpec, TensorSpec
from adaptra.program.placement import Edge, has_several, stages_of
from adaptra.runtime.data_parallel.accumulators import Accumulators
from adaptra.runtime.transports.base import Identity, Pending, Purpose, Transport

Content = TypeVar("Content")

POSTED_AHEAD: Final = 2
"""The number of microbatches for which the owner reserves receive buffers at a time: one being added, one arriving."""


@dataclass(frozen=True, slots=True)
class SharedParameter:
    """A parameter that several stages use.

    Attributes:
        name: Its name in the user's model and on every copy.
        stages: The stages that use it; their ranks have a copy each.
        owner: The stage that adds the contributions.
        order: The stage of each contribution, in autograd's order of addition: latest use first. If empty, there is nothing to
            add and the parameter must not be among the trainable ones.
    """

    name: str
    stages: tuple[int, ...]
    owner: int
    order: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AwayFromHome:
    """The microbatches of a replica that workers of other replicas compute, on stages that share parameters.

    Attributes:
        replica: The replica.
        workers: The worker by stage and microbatch.
        transport: Joins the workers of all replicas.
    """

    replica: int
    workers: Mapping[tuple[int, int], int]
    transport: Transport


class _SharedMessages:
    """The contents of each message of a rank, by the first stages of the ranks at both ends, source first.

    Messages to the owner have the stage and the name of each contribution, messages from the owner the name of each copy.

    Args:
        rank: The rank.
        shared: The shared parameters of which it has a copy.
        placement: ``placement[stage]`` is the stage's rank.
        foreign: The stage that it computes for another replica, whose placement this is, or None for its own stages.

    Attributes:
        given: Contributions that the rank sends to owners on other ranks.
        taken: Contributions that it receives as the owner.
        taken_back: Contributions of its own stages that it receives as the owner where others compute a microbatch.
        sums_from: Sums that it receives from owners.
        sums_to: Sums that it sends as the owner.
        contributing: Its stages whose contributions it awaits as the owner.
        complete_by: Per message of contributions that it sends, the stages that contribute to it.
    """

    def __init__(
        self, rank: int, shared: Sequence[SharedParameter], placement: Sequence[int], foreign: int | None = None
    ) -> None:
        here = frozenset(stages_of(rank, placement) if foreign is None else (foreign,))
        owned = [] if foreign is not None else [one for one in shared if one.owner in here]
        borrowed = [one for one in shared if one not in owned]

        def between(source: int, destination: int) -> Edge:
            """Return the edge that names the messages from one stage's rank to another's."""
            return placement.index(placement[source]), placement.index(placement[destination])

        def contributions(some: Iterable[SharedParameter], users: Collection[int]) -> dict[Edge, list[tuple[int, str]]]:
            """Return the contributions of these stages, those of one stage to one parameter together."""
            return _by_edge(
                (between(user, one.owner), (user, one.name))
                for one in some
                for user in dict.fromkeys(one.order)
                if user in users
                for _ in range(one.order.count(user))
            )

        self.given: Final = contributions(borrowed, here)
        self.taken: Final = contributions(owned, frozenset(range(len(placement))) - here)
        self.taken_back: Final = contributions(owned, here)
        copies = borrowed if foreign is None else []
        self.sums_from: Final = _by_edge((between(one.owner, min(here)), one.name) for one in copies)
        self.sums_to: Final = _by_edge(
            (between(one.owner, placement.index(other)), one.name)
            for one in owned
            for other in sorted({placement[user] for user in one.stages} - {rank})
        )
        self.contributing: Final = {user for one in owned for user in one.stages if user in here}
        self.complete_by: Final = {edge: {user for user, _ in contents} for edge, contents in self.given.items()}

    def taken_of(self, microbatch: int, away: AwayFromHome | None) -> Iterator[tuple[Edge, list[tuple[int, str]]]]:
        """Yield the messages of contributions to one microbatch that the rank receives as the owner."""
        yield from self.taken.items()
        if away is not None:
            yield from (one for one in self.taken_back.items() if (one[0][0], microbatch) in away.workers)


class Gradients:
    """Adds up the gradients of one rank's parameters.

    Args:
        rank: This rank.
        sums: Takes the sums of the trainable parameters of its stages.
        shared: All parameters of the pipeline that several stages use, the same on every rank.
        placement: ``placement[stage]`` is the stage's rank.
        transport: Carries the contributions of shared parameters.
        timeout: Seconds the end of a step waits for other stages' contributions.
        before_message: Called with the stage to which a message leaves next, for what has to leave on its channel before.
        foreign: The replica and the stage of which this rank computes microbatches, if they are another replica's. The
            placement is then that replica's, in ranks of a transport that joins all replicas.
    """

    def __init__(
        self,
        rank: int,
        sums: Accumulators,
        shared: Sequence[SharedParameter],
        placement: Sequence[int],
        transport: Transport,
        timeout: float,
        before_message: Callable[[int], None] | None = None,
        foreign: tuple[int, int] | None = None,
    ) -> None:
        self._before_message = before_message
        self._sums = sums
        self._placement = placement
        self._transport = transport
        self._timeout = timeout
        self._step = -1
        here = [one for one in shared if one.name in sums.parameters]
        self._shared = {one.name for one in here}
        self._replica, computed = foreign or (0, None)
        self._owned = [one for one in here if placement[one.owner] == rank]
        self._messages = _SharedMessages(rank, here, placement, computed)
        several = has_several(placement)
        self._gradient = Purpose.RANK_GRADIENTS if several else Purpose.SHARED_GRADIENT
        self._sum = Purpose.RANK_SUMS if several else Purpose.SHARED_SUM
        self._away: AwayFromHome | None = None
        self._own: dict[int, dict[tuple[int, str], list[Tensor]]] = {}
        self._ended: dict[int, set[int]] = {}
        self._arriving: dict[int, dict[Edge, Pending]] = {}
        self._next = self._posted = 0

    def receive_counts(self) -> dict[tuple[int, MessageSpec], int]:
        """Return the number of receive buffers needed at a time, per source rank and message."""
        counts: Counter[tuple[int, MessageSpec]] = Counter()
        for (source, _), contents in self._messages.taken.items():
            counts[self._placement[source], self._spec([name for _, name in contents])] += POSTED_AHEAD
        for (source, _), names in self._messages.sums_from.items():
            counts[self._placement[source], self._spec(names)] += 1
        return counts

    def receive_counts_of(self, away: AwayFromHome) -> Counter[tuple[int, MessageSpec]]:
        """Return the number of receive buffers needed at a time for contributions from elsewhere, per worker and message."""
        sent = Counter((worker, stage) for (stage, _), worker in away.workers.items())
        counts: Counter[tuple[int, MessageSpec]] = Counter()
        for (source, _), contents in (*self._messages.taken.items(), *self._messages.taken_back.items()):
            for (worker, stage), count in sent.items():
                if stage == source:
                    counts[worker, self._spec([name for _, name in contents])] += min(count, POSTED_AHEAD)
        return counts

    def begin_step(self, step: int, away: AwayFromHome | None = None, first: int = 0) -> None:
        """Start a step, whose sums have begun, and discard the remains of an interrupted one.

        Args:
            step: The step's number.
            away: The microbatches whose contributions come from workers of other replicas.
            first: The number of the first microbatch.
        """
        self._step = step
        self._away = away
        self._next = self._posted = first
        self._own.clear()
        self._ended.clear()
        self._arriving.clear()

    def add(self, stage: int, name: str, microbatch: int, gradient: Tensor | None, *, fresh: bool = False) -> None:
        """Take a stage's gradient of a parameter of one microbatch; for a shared one, one contribution, in autograd's order.

        No other code refers to a ``fresh`` gradient: it may become the sum.
        """
        if name in self._shared:
            gradient = torch.zeros_like(self._sums.parameters[name]) if gradient is None else gradient
            # Kept or sent beyond the end of W, when the buffers it may be a view of are reused.
            self._own.setdefault(microbatch, {}).setdefault((stage, name), []).append(gradient.clone())
        elif gradient is not None:
            self._sums.add(name, gradient, fresh=fresh)

    def end_microbatch(self, stage: int, microbatch: int) -> None:
        """Send contributions for other owners that are complete with a stage's W, and add up those that have arrived."""
        if not self._shared:
            return
        own = self._own.setdefault(microbatch, {})
        ended = self._ended.setdefault(microbatch, set())
        ended.add(stage)
        for edge, contents in self._messages.given.items():
            # Stages run W in microbatch order, so these messages leave in that order too.
            if stage in (needed := self._messages.complete_by[edge]) and needed <= ended:
                gradients = [gradient for key in dict.fromkeys(contents) for gradient in own.pop(key)]
                self._send(self._gradient, edge, microbatch, [name for _, name in contents], gradients)
        if not own:
            del self._own[microbatch]
        self._add_up(wait=False)

    def spec_of_sums(self, names: Sequence[str]) -> MessageSpec:
        """Return the tensors of :meth:`hand_over`: a byte for each name, which is 0 without a gradient, and the gradients."""
        return (TensorSpec((len(names),), torch.uint8, stays_on_host=True), *self._spec(names))

    def hand_over(self, names: Sequence[str]) -> tuple[Tensor, ...]:
        """Return the sums of parameters so far, for another worker that continues them. This rank then has none."""
        taken = [self._sums.take(name) for name in names]
        present = torch.tensor([one is not None for one in taken], dtype=torch.uint8)
        sums = [
            torch.zeros_like(self._sums.parameters[name]) if one is None else one
            for name, one in zip(names, taken, strict=True)
        ]
        return (present, *sums)

    def take_over(self, names: Sequence[str], sums: Sequence[Tensor]) -> None:
        """Continue sums that another worker has handed over. They are copied."""
        present, *found = sums
        for name, is_present, one in zip(names, present.tolist(), found, strict=True):
            if is_present:
                self._sums.put(name, one)

    def unshared(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return each of these parameters that no other rank contributes to, once."""
        return tuple(name for name in dict.fromkeys(names) if name not in self._shared)

    def end_step(self) -> None:
        """Finish the step: after this every copy of a shared parameter has the same sum."""
        self._add_up(wait=True)
        for edge, names in self._messages.sums_to.items():
            # Copies: replicas, clipping and the optimizer may write to the gradients before the message has left.
            sums = [self._sums.total(name).clone() for name in names]
            self._send(self._sum, edge, 0, names, sums)
        returning = {edge: self._receive(self._sum, edge, 0, names) for edge, names in self._messages.sums_from.items()}
        for edge, pending in returning.items():
            for name, gradient in zip(self._messages.sums_from[edge], pending.wait(self._timeout), strict=True):
                self._sums.put(name, gradient)
            self._transport.release(pending)

    def _add_up(self, wait: bool) -> None:
        while self._owned:
            while len(self._arriving) < POSTED_AHEAD and self._have_ended(self._posted):
                self._arriving[self._posted] = {
                    edge: self._receive_contributions(edge, self._posted, [name for _, name in contents])
                    for edge, contents in self._messages.taken_of(self._posted, self._away)
                }
                self._posted += 1
            arriving = self._arriving.get(self._next)
            if arriving is None:
                return
            if not wait and not all(pending.done for pending in arriving.values()):
                return
            contributions = self._own.pop(self._next, {})
            for edge, pending in arriving.items():
                contents = self._messages.taken.get(edge) or self._messages.taken_back[edge]
                for key, gradient in zip(contents, pending.wait(self._timeout), strict=True):
                    contributions.setdefault(key, []).append(gradient)
            for tied in self._owned:
                total, *others = (contributions[user, tied.name].pop(0) for user in tied.order)
                for other in others:
                    total = total + other
                self._sums.add(tied.name, total)
            for pending in arriving.values():
                self._transport.release(pending)
            del self._arriving[self._next]
            self._next += 1

    def _have_ended(self, microbatch: int) -> bool:
        """Return whether the stages of this rank that contribute to a microbatch here have done so."""
        ended = self._ended.get(microbatch, set())
        return all(one in ended or self._worker_away(one, microbatch) is not None for one in self._messages.contributing)

    def _worker_away(self, stage: int, microbatch: int) -> int | None:
        return None if self._away is None else self._away.workers.get((stage, microbatch))

    def _receive_contributions(self, edge: Edge, microbatch: int, names: Sequence[str]) -> Pending:
        worker = self._worker_away(edge[0], microbatch)
        if self._away is None or worker is None:
            return self._receive(self._gradient, edge, microbatch, names)
        identity = Identity(self._step, self._gradient, *edge, microbatch, self._spec(names), self._away.replica)
        return self._away.transport.receive(worker, identity)

    def _spec(self, names: Sequence[str]) -> MessageSpec:
        parameters = (self._sums.parameters[name] for name in names)
        return tuple(TensorSpec(tuple(one.shape), one.dtype) for one in parameters)

    def _send(self, purpose: Purpose, edge: Edge, microbatch: int, names: Sequence[str], tensors: Sequence[Tensor]) -> None:
        identity = Identity(self._step, purpose, *edge, microbatch, self._spec(names), self._replica)
        if self._before_message is not None:
            self._before_message(edge[1])
        self._transport.send(self._placement[edge[1]], identity, tensors)

    def _receive(self, purpose: Purpose, edge: Edge, microbatch: int, names: Sequence[str]) -> Pending:
        identity = Identity(self._step, purpose, *edge, microbatch, self._spec(names))
        return self._transport.receive(self._placement[edge[0]], identity)


def _by_edge(pairs: Iterable[tuple[Edge, Content]]) -> dict[Edge, list[Content]]:
    by_edge: dict[Edge, list[Content]] = {}
    for edge, content in pairs:
        by_edge.setdefault(edge, []).append(content)
    return by_edge
