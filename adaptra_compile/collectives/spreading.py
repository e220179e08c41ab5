"""How results spread from their owners while a late rank brings one term a round: a pattern that repeats in every round.

The late rank's term of part t reaches its owner in round t, and the result is ready for the next round. There are n = N-1
owners. A place is an owner counted from the part's own one, modulo n; an age is a number of rounds since the term arrived.
An owner does in each round what its residue does, its place less the age of the part, so each residue sends and receives once.

Results double: whoever has one at age a sends it at all ages from a+1 to the deadline k. The residues of these sends are an
interval of k-a. Intervals of all senders lie one behind the other, in any order. They fill the circle of n residues
exactly where N = 2^k - 2^(k-s) + 1, and the late rank receives at age s. Else some places do not send.
Shorter intervals fill the circle then.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Final


@dataclass(frozen=True, slots=True)
class Pattern:
    """The pattern of one number of ranks.

    Attributes:
        receives: The age at which each place receives; 0 for the owner itself.
        sends: The age at which each residue sends, from 1 on; 0 for the owner that swaps with the late rank.
        late: The age at which the late rank receives; 0 if it swaps.
    """

    receives: tuple[int, ...]
    sends: tuple[int, ...]
    late: int

    @property
    def depth(self) -> int:
        """The age at which every owner has the result."""
        return max(self.receives)

    @property
    def is_swap(self) -> bool:
        """Whether the late rank gets the fold of all other terms while it sends its own."""
        return self.late == 0

    def pairs(self, age: int) -> list[tuple[int, int | None]]:
        """Return the place that sends and the one that receives, None for the late rank, of each message at an age above 0."""
        owners = len(self.receives)
        senders = [(residue + age) % owners for residue, sends in enumerate(self.sends) if sends == age]
        receivers: list[int | None] = [place for place, receives in enumerate(self.receives) if receives == age]
        return list(zip(senders, [*receivers, None] if self.late == age else receivers, strict=True))


_SWAPS: Final = {
    5: ("0431", "0341"),
    7: ("043221", "043221"),
    9: ("05542431", "03454251"),
    11: ("0354215424", "0432455421"),
    13: ("035154242433", "025343454321"),
}
"""The ages of swap patterns that the layout does not give, found by a solver: receives and sends, one digit each."""


@dataclass(frozen=True, slots=True)
class _Residue:
    """A residue at which an interval begins, or within one.

    Attributes:
        age: When the place that belongs to it receives.
        deadline: The place is this residue plus the deadline.
        length: The sends that begin here; 0 for a place that does not send.
    """

    age: int
    deadline: int
    length: int


@lru_cache
def pattern_of(ranks: int) -> Pattern:
    """Return the pattern of a number of ranks from 3 on; its depth is ⌈log2 N⌉ or one more."""
    depth = (ranks - 1).bit_length()
    surplus = sorted((2**depth - 2 ** (depth - late) + 1 - ranks, late) for late in range(1, depth + 1))
    return next(pattern for more, late in surplus if more >= 0 and (pattern := pattern_with(ranks, late)) is not None)


@lru_cache
def swap_pattern_of(ranks: int) -> Pattern | None:
    """Return the pattern in which the owner's send to the late rank is that of the swap; None for three ranks."""
    if ranks in _SWAPS:
        receives, sends = _SWAPS[ranks]
        return Pattern(tuple(map(int, receives)), tuple(map(int, sends)), 0)
    depth = (ranks - 1).bit_length()
    pattern = pattern_with(ranks, depth)
    if pattern is None or pattern.sends[0] != depth:
        return None
    return Pattern(pattern.receives, (0, *pattern.sends[1:]), 0)


def pattern_with(ranks: int, late: int) -> Pattern | None:
    """Return the pattern in which the late rank receives at a given age; None if this layout has none."""
    depth = (ranks - 1).bit_length()
    groups = _shortened(2**depth - 2 ** (depth - late) + 1 - ranks)
    early = Counter(depth - cut for cut in chain(*groups))
    senders, leaves = [0], 0
    for age in range(1, depth + 1):
        leaves = len(senders) - (age == late) - early[age]
        if leaves < 0 or early[0] or min(early, default=0) < 0:
            return None
        senders += [age] * leaves if age < depth else []
    rows: list[_Residue] = []
    leaf = _Residue(depth, depth, 0)
    for singles, is_longer, behind, age in sorted(_blocks(groups, depth), key=lambda block: -block[2] - block[1]):
        deadline, needed = depth + is_longer, behind + 2 if is_longer else 3
        host = max((index for index, sender in enumerate(senders) if deadline - sender >= needed), default=None)
        if host is None:
            return None
        sender = senders.pop(host)
        inner = [_Residue(depth + 1, depth + 1, 0)] * behind + [_Residue(age, age, 0)]
        rows += [_Residue(depth, depth + 1, 1)] * singles + [_Residue(sender, deadline, deadline - sender), *inner]
        rows += [leaf] * (deadline - sender - 1 - len(inner))
    for sender in senders:
        rows += [_Residue(sender, depth, depth - sender)] + [leaf] * (depth - sender - 1)
    return _turned(rows, ranks - 1, late)


def _turned(rows: list[_Residue], owners: int, late: int) -> Pattern | None:
    """Return the pattern of rows in their order, turned so that the place of age 0 is place 0."""
    if len(rows) != owners:
        return None
    root = next(begin + row.deadline for begin, row in enumerate(rows) if row.age == 0)
    receives = {(begin + row.deadline - root) % owners: row.age for begin, row in enumerate(rows)}
    sends = {
        (begin + after - root) % owners: row.deadline - after for begin, row in enumerate(rows) for after in range(row.length)
    }
    if len(receives) < owners or len(sends) < owners:
        return None
    return Pattern(tuple(receives[place] for place in range(owners)), tuple(sends[place] for place in range(owners)), late)


def _shortened(more: int) -> list[tuple[int, ...]]:
    """Return which places stop sending, by the rounds that each has left, so that ``more`` fewer ranks are reached.

    A place with j rounds left would reach 2^j - 1 others; j/2 of them are reached one round later instead. So odd ones come in
    pairs.
    """
    choices: list[tuple[int, tuple[int, ...]]] = []
    for left in range(1, 12):
        for cuts in [(left, other) for other in range(1, left + 1, 2)] if left % 2 else [(left,)]:
            choices.append((sum(2**cut - 1 for cut in cuts) - sum(cuts) // 2, cuts))
    choices.sort(key=lambda choice: (-choice[0], len(choice[1])))
    groups: list[tuple[int, ...]] = []
    while more:
        saved, cuts = next(choice for choice in choices if 0 < choice[0] <= more)
        groups.append(cuts)
        more -= saved
    return groups


def _blocks(groups: list[tuple[int, ...]], depth: int) -> list[tuple[int, bool, int, int]]:
    """Return what stands in place of each shortened interval.

    First come the places before its host that send once, at the last age, and whether the host sends at it too. Then come the
    leaves of that age behind the host, and the age of the place that stops sending.
    """
    blocks: list[tuple[int, bool, int, int]] = []
    for cuts in groups:
        for number, cut in enumerate(cuts):
            half = cut // 2
            if cut % 2 == 0:
                blocks.append((half - 1, True, half, depth - cut))
            elif number == 0:
                blocks.append((half, True, half, depth - cut))
            elif half:
                blocks.append((half - 1, True, half + 1, depth - cut))
            else:
                blocks.append((0, False, 1, depth - cut))
    return blocks
