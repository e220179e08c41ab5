"""What docstrings say that functions take and classes hold, beside what they do take and hold."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

Function = ast.FunctionDef | ast.AsyncFunctionDef

_ENTRY: Final = re.compile(r"(?P<names>\*{0,2}\w+(?:, \*{0,2}\w+)*)(?: \([^)]*\))?:")
_OTHERS: Final = "Others"
"""The last entry of a section that leaves the rest to another class's."""


def entries(docstring: str, title: str) -> list[list[str]] | None:
    """The names that each entry of a section such as ``Args:`` describes, in order; None without such a section."""
    lines = iter(docstring.splitlines())
    if f"{title}:" not in lines:  # this takes the lines up to it
        return None
    found: list[list[str]] = []
    for line in lines:
        if line and not line.startswith(" "):
            break
        if line.startswith("    ") and not line.startswith("     "):
            entry = _ENTRY.match(line.strip())
            found.append([line.strip()] if entry is None else [name.lstrip("*") for name in entry["names"].split(", ")])
    return found


def mismatch(docstring: str, title: str, names: Sequence[str]) -> str | None:
    """What is wrong with a section that describes these names, or None.

    Each name is described once. Entries are in the order of their first names, and the names of an entry are in order too.
    Names with one description need not stand together in the signature.
    """
    said = entries(docstring, title)
    if said is None:
        return None
    leaves_rest = bool(said) and said[-1] == [_OTHERS]
    flat = [name for entry in (said[:-1] if leaves_rest else said) for name in entry]
    if unknown := [name for name in flat if name not in names]:
        return f"{title}: {', '.join(unknown)}: expected some of {', '.join(names)}"
    if twice := [name for name in dict.fromkeys(flat) if flat.count(name) > 1]:
        return f"{title}: {', '.join(twice)}: described twice"
    if not leaves_rest and (missing := [name for name in names if name not in flat]):
        return f"{title}: {', '.join(missing)}: not described"
    orders = [[entry[0] for entry in said if entry != [_OTHERS]], *said]
    if not all(order == sorted(order, key=lambda name: _place(name, names)) for order in orders):
        return f"{title}: {', '.join(flat)}: expected the order {', '.join(names)}"
    return None


def _place(name: str, names: Sequence[str]) -> int:
    return names.index(name) if name in names else len(names)


def parameters(function: Function) -> list[str]:
    """The names of a function's parameters in order, without ``self`` and ``cls``."""
    given = function.args
    among = [*given.posonlyargs, *given.args, given.vararg, *given.kwonlyargs, given.kwarg]
    return [one.arg for one in among if one is not None and one.arg not in {"self", "cls"}]


def is_dataclass(node: ast.ClassDef) -> bool:
    """True if a class has a field for each annotation in its body: a dataclass, or a NamedTuple."""
    names = [ast.unparse(one.func if isinstance(one, ast.Call) else one) for one in (*node.decorator_list, *node.bases)]
    return any(name.split(".")[-1] in {"dataclass", "NamedTuple"} for name in names)


def fields(node: ast.ClassDef) -> list[str]:
    """The names of a dataclass's own fields in order."""
    return [
        one.target.id
        for one in node.body
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name) and "ClassVar" not in ast.unparse(one.annotation)
    ]


def attributes(node: ast.ClassDef) -> list[str]:
    """The names of a class's instance attributes: its fields, and what its methods assign to ``self``."""
    found = dict.fromkeys(fields(node))
    for one in ast.walk(node):
        if isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store) and ast.unparse(one.value) == "self":
            found[one.attr] = None
    return list(found)


def definitions(path: Path) -> Iterator[tuple[str, Function | ast.ClassDef]]:
    """All functions and classes of a file with their qualified names."""

    def within(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, Function | ast.ClassDef]]:
        for node in body:
            if isinstance(node, Function | ast.ClassDef):
                yield prefix + node.name, node
                yield from within(node.body, f"{prefix}{node.name}.")

    return within(ast.parse(path.read_text()).body, "")
