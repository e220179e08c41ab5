"""The map of the product: its modules, the rooms they stand in, and which module imports which."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from pathlib import Path

from paths import ROOT

SOURCES = {"adaptra": ROOT / "adaptra_compile", "adaptra.passes": ROOT / "passes", "adaptra.runtime": ROOT / "runtime"}


def modules() -> dict[str, Path]:
    """Every module of the product by its full name; of a folder's ``__init__`` the folder's name."""
    found: dict[str, Path] = {}
    for package, folder in SOURCES.items():
        for path in sorted(folder.rglob("*.py")):
            if any(parent.is_symlink() for parent in path.relative_to(ROOT).parents if str(parent) != "."):
                continue  # the links that make three folders one package
            parts = [part for part in path.relative_to(folder).with_suffix("").parts if part != "__init__"]
            found[".".join([package, *parts])] = path
    return found


MODULES = modules()


def room_of(module: str) -> str:
    """The room that a module stands in, without the package's name; of a file that stands in none, the file's."""
    path = MODULES[module]
    room = module if path.name == "__init__.py" or path.parent == SOURCES["adaptra"] else module.rpartition(".")[0]
    return room.removeprefix("adaptra").removeprefix(".")


def imported_by(path: Path, known: Collection[str] = MODULES) -> Iterator[str]:
    """The modules that a file imports anywhere in it, types included; of a name in a module that is not known, that module."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [f"{node.module}.{alias.name}" for alias in node.names if alias.name != "_C"]  # the extension
            yield from (name if name in known else node.module for name in names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


IMPORTS = {module: {name for name in imported_by(path) if name in MODULES} for module, path in MODULES.items()}
"""By the name of a module, the modules of the product that it imports."""
