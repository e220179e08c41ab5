"""The hand-written stub of the extension says what the extension has: the same names, and for every function its parameters."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import adaptra
from adaptra import _C

STUB = ast.parse((Path(adaptra.__file__).parent / "_C.pyi").read_text())


def _parameters(arguments: ast.arguments) -> list[str]:
    return [one.arg for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs) if one.arg != "self"]


def _declared(body: list[ast.stmt]) -> dict[str, list[str] | None]:
    """Name to parameters, or to None for what is no function."""
    found: dict[str, list[str] | None] = {}
    for node in body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("__"):
            is_property = any(isinstance(one, ast.Name) and one.id == "property" for one in node.decorator_list)
            found[node.name] = None if is_property else _parameters(node.args)
        elif isinstance(node, ast.ClassDef):
            found[node.name] = None
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = None
    return found


def _bound(owner: object) -> dict[str, list[str] | None]:
    """What the extension really has; nanobind writes each function's signature into the first line of its docstring."""
    found: dict[str, list[str] | None] = {}
    for name in vars(owner):
        if name.startswith("__"):
            continue
        value = inspect.getattr_static(owner, name)
        if type(value).__name__ in ("nb_func", "nb_method"):
            (signature, *_) = str(value.__doc__).splitlines()
            found[name] = [one for one in re.findall(r"(\w+):", re.sub(r"\[[^][]*\]", "", signature)) if one != "self"]
        else:
            found[name] = None
    return found


def test_the_stub_declares_what_the_extension_binds() -> None:
    declared = {name: parameters for name, parameters in _declared(STUB.body).items() if not name.startswith("_")}
    assert declared == _bound(_C)


def test_the_stub_declares_every_member_of_every_class() -> None:
    classes = {node.name: node for node in STUB.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")}
    assert classes
    for name, node in classes.items():
        assert _declared(node.body) == _bound(getattr(_C, name)), name
