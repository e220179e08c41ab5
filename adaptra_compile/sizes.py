"""Units of memory, and sizes for people."""

from __future__ import annotations

from typing import Final

UNITS: Final = {"B": 1} | {
    f"{prefix}{unit}": base**power for unit, base in (("B", 1000), ("iB", 1024)) for power, prefix in enumerate("KMGT", start=1)
}
"""Bytes by unit."""


def size_text(size: float) -> str:
    """A size for people: at least three digits of the largest binary unit that it fills."""
    for unit in ("GiB", "MiB", "KiB"):
        if size >= UNITS[unit]:
            return f"{size / UNITS[unit]:.1f} {unit}"
    return f"{size:.0f} B"
