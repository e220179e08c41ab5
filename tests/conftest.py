"""Options and fixtures that all tests share."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from golden_files import check_golden
from hypothesis import settings

# A loaded machine is no reason to fail: pytest's own time limit ends what hangs, and speed is measured in bench/.
settings.register_profile("adaptra", deadline=None)
settings.load_profile("adaptra")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--accept-golden", action="store_true", help="write golden files instead of comparing with them")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compares a text with a golden file: ``golden("name.sched", text)``; see golden_files.py."""
    return partial(check_golden, accept=request.config.getoption("--accept-golden"))
