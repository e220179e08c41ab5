"""What lives longer than three lines says what it is: none is called ``one``, ``found``, ``given`` or ``made``.

The rooms named here have such variables still, and may only have fewer. A number is exact: one that goes down is written down
at once, and a room without any is removed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from rooms import MODULES, room_of
from vague_names import lives_in

MOST_LINES = 3

ROOMS = {
    "cli": 26,
    "frontend.running": 4,
    "passes": 4,
    "planning": 6,
    "planning.explaining": 5,
    "planning.layouts": 2,
    "planning.remedies": 5,
    "planning.responses": 6,
    "planning.routes": 19,
}
"""Variables and parameters by room, a folder of modules or a module that stands in none."""


def long_lives(modules: Mapping[str, Path]) -> dict[str, list[str]]:
    """What lives too long, by module."""
    return {
        module: [f"{path.name}:{life.first}: {life.name} lives for {life.lines} lines" for life in lives]
        for module, path in modules.items()
        if (lives := [life for life in lives_in(path) if life.lines > MOST_LINES])
    }


def offences(offenders: Mapping[str, list[str]], allowed: Mapping[str, int]) -> list[str]:
    """The rooms whose number is not the one allowed, and where its variables are."""
    return [
        f"{room} has {len(offenders.get(room, ()))} vague names: expected {allowed.get(room, 0)}; "
        "rename what is new, or write down the smaller number\n" + "\n".join(offenders.get(room, ()))
        for room in sorted({*offenders, *allowed})
        if len(offenders.get(room, ())) != allowed.get(room, 0)
    ]


def test_what_lives_long_says_what_it_is() -> None:
    by_room: dict[str, list[str]] = {}
    for module, lives in long_lives(MODULES).items():
        by_room.setdefault(room_of(module), []).extend(lives)
    assert not offences(by_room, ROOMS)
    assert min(ROOMS.values(), default=1) > 0


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


def test_a_number_is_exact() -> None:
    assert not offences({"a": ["m.py:1: one"]}, {"a": 1})
    assert [text.partition(";")[0] for text in offences({"a": ["m.py:1: one"]}, {"a": 2, "b": 1})] == [
        "a has 1 vague names: expected 2",
        "b has 0 vague names: expected 1",
    ]
    assert [text.splitlines()[-1] for text in offences({"a": ["m.py:1: one"]}, {})] == ["m.py:1: one"]
