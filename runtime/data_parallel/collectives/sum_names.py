"""The name of a sum, which each of its messages bears: replicas that would do something else find out, and none has a sum."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import torch
from torch import Tensor

from adaptra.collectives.rounds import Algorithm

_DIGEST_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class SumName:
    """What names a sum.

    Attributes:
        number: Its number, the same on all replicas.
        text: What it is, for people.
        tensors: A digest of what is added.
    """

    number: int
    text: str
    tensors: bytes

    def code(self, rounds: bytes) -> int:
        """Return 32 bits of the digest of the sum and of what :func:`rounds_between` returns for two replicas."""
        return int.from_bytes(_digest(self.text.encode() + self.tensors + rounds)[:4], "big")


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
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest()


def name_of(algorithm: Algorithm) -> str:
    """Return the name of an algorithm, with what it was given."""
    return getattr(algorithm, "__name__", None) or str(algorithm)
