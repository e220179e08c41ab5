"""The transfers of a change of layout: who sends which item to whom, computed alike on every rank.

A layout says who holds each item. A change of cut points moves tensors, by name. A change of roles moves whole roles, each with
all of its state.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from adaptra.program.roles import Roles

Item = TypeVar("Item", bound=Hashable)

Holders = Mapping[Item, Sequence[int]]
"""The ranks that hold each item, of which the first is the one that sends it."""


@dataclass(frozen=True, slots=True)
class Transfer(Generic[Item]):
    """One item that one rank sends to another.

    Attributes:
        item: The item.
        sender, receiver: Their ranks.
    """

    item: Item
    sender: int
    receiver: int


def transfers(before: Holders[Item], after: Holders[Item], items: Iterable[Item]) -> list[Transfer[Item]]:
    """Return the transfers from one layout to another.

    A rank that holds an item already keeps it. Every other new holder receives it once, from its first holder before.

    Args:
        before, after: The holders in the two layouts. Each item has some before.
        items: The items, each once.

    Returns:
        The transfers by receiver, those to one rank in the order of ``items``.
    """
    moving: list[Transfer[Item]] = []
    for item in items:
        sender, had = before[item][0], set(before[item])
        moving += [Transfer(item, sender, holder) for holder in after[item] if holder not in had]
    return sorted(moving, key=lambda one: one.receiver)


def cut_transfers(
    before: Sequence[Collection[str]], after: Sequence[Collection[str]], ranks: Sequence[int]
) -> list[Transfer[str]]:
    """Return the transfers of a change of cut points.

    Args:
        before, after: The names of each stage's tensors.
        ranks: The rank of each stage.
    """
    now = _holders(after, ranks)
    return transfers(_holders(before, ranks), now, now)


def role_transfers(before: Roles, after: Roles) -> list[Transfer[tuple[int, int]]]:
    """Return the transfers of a change of roles. An item is a replica and stage with all of its state."""
    roles = [before.of(rank) for rank in before.ranks]
    was, now = ({role: (rank,) for role, rank in zip(roles, some.ranks, strict=True)} for some in (before, after))
    return transfers(was, now, roles)


def sent_by(rank: int, moving: Iterable[Transfer[Item]]) -> dict[int, list[Item]]:
    """Return the items that a rank sends, by receiver."""
    by_receiver: dict[int, list[Item]] = {}
    for one in moving:
        if one.sender == rank:
            by_receiver.setdefault(one.receiver, []).append(one.item)
    return by_receiver


def senders_to(rank: int, moving: Iterable[Transfer[Item]]) -> list[int]:
    """Return the ranks that send items to a rank, each once."""
    return list(dict.fromkeys(one.sender for one in moving if one.receiver == rank))


def _holders(stages: Sequence[Collection[str]], ranks: Sequence[int]) -> dict[str, list[int]]:
    holders_of: dict[str, list[int]] = {}
    for names, rank in zip(stages, ranks, strict=True):
        for name in names:
            holders = holders_of.setdefault(name, [])
            if rank not in holders:  # several stages of a rank share one tensor
                holders.append(rank)
    return holders_of
