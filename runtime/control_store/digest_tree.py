"""A tree of the ranks in which digests go up and come down again, so that each rank reads those of a few others only.

Rank 0 is the root, and rank r has the children 8r+1 to 8r+8. A rank's digest covers its own text and its children's digests, so
the root's digest covers the texts of all ranks. The digests beside a rank's way to the root come down to it. From them and its
own text it computes the root's digest itself. So nobody else can choose that digest: it depends on a number that the rank drew.
Ranks compute the same one only if none of their texts was replaced on the way.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

FANOUT: Final = 8
"""The most children of a rank. A thousand ranks have a tree of four levels."""


@dataclass(frozen=True, slots=True)
class DigestLevel:
    """One rank on another's way to the root.

    Attributes:
        text: The digest of that rank's own text.
        children: The digests of its children, in ascending order of their ranks.
    """

    text: str
    children: tuple[str, ...]


def parent_of(rank: int, fan_out: int = FANOUT) -> int:
    """Return the parent of a rank other than 0."""
    return (rank - 1) // fan_out


def children_of(rank: int, ranks: int, fan_out: int = FANOUT) -> range:
    """Return the children of a rank; ``ranks`` is the number of ranks of the job."""
    first = fan_out * rank + 1
    return range(min(first, ranks), min(first + fan_out, ranks))


def subtree_of(rank: int, ranks: int, fan_out: int = FANOUT) -> Iterator[range]:
    """Yield a rank and its descendants, one level of the tree after the other."""
    first, end = rank, rank + 1
    while first < ranks:
        yield range(first, min(end, ranks))
        first, end = fan_out * first + 1, fan_out * end + 1


def ancestors_of(rank: int) -> list[int]:
    """Return the ranks on the way to the root: the parent first, rank 0 last."""
    ancestors: list[int] = []
    while rank:
        rank = parent_of(rank)
        ancestors.append(rank)
    return ancestors


def text_digest(rank: int, text: str) -> str:
    """Return the digest of a rank's own text, in hexadecimal."""
    return hashlib.sha256(b"text" + rank.to_bytes(8, "big") + text.encode()).hexdigest()


def subtree_digest(text: str, children: Sequence[str]) -> str:
    """Return a rank's digest.

    Args:
        text: The digest of its own text.
        children: The digests of its children.
    """
    return hashlib.sha256(b"subtree" + b"".join(bytes.fromhex(one) for one in (text, *children))).hexdigest()


def root_digest(rank: int, own: str, levels: Sequence[DigestLevel]) -> str:
    """Return the root's digest as a rank computes it from its own.

    Args:
        rank: The rank.
        own: Its digest.
        levels: The ranks on its way to the root, its parent first.
    """
    for level in levels:
        parent = parent_of(rank)
        children = list(level.children)
        children[rank - FANOUT * parent - 1] = own
        rank, own = parent, subtree_digest(level.text, children)
    return own


def lowest_two(values: Iterable[tuple[int, str]]) -> list[tuple[int, str]]:
    """Return the lowest rank with its value, and the lowest rank that has another value, if one has.

    Of several such pairs together it returns the same as of all their ranks. So a subtree of any size is described by two
    ranks: they show the lowest rank that differs from a value, whichever value that is.
    """
    ordered = sorted(values)
    return [*ordered[:1], *[one for one in ordered if one[1] != ordered[0][1]][:1]]
