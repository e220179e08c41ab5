"""Units of memory, and sizes for people."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final, overload

from adaptra.checks import require_count
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


class MemoryUnit(Enum):
    """What a limit of memory counts."""

    MICROBATCHES = "microbatches"
    """Microbatches whose activations are held whole. I may free a part of one."""
    BYTES = "bytes"
    OWN = "own"
    """The unit of a case from a file, which its author knows."""


@dataclass(frozen=True, slots=True)
class MemoryLimit(Sequence[float]):
    """The limit of the activations on each rank, a sequence of numbers by rank.

    Attributes:
        by_rank: The limit of each rank.
        unit: What they count. It is said to people, and two limits of other units may be equal.
    """

    by_rank: tuple[float, ...]
    unit: MemoryUnit = field(default=MemoryUnit.OWN, compare=False)

    @staticmethod
    def given(memory: Any, ranks: int) -> MemoryLimit:
        """Return the limit that ``memory=`` asks for: a number of microbatches, or a text such as ``2GiB`` or ``500 MB``.

        Raises:
            OptionError: It is neither a size of at least one byte nor a whole number of at least 1.
        """
        if not isinstance(memory, str):
            require_count("memory", memory)
            return MemoryLimit((float(memory),) * ranks, MemoryUnit.MICROBATCHES)
        found = _SIZE.fullmatch(memory.strip())
        size = 0 if found is None or found[2] not in UNITS else int(float(found[1]) * UNITS[found[2]])
        if size < 1:
            raise OptionError(f"memory={memory!r}: expected a size such as '2GiB' or '500MB', or a number of microbatches")
        return MemoryLimit((float(size),) * ranks, MemoryUnit.BYTES)

    def of(self, by_rank: Iterable[float]) -> MemoryLimit:
        """Return other limits in the same unit."""
        return MemoryLimit(tuple(by_rank), self.unit)

    def text(self, amount: float) -> str:
        """Return an amount of memory in the limit's unit, for people."""
        match self.unit:
            case MemoryUnit.MICROBATCHES:
                return f"{amount:g} microbatches"
            case MemoryUnit.BYTES:
                return f"{amount:,.0f} bytes"
            case MemoryUnit.OWN:
                return f"{amount:g}"

    @overload
    def __getitem__(self, index: int) -> float: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[float, ...]: ...
    def __getitem__(self, index: int | slice) -> float | tuple[float, ...]:
        return self.by_rank[index]

    def __len__(self) -> int:
        return len(self.by_rank)
