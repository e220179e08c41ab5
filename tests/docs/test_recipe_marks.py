"""Every recipe says by which test it is run, and that test reads the recipe; or that it is untested, and what it would need."""

from __future__ import annotations

import ast
import re

import pytest
from paths import ROOT
from recipes import RECIPES

NAMES = sorted(path.stem for path in RECIPES.glob("*.md"))


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_has_one_mark_that_is_true(name: str) -> None:
    text = (RECIPES / f"{name}.md").read_text()
    marks = re.findall(r"^\*(Tested by `[^`]+`|Untested: needs [^*]+)[^*]*\*$", text, re.MULTILINE)
    assert len(marks) == 1, marks
    if marks[0].startswith("Tested"):
        test = ROOT / marks[0].split("`")[1]
        read = [
            call.args[0].value
            for call in ast.walk(ast.parse(test.read_text()))
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "write_recipe"
            if isinstance(call.args[0], ast.Constant)
        ]
        assert name in read, f"{test.name} does not read {name}.md"
