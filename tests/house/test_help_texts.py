"""Help texts of commands can be printed: argparse formats them, so a percent sign is written twice."""

from __future__ import annotations

import ast

from paths import ROOT
from rooms import MODULES


def help_texts() -> dict[str, str]:
    files = [*sorted((ROOT / "bench").glob("*.py")), *sorted((ROOT / "tests").rglob("*.py")), *MODULES.values()]
    return {
        f"{path.name}:{node.lineno}": keyword.value.value
        for path in files
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument"
        for keyword in node.keywords
        if keyword.arg == "help" and isinstance(keyword.value, ast.Constant) and isinstance(keyword.value.value, str)
    }


def test_help_texts_can_be_formatted() -> None:
    texts = help_texts()
    assert len(texts) > 100

    def is_printed(text: str) -> bool:
        try:
            return bool(text % {"default": 0, "prog": "", "metavar": "", "choices": ""})
        except (KeyError, TypeError, ValueError):
            return False

    assert is_printed("5 %% of steps, default %(default)s") and not is_printed("5 % of steps")
    assert [place for place, text in texts.items() if not is_printed(text)] == []
