"""What a replica says of a sum ahead of it, so that replicas which would do something else find out.

Each replica tells the next one, and the last one the first. So one that differs from the others differs from a neighbour.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Final

import torch
from torch import Tensor

from adaptra.collectives.rounds import Algorithm
from adaptra.errors import ControlError

DIGEST_BYTES: Final = 16
_TEXT_BYTES: Final = 240


@dataclass(frozen=True, slots=True)
class SumName:
    """What names a sum.

    Attributes:
        text: For people.
        tensors: A digest of what is added.
    """

    text: str
    tensors: bytes

    def digest(self, rounds: bytes) -> bytes:
        """Return the digest of the sum and of what :func:`rounds_between` returns for two replicas."""
        return _digest(self.text.encode() + self.tensors + rounds)

    def tag(self, rounds: bytes) -> int:
        """Return the tag of its messages between two replicas, below 2**30. Replicas that play other rounds never meet."""
        return int.from_bytes(self.digest(rounds)[:4], "big") >> 2


@dataclass(frozen=True, slots=True)
class Opening:
    """What one replica says to the next.

    Attributes:
        source, destination: The replicas.
        ranks: Their ranks, as errors name them.
        text, digest: What this replica says, or would.
        round: Ahead of all rounds.
    """

    source: int
    destination: int
    ranks: tuple[int, int]
    text: str
    digest: bytes
    round: int = -1

    def memory(self) -> Tensor:
        """Return what is sent."""
        return torch.frombuffer(bytearray(self.digest + self.text.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES)), dtype=torch.uint8)

    def place(self) -> Tensor:
        """Return memory for what arrives."""
        return torch.empty(DIGEST_BYTES + _TEXT_BYTES, dtype=torch.uint8)

    def check(self, arrived: Tensor) -> None:
        """Compare what has arrived with what this replica would say.

        Raises:
            ControlError: They differ; names both.
        """
        said = bytes(arrived.tolist())
        if said[:DIGEST_BYTES] != self.digest:
            theirs = said[DIGEST_BYTES:].decode(errors="replace").rstrip()
            raise ControlError(
                f"rank {self.ranks[1]} adds {self.text}; rank {self.ranks[0]}: {theirs}: "
                "expected the same on all replicas of a stage"
            )


def openings(name: SumName, rounds_with: Callable[[int], bytes], replica: int, ranks: Sequence[int]) -> tuple[Opening, Opening]:
    """Return what a replica says to the next one, and what it expects from the one before.

    Args:
        name: Of the sum.
        rounds_with: Returns what :func:`rounds_between` does for this replica and another one.
        replica: Its number.
        ranks: The ranks of all replicas, at least two.
    """
    before, after = (replica - 1) % len(ranks), (replica + 1) % len(ranks)
    to_next, from_last = (name.digest(rounds_with(one)) for one in (after, before))
    return (
        Opening(replica, after, (ranks[replica], ranks[after]), name.text, to_next),
        Opening(before, replica, (ranks[before], ranks[replica]), name.text, from_last),
    )


@lru_cache(maxsize=64)
def rounds_between(algorithm: Algorithm, replicas: int, parts: int, pair: tuple[int, int]) -> bytes:
    """Return a digest of the messages between two replicas. Both compute the same if they play the same rounds."""
    of_one = algorithm(replicas, parts, pair[0])
    between = [(one.source, *one.value) for one in of_one if {one.source, one.destination} == {*pair}]
    return _digest(repr(sorted(between)).encode())


def digest_of_tensors(tensors: Sequence[Tensor], owners: Sequence[int] = ()) -> bytes:
    """Return a digest of tensors' dtypes and sizes, and of the replicas that own them."""
    return _digest_of(tuple((one.dtype, one.numel()) for one in tensors), tuple(owners))


@lru_cache(maxsize=16)
def _digest_of(tensors: tuple[tuple[torch.dtype, int], ...], owners: tuple[int, ...]) -> bytes:
    return _digest(repr((tensors, owners)).encode())


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest()


def name_of(algorithm: Algorithm) -> str:
    """Return the name of an algorithm, with what it was given."""
    if isinstance(algorithm, partial):
        return f"{algorithm.func.__name__}{algorithm.args}{algorithm.keywords or ''}"
    return getattr(algorithm, "__name__", type(algorithm).__name__)
