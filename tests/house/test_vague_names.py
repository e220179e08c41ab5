"""What lives longer than three lines says what it is: none is called ``one``, ``found``, ``given`` or ``made``."""

from __future__ import annotations

from pathlib import Path

import pytest
from rooms import MODULES
from vague_names import lives_in

MOST_LINES = 3


def test_what_lives_long_says_what_it_is() -> None:
    assert not [
        f"{module}, line {life.first}: {life.name} lives for {life.lines} lines"
        for module, path in MODULES.items()
        for life in lives_in(path)
        if life.lines > MOST_LINES
    ]


@pytest.mark.parametrize(
    ("code", "lives"),
    [
        ("def f(one):\n\n\n    return one\n", ["one 1-4"]),
        ("def f(one):\n\n    return one\n", ["one 1-3"]),
        ("def f():\n    one = 1\n\n    lambda: one\n", ["one 2-4"]),
        ("def f():\n    lambda one: (\n\n\n        one)\n", []),
        ("def f(a):\n    [\n        one\n\n\n        for one in a]\n", []),
        ("def f(one):\n    [\n        one\n        for one in\n        one]\n", ["one 1-5"]),
        ("def f(a):\n    for one in a:\n        one\n\n    for one in a:\n        one\n", ["one 2-3", "one 5-6"]),
        ("def f(a):\n    one = a\n    for one in a:\n        one\n    one\n", ["one 2-5", "one 3-4"]),
        ("def f():\n    made = 1\n\n    def g():\n        nonlocal made\n        made = 2\n", ["made 2-6"]),
        (
            "class A:\n    def f(self, given):\n        def g(given):\n            given\n        given\n",
            ["given 2-5", "given 3-4"],
        ),
        ("found = 1\n\n\n\n\nfound\n", []),
        ("def f(a):\n    found.b = a\n\n\n\n    found = a\n", ["found 2-6"]),
    ],
)
def test_lives_are_measured(tmp_path: Path, code: str, lives: list[str]) -> None:
    (tmp_path / "m.py").write_text(code)
    measured = [f"{life.name} {life.first}-{life.first + life.lines - 1}" for life in lives_in(tmp_path / "m.py")]
    assert sorted(measured) == lives
