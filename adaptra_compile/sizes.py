"""Units of memory, and sizes for people."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from adaptra.errors import OptionError

UNITS: Final = {"B": 1} | {
    f"{prefix}{unit}": base**power for unit, base in (("B", 1000), ("iB", 1024)) for power, prefix in enumerate("KMGT", start=1)
}
"""Bytes by unit."""


def size_text(size: float) -> str:
    """Return a size as text for people: at least three digits of the largest binary unit that it fills."""
    for unit in ("GiB", "MiB", "KiB"):
        if size >= UNITS[unit]:
            return f"{size / UNITS[unit]:.1f} {unit}"
    return f"{size:.0f} B"


_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?) ?([KMGT]?i?B)")


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """The limit of a rank's activations, in one of two units.

    Attributes:
        microbatches: Microbatches between F and W; None if the limit is in bytes.
        bytes: Bytes, with the temporary memory of ops and the messages in flight; None if the limit is in microbatches.
    """

    microbatches: int | None = None
    bytes: int | None = None

    @staticmethod
    def parse(given: int | str) -> MemoryLimit:
        """Return the limit that ``memory=`` asks for: a number of microbatches, or a text such as ``2GiB`` or ``500 MB``.

        Raises:
            OptionError: The text is not a size, or the size is below one byte.
        """
        if isinstance(given, int):
            return MemoryLimit(microbatches=given)
        found = _SIZE.fullmatch(given.strip())
        size = 0 if found is None or found[2] not in UNITS else int(float(found[1]) * UNITS[found[2]])
        if size < 1:
            raise OptionError(f"memory={given!r}: expected a size such as '2GiB' or '500MB', or a number of microbatches")
        return MemoryLimit(bytes=size)
