"""The table of docs/errors.md, which tests compare with the errors that are raised."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from paths import DOCS

from adaptra.errors import AdaptraError

DOCUMENT = DOCS / "errors.md"


def documented_errors() -> dict[str, str]:
    """Message, with … for whatever differs, to the name of its class."""
    rows: dict[str, str] = {}
    for line in DOCUMENT.read_text().splitlines():
        found = re.fullmatch(r"\| `(\w+)` \| `([^`|]+)` \|[^|]+\|[^|]+\|", line)
        if found is not None:
            assert found[2] not in rows, f"{DOCUMENT.name} has two rows for {found[2]!r}"
            rows[found[2]] = found[1]
    return rows


def error_of(call: Callable[[], object]) -> tuple[str, str]:
    """The name of the class and the text of the error that a call raises."""
    with pytest.raises(AdaptraError) as caught:
        call()
    return type(caught.value).__name__, str(caught.value)


def check_documented(kind: str, message: str, row: str) -> None:
    """Make sure that an error is the one that a row of the table describes."""
    rows = documented_errors()
    assert row in rows, f"{DOCUMENT.name} has no row {row!r}"
    assert kind == rows[row], f"{kind}: {message}: expected {rows[row]}"
    pattern = ".*".join(map(re.escape, row.split("…")))
    assert re.fullmatch(pattern, message, re.DOTALL), f"{message!r}: expected {row!r}"
