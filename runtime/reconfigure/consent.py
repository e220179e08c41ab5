"""Consent to a state transfer: each rank states that it can transfer, or why not. Then all ranks do, or none does."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Final

from adaptra.errors import StateError
from adaptra.json_files import Fields
from adaptra.runtime.control_store.schema import decode_all
from adaptra.runtime.exchange.state_transfer import Handover, check_movable

_TEXT_LIMIT: Final = 4000


@dataclass(frozen=True, slots=True)
class Consent:
    """One rank's consent or objection.

    Attributes:
        objection: The reason why it can't transfer, or an empty text.
        groups: The number of parameter groups of its optimizer.
        hands_over: For each rank that takes over from it, the number of parameter groups that the transferred parameters need.
        alike: What has to be the same on all ranks: names and texts.
    """

    objection: str = ""
    groups: int = 0
    hands_over: tuple[tuple[int, int], ...] = ()
    alike: tuple[tuple[str, str], ...] = ()

    @staticmethod
    def to(groups: int, leaving: Mapping[int, Handover]) -> Consent:
        """Return the consent of a rank to the handovers that leave it, by the rank that takes them.

        Raises:
            StateError: A part of them can't move.
        """
        for part in leaving.values():
            check_movable(part)
        needed = tuple((to, max(part.groups.values(), default=-1) + 1) for to, part in leaving.items())
        return Consent(groups=groups, hands_over=needed)

    @staticmethod
    def refused(error: Exception) -> Consent:
        """Return the objection of a rank that can't transfer."""
        return Consent(f"{type(error).__name__}: {error}"[:_TEXT_LIMIT])

    def encode(self) -> str:
        """Return the text that is sent."""
        return json.dumps(asdict(self))


def check_consents(what: str, texts: Sequence[str]) -> None:
    """Refuse a transfer that some rank can't make. With the same texts every rank comes to the same result.

    Args:
        what: A name of the transfer, for the error.
        texts: The consent of each rank, by rank.

    Raises:
        StateError: Names the rank and its reason; nothing has moved.
        ControlError: A consent is malformed.
    """
    said = [_read(fields) for fields in decode_all(texts, "consent")]
    for rank, one in enumerate(said):
        if one.objection:
            raise StateError(f"{what}: nothing has moved, since rank {rank} can't: {one.objection}")
    for rank, consent in enumerate(said):
        for (name, first), (_, own) in zip(said[0].alike, consent.alike, strict=True):
            if own != first:
                raise StateError(
                    f"{what}: nothing has moved, since the {name} of rank {rank} is {own}, and that of rank 0 {first}: "
                    "expected the same on every rank"
                )
    for rank, one in enumerate(said):
        for to, needed in one.hands_over:
            if said[to].groups < needed:
                raise StateError(
                    f"{what}: nothing has moved, since rank {to}'s optimizer has {said[to].groups} parameter groups, and rank "
                    f"{rank} has parameters for it in {needed}: expected the same groups on every rank, empty ones too"
                )


def _read(fields: Fields) -> Consent:
    objection, groups, pairs = fields.text("objection"), fields.whole("groups"), fields.items("hands_over")
    texts = fields.items("alike")
    fields.end()
    needed: list[tuple[int, int]] = []
    alike: list[tuple[str, str]] = []
    for pair in texts:
        match pair:
            case [str(name), str(text)]:
                alike.append((name, text))
            case _:
                raise fields.refuse("alike", "pairs of a name and a text", pair)
    for pair in pairs:
        match pair:
            case [int(to), int(count)]:
                needed.append((to, count))
            case _:
                raise fields.refuse("hands_over", "pairs of a rank and a number of groups", pair)
    return Consent(objection, groups, tuple(needed), tuple(alike))
