"""Links between ranks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Link:
    """A link between two ranks, alike both ways: its latency in seconds, and the seconds that each byte occupies it."""

    latency: float
    per_byte: float
