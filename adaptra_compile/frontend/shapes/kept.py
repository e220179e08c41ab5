"""How many shapes of batches are kept compiled, and what is said of a loop that has more."""

from __future__ import annotations

from typing import Final

from adaptra.graph import CompiledStages

_FEWEST: Final = 16
_MOST: Final = 128
_MEMORY: Final = 2**30
_BYTES_PER_OP: Final = 50_000
"""What a shape's graphs take on the host for each op of the model: about 8 MB for a GPT-2 of four layers."""


def most_shapes(wanted: int | None, compiled: CompiledStages) -> int:
    """Return the number of shapes to keep beside the first one. It is the same on all ranks.

    Args:
        wanted: The user's number, or None.
        compiled: The stages of the first shape, whose graphs are about as large as those of others.
    """
    if wanted is not None:
        return wanted
    ops = 0 if compiled.captured is None else len(compiled.captured.analysis.nodes)
    return max(_FEWEST, min(_MOST, _MEMORY // (_BYTES_PER_OP * max(1, ops))))


class ShapesWarning:
    """Counts compilations of new shapes, and has a warning once there are more than are kept, or than are usual.

    Args:
        most: The number of shapes that are kept.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._seconds: list[float] = []
        self._limit = min(most, _FEWEST)

    def after(self, seconds: float) -> str | None:
        """Return the warning, if there is one after a compilation that took this long."""
        self._seconds.append(seconds)
        if len(self._seconds) != self._limit + 1:
            return None
        return (
            f"{len(self._seconds)} shapes of batches were compiled, in {sum(self._seconds):.1f} s, each in about "
            f"{sum(self._seconds) / len(self._seconds):.1f} s; {self._most} are kept, and of more than that the least recently "
            "used is compiled again: pad lengths to few sizes, as by pad_to_multiple_of= of a collator, group rows "
            "by length, or keep more by Options(shapes=...); this is said once"
        )
