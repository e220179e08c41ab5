"""Links between ranks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Link:
    """A link between two ranks, equal in both directions: its latency in seconds, and its occupancy in seconds per byte."""

    latency: float
    per_byte: float
