"""Which tests can't run on the stand-in, and why."""

from __future__ import annotations

from typing import Final

REFUSALS: Final[dict[str, str]] = {}
"""By the beginning of a test's name: the reason."""


def cannot_run_on_cuda(test: str) -> str | None:
    """Why a test can't run on the stand-in, or None if it can."""
    return next((reason for name, reason in REFUSALS.items() if test.startswith(name)), None)
