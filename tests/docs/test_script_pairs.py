"""Pairs of scripts differ by few lines, and the documentation shows these."""

from __future__ import annotations

import re

import pytest
from script_pairs import MOST_CHANGED_LINES, PAIRS, changed_lines, difference, page_of


@pytest.mark.parametrize("pair", PAIRS)
def test_scripts_differ_by_few_lines(pair: str) -> None:
    assert changed_lines(pair) <= MOST_CHANGED_LINES, difference(pair)


@pytest.mark.parametrize("pair", PAIRS)
def test_the_documentation_shows_the_difference(pair: str, request: pytest.FixtureRequest) -> None:
    page = page_of(pair)
    text = page.read_text()
    if request.config.getoption("--accept-golden"):
        text = re.sub(r"```diff\n.*?```", lambda _: f"```diff\n{difference(pair)}```", text, flags=re.DOTALL)
        page.write_text(text)
    assert f"```diff\n{difference(pair)}```" in text, f"run this test with --accept-golden, and commit {page.name}"


def test_there_are_pairs() -> None:
    assert PAIRS
