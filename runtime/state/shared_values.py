"""Values that several ranks have: parameters and buffers of replicas, and those that several stages of a pipeline use.

Every rank builds the model for itself, so with different seeds or checkpoints the copies differ from the start. The sum of
their gradients would then train none of them. So the ranks compare a checksum of each tensor. If copies differ, all ranks take
the first holder's values, as DDP takes those of its first rank. First the replicas of each stage are aligned, then the stages
of each pipeline.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from adaptra.errors import ControlError
from adaptra.graph.stages.stages import TrainStage
from adaptra.runtime.data_parallel.checksum import checksums
from adaptra.runtime.data_parallel.gradient_averaging import Replicas
from adaptra.runtime.data_parallel.sites import Sites
from adaptra.runtime.exchange.state_stream import StateStream
from adaptra.runtime.exchange.store_exchange import Check, exchange_data, gather
from adaptra.runtime.transports.base import Transport

NAMED: Final = 6
"""The number of values that are named if copies differ; the others are counted."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Difference:
    """A value whose copies differed.

    Attributes:
        name: The name of the parameter or buffer in the user's model.
        first: The rank whose copy was taken, by its number in the job.
        others: The ranks whose copies differed from it.
    """

    name: str
    first: int
    others: tuple[int, ...]


class SharedValues:
    """The values of one rank that other ranks have too. Used by the thread that runs the steps, between two of them.

    Args:
        state: This rank's parameters and buffers by name.
        stages: The pipeline's stages.
        placement: ``placement[stage]`` is the stage's rank.
        transport: This rank's transport.
        replicas: The ranks that have copies of all of them, in this site.
        sites: Those in other sites; None where all replicas are one site.
        timeout: Seconds to wait for another rank.
        check: As of :func:`adaptra.runtime.exchange.store_exchange.gather`.
    """

    def __init__(
        self,
        state: Mapping[str, Tensor],
        stages: Sequence[TrainStage],
        placement: Sequence[int],
        transport: Transport,
        replicas: Replicas,
        sites: Sites | None,
        timeout: float,
        check: Check,
    ) -> None:
        self._state = state
        self._transport = transport
        self._rank = transport.rank
        # Once this worker's counterparts have the values of the first site, so have its peers.
        self._copies = [*([] if sites is None else [sites.everyone]), replicas]
        self._pipeline = replicas.pipeline
        self._timeout = timeout
        self._check = check
        holders: dict[str, set[int]] = {}
        for stage in stages:
            for name in stage.state_names:
                holders.setdefault(name, set()).add(placement[stage.index])
        self._holders = {name: sorted(ranks) for name, ranks in holders.items() if len(ranks) > 1}
        self._own = {name: ranks for name, ranks in sorted(self._holders.items()) if self._rank in ranks}
        self._calls = 0

    @property
    def exist(self) -> bool:
        """True if any two ranks of the pipeline or its replicas have the same value."""
        return any(copies.count > 1 for copies in self._copies) or bool(self._holders)

    def align(self, stream: StateStream, receive: Callable[[StateStream, int], Mapping[str, Tensor]]) -> None:
        """Take the first holder's values where copies differ, and log that in one line on the job's first rank.

        All ranks of the job call it.

        Args:
            stream: Carries values between the stages of a pipeline.
            receive: Receives a rank's values from the stream, with buffers reserved for them.

        Raises:
            LaunchError: A rank has not answered; names it.
            PeerLostError, TransportError: A rank is lost.
        """
        self._calls += 1
        among = [one for copies in self._copies for one in self._among(copies)]
        own_differences = [*among, *self._among_stages(stream, receive)]
        if any(copies.index > 0 for copies in self._copies):
            return
        rows = [[one.name, one.first, list(one.others)] for one in own_differences]
        gathered = gather(self._transport, f"shared differences/{self._calls}", rows, self._timeout, self._check)
        differences = [_difference(one) for of_rank in gathered or () if isinstance(of_rank, list) for one in of_rank]
        if differences:
            logger.warning("%s", _sentence(differences))

    def _among(self, copies: Replicas) -> list[Difference]:
        if copies.count == 1:
            return []
        names = sorted(self._state)
        columns = copies.gather(checksums([self._state[name] for name in names]))
        ranks = copies.ranks
        differences: list[Difference] = []
        for index, name in enumerate(names):
            others = [rank for rank, column in zip(ranks, columns, strict=True) if column[index] != columns[0][index]]
            if others:
                (value,) = copies.values_of(0, [self._state[name]])
                self._take(name, value)
                differences.append(Difference(name, ranks[0], tuple(others)))
        return differences

    def _among_stages(
        self, stream: StateStream, receive: Callable[[StateStream, int], Mapping[str, Tensor]]
    ) -> list[Difference]:
        """Align the stages. Each holder reads the first holder's checksums and that one reads all others', so both know which
        to send.
        """
        if not self._holders:
            return []
        own = dict(zip(self._own, checksums([self._state[name] for name in self._own]), strict=True))
        firsts = {ranks[0] for ranks in self._own.values()}
        followers = {rank for ranks in self._own.values() if ranks[0] == self._rank for rank in ranks}
        peers = sorted((firsts | followers) - {self._rank})
        texts = exchange_data(self._transport, f"shared values/{self._calls}", own, peers, self._timeout, self._check)
        numbers = {rank: _numbers(text, rank) for rank, text in zip(peers, texts, strict=True)}
        differing_ranks: dict[str, list[int]] = {}
        # In ascending order of the sending rank on every rank; a first holder sends to higher ranks only.
        for source in sorted(firsts):
            if source != self._rank:
                wanted = [
                    name for name, ranks in self._own.items() if ranks[0] == source and numbers[source][name] != own[name]
                ]
                if wanted:
                    for name, value in receive(stream, source).items():
                        self._take(name, value)
                continue
            for rank in sorted(followers - {self._rank}):
                mine = [name for name, ranks in self._own.items() if ranks[0] == self._rank and rank in ranks]
                sent = {name: self._state[name].detach() for name in mine if numbers[rank][name] != own[name]}
                for name in sent:
                    differing_ranks.setdefault(name, []).append(rank)
                if sent:
                    stream.send(rank, sent, self._timeout)
        return [
            Difference(name, self._job_rank(self._rank), tuple(self._job_rank(rank) for rank in ranks))
            for name, ranks in differing_ranks.items()
        ]

    def _job_rank(self, rank: int) -> int:
        return self._pipeline[rank]

    def _take(self, name: str, value: Tensor) -> None:
        with torch.no_grad():
            self._state[name].copy_(value)


def _numbers(data: object, rank: int) -> dict[str, int]:
    if not isinstance(data, dict) or not all(isinstance(one, int) for one in data.values()):
        raise ControlError(f"shared values of rank {rank}: expected a number for each name, got {data!r:.80}")
    return data


def _difference(data: object) -> Difference:
    match data:
        case [str(name), int(first), [*others]]:
            return Difference(name, first, tuple(one for one in others if isinstance(one, int)))
        case _:
            raise ControlError(f"shared values: expected a name and its ranks, got {data!r:.80}")


def _sentence(differences: Sequence[Difference]) -> str:
    """Return all differences in one line: values grouped by the ranks on which they differed."""
    groups: dict[tuple[int, tuple[int, ...]], list[str]] = {}
    for one in differences:
        groups.setdefault((one.first, one.others), []).append(one.name)
    parts = [
        f"{_listed(names)} of rank{_plural(others)} {', '.join(map(str, others))} by those of rank {first}"
        for (first, others), names in groups.items()
    ]
    return (
        f"copies on several ranks differed, as if each rank had drawn its own values: replaced {'; '.join(parts)}; "
        "expected the same seed, or the same checkpoint, on every rank"
    )


def _plural(of: Sequence[object]) -> str:
    return "s" if len(of) > 1 else ""


def _listed(names: Sequence[str]) -> str:
    shown: Iterable[str] = names[:NAMED]
    more = len(names) - NAMED
    return ", ".join(shown) + (f" and {more} more" if more > 0 else "")
