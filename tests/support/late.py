"""The time that `make check` has: what would begin later is skipped, and said."""

from __future__ import annotations

import time
from typing import Any, Final

import pytest

NOT_BEGUN: Final = "not begun within the time given"


def skip_if_late(config: pytest.Config) -> None:
    """Skip a test that would begin after the time that ``--begin-before`` names."""
    latest: Any = config.getoption("--begin-before")
    if latest is not None and time.time() > latest:
        pytest.skip(NOT_BEGUN)
