"""Texts of two numbers that a reader compares."""

from __future__ import annotations

from typing import Final

_MOST_DIGITS: Final = 6
"""Decimal places beyond which two times are alike: a nanosecond."""


def milliseconds_apart(duration: float, other: float) -> tuple[str, str]:
    """Return two times, given in seconds, as milliseconds with one decimal place, or as many as tell them apart.

    Times that differ by less than a nanosecond give the same text, and so do equal ones.
    """
    for digits in range(1, _MOST_DIGITS + 1):
        texts = tuple(f"{1e3 * seconds:.{digits}f} ms" for seconds in (duration, other))
        if texts[0] != texts[1]:
            return texts[0], texts[1]
    return f"{1e3 * duration:.1f} ms", f"{1e3 * other:.1f} ms"


def instead_of(one: float, other: float) -> str:
    """Return "1.0 ms instead of 2.0 ms" for two times in seconds, or "1.0 ms, as before" if they are alike."""
    now, before = milliseconds_apart(one, other)
    return f"{now} instead of {before}" if now != before else f"{now}, as before"
