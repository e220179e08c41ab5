"""How long tests wait for what does not end."""

from __future__ import annotations

from typing import Final

HUNG: Final = 500.0
"""Seconds after which processes of a test count as hung. A busy machine takes many times as long as a quiet one.

It is less than pytest's own limit, so that what they have printed until then is shown.
"""
