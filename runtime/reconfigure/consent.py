"""What a rank says before state moves between ranks: that it can, or why it can't. Then all ranks move, or none does."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Final

from adaptra.errors import StateError
from adaptra.runtime.control_store.schema import Fields, decode
from adaptra.runtime.reconfigure.state_transfer import Handover, check_movable

_TEXT_LIMIT: Final = 4000


@dataclass(frozen=True, slots=True)
class Consent:
    """What one rank says.

    Attributes:
        objection: Why it can't move, or an empty text.
        groups: How many parameter groups its optimizer has.
        hands_over: Ranks that take over, and in how many groups the parameters are that each is handed.
    """

    objection: str = ""
    groups: int = 0
    hands_over: tuple[tuple[int, int], ...] = ()

    @staticmethod
    def to(groups: int, leaving: Mapping[int, Handover]) -> Consent:
        """Of a rank that hands over what leaves it, by the rank that takes it.

        Raises:
            StateError: Something of it can't move.
        """
        for part in leaving.values():
            check_movable(part)
        needed = tuple((to, max(part.groups.values(), default=-1) + 1) for to, part in leaving.items())
        return Consent(groups=groups, hands_over=needed)

    @staticmethod
    def refused(error: Exception) -> Consent:
        """Of a rank that can't move."""
        return Consent(f"{type(error).__name__}: {error}"[:_TEXT_LIMIT])

    def encode(self) -> str:
        """As the text that travels."""
        return json.dumps(asdict(self))


def check_consents(what: str, texts: Sequence[str]) -> None:
    """Refuse a move that some rank can't make; with the same texts every rank comes to the same end.

    Args:
        what: Is to move, for the error.
        texts: What each rank said, by rank.

    Raises:
        StateError: Names the rank and its reason; nothing has moved.
        ControlError: What a rank said is not as expected.
    """
    said = [_read(decode(text.encode(), f"consent of rank {rank}")) for rank, text in enumerate(texts)]
    for rank, one in enumerate(said):
        if one.objection:
            raise StateError(f"{what}: nothing has moved, since rank {rank} can't: {one.objection}")
    for rank, one in enumerate(said):
        for to, needed in one.hands_over:
            if said[to].groups < needed:
                raise StateError(
                    f"{what}: nothing has moved, since rank {to}'s optimizer has {said[to].groups} parameter groups, and rank "
                    f"{rank} has parameters for it in {needed}: expected the same groups on every rank, empty ones too"
                )


def _read(fields: Fields) -> Consent:
    objection, groups, pairs = fields.text("objection"), fields.whole("groups"), fields.items("hands_over")
    fields.end()
    needed: list[tuple[int, int]] = []
    for pair in pairs:
        match pair:
            case [int(to), int(count)]:
                needed.append((to, count))
            case _:
                raise fields.refuse("hands_over", "pairs of a rank and a number of groups", pair)
    return Consent(objection, groups, tuple(needed))
