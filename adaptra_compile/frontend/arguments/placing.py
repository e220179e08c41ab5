"""The argument ``placement`` of ``compile``: a name or the rank of each stage, and what it means for a number of stages."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

from adaptra.checks import is_list_of
from adaptra.errors import OptionError
from adaptra.program.placement import in_turn, v_shaped

STRAIGHT: Final = "straight"

_V: Final = "v"
_INTERLEAVED: Final = re.compile(r"interleaved(?:-([1-9]\d*))?")
_USUAL_CHUNKS: Final = 2

Placement = str | Sequence[int]
"""A name, or the rank of each stage."""


def placed_on(placement: Placement, stages: int) -> tuple[int, ...]:
    """Return the rank of each stage.

    Args:
        placement: ``"straight"``, ``"v"``, ``"interleaved"`` for two stages on each rank, ``"interleaved-3"`` for three and so
            on, or the rank of each stage.
        stages: The number of stages.

    Raises:
        OptionError: There is no such placement, or it doesn't fit the number of stages.
    """
    chosen: Any = placement
    if isinstance(chosen, str):
        return _by_name(chosen, stages)
    if not is_list_of(int, chosen) or not chosen or any(isinstance(rank, bool) for rank in chosen):
        raise _unknown(chosen)
    if len(chosen) != stages:
        raise OptionError(f"placement={chosen!r} with stages={stages}: expected one rank for every stage, not {len(chosen)}")
    met = list(dict.fromkeys(chosen))
    if met != list(range(len(met))):
        raise OptionError(
            f"placement={chosen!r}: expected ranks numbered 0, 1, … in the order of their first stages; mesh= says which ranks "
            "of the job these are"
        )
    return tuple(chosen)


def _by_name(name: str, stages: int) -> tuple[int, ...]:
    if name == STRAIGHT:
        return in_turn(stages)
    chunks = _USUAL_CHUNKS
    if name != _V:
        interleaved = _INTERLEAVED.fullmatch(name)
        if interleaved is None:
            raise _unknown(name)
        chunks = _USUAL_CHUNKS if interleaved[1] is None else int(interleaved[1])
    if stages % chunks:
        raise OptionError(f"placement={name!r} with stages={stages}: expected a multiple of {chunks}, the stages of each rank")
    return v_shaped(stages // chunks) if name == _V else in_turn(stages // chunks, chunks)


def _unknown(given: object) -> OptionError:
    return OptionError(
        f"placement={given!r}: expected 'straight', 'v', 'interleaved', 'interleaved-N' for N stages on each rank, or a list "
        "with the rank of each stage"
    )
