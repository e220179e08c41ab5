"""Names of the product's modules and of what they define, as comments and pages give them, without an import."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import Final

from paths import ROOT
from rooms import MODULES

NAME: Final = re.compile(r"(?<![\w./-])adaptra(?:\.[A-Za-z_]\w*)+(?![\w/]|\.\w)")
"""A dotted name of the product. One that goes on otherwise is a host's, a file's or an address."""

FILE: Final = re.compile(r"(?<![\w/.<-])[\w*/]+\.(?:cc|h|py|pyi|md)\b")
"""A file by its name or its path."""

_STUBS: Final = {"adaptra._C": ROOT / "adaptra_compile" / "_C.pyi"}
_SOURCES: Final = {**MODULES, **_STUBS}


def exists(name: str) -> bool:
    """True if a dotted name is a module's, or that of what a module or one of its classes defines or imports."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        path = _SOURCES.get(".".join(parts[:end]))
        if path is not None:
            return _defines(_parsed(path).body, parts[end:])
    return False


def is_there(file: str, beside: Path) -> bool:
    """True if a file is beside another one, or at a path from the repository, or in the sources in C++ by its name."""
    roots = [beside.parent, ROOT, ROOT / "csrc"]
    return any(any(root.glob(file)) for root in roots) or ("/" not in file and any((ROOT / "csrc").rglob(file)))


@cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _defines(body: list[ast.stmt], parts: list[str]) -> bool:
    return not parts or any(_is(node, parts[0], parts[1:]) for node in body)


def _is(node: ast.stmt, name: str, rest: list[str]) -> bool:
    """True if a statement defines a name, and within it the rest."""
    match node:
        case ast.ClassDef():
            within = _defines(node.body, rest) or bool(node.bases) or _assigns(node, rest[0])
            return node.name == name and within
        case ast.ImportFrom():
            is_imported = any((one.asname or one.name) == name for one in node.names)
            return is_imported and (not rest or exists(".".join([node.module or "", name, *rest])))
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            return node.name == name and not rest
        case ast.Assign() | ast.AnnAssign():
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            return not rest and any(isinstance(one, ast.Name) and one.id == name for one in targets)
        case _:
            return isinstance(node, ast.If) and _defines(node.body, [name, *rest])


def _assigns(node: ast.ClassDef, name: str) -> bool:
    return any(isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store) and one.attr == name for one in ast.walk(node))
