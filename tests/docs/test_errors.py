"""Every row of docs/errors.md is what some test compares an error with; ``check_documented`` sees to the other way round."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from errors_table import documented_errors
from paths import TESTS


def constants(path: Path) -> Iterator[str]:
    """The texts that a file holds, each as Python joins it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_every_documented_error_is_named_by_a_test() -> None:
    named = {text for path in TESTS.rglob("*.py") if path != Path(__file__).resolve() for text in constants(path)}
    assert sorted(documented_errors().keys() - named) == []
