"""Which tests say the most about a change, the nearest first: of what changed, of what imports it, and of the rooms around."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import Final

from paths import DOCS, ROOT, TESTS
from rooms import IMPORTS, MODULES, imported_by, room_of

_MODULE_OF: Final = {str(path.relative_to(ROOT)): module for module, path in MODULES.items()}
_SUPPORT: Final = {path.stem: path for folder in ("support", "links", "rxe") for path in (TESTS / folder).glob("*.py")}
TEST_FILES: Final = tuple(sorted(str(path.relative_to(ROOT)) for path in TESTS.rglob("test_*.py")))


ALWAYS: Final = "tests/house/test_floors.py", "tests/house/test_prose.py"
"""What any change may break: which room may import which, and the words."""


class Near(IntEnum):
    """How near a test stands to a change: the smaller, the nearer."""

    CHANGED = 0
    OWN = 1
    ALWAYS = 2
    IMPORTS = 3
    ROOM = 4
    IMPORTERS = 5


@dataclass(frozen=True, slots=True)
class Chosen:
    """A file of tests, how near it stands to the change, and why it is run."""

    path: str
    near: Near
    why: str


def changed_files(root: Path, base: str | None) -> tuple[str, list[str]]:
    """What differs from where this branch left ``base``: in its commits, in the working tree, and in files not yet added.

    Args:
        root: The checkout.
        base: A commit; None for ``main``, on ``main`` itself for ``origin/main``, without either for the last commit.

    Returns:
        The base that was taken, and the paths, those of removed files too.

    Raises:
        ValueError: ``root`` is no checkout, or has no such commit.
    """

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ValueError(f"git {' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout.strip()

    def exists(commit: str) -> bool:
        command = ["git", "rev-parse", "--quiet", "--verify", f"{commit}^{{commit}}"]
        return subprocess.run(command, cwd=root, capture_output=True, check=False).returncode == 0

    if base is None:
        names = ["origin/main"] if git("branch", "--show-current") == "main" else ["main", "origin/main"]
        base = next((name for name in names if exists(name)), "HEAD")
    since = git("merge-base", base, "HEAD")
    listed = [*git("diff", "--name-only", "--no-renames", since).splitlines()]
    listed += git("ls-files", "--others", "--exclude-standard").splitlines()
    return base, sorted(set(listed))


@cache
def _face() -> dict[str, str]:
    """By a name of the package's face, the module that it comes from."""
    return {
        alias.name: name if (name := f"{node.module}.{alias.name}") in MODULES else str(node.module)
        for node in ast.walk(ast.parse(MODULES["adaptra"].read_text()))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


@cache
def _imports_of(path: Path) -> frozenset[str]:
    return frozenset(imported_by(path))


@cache
def read_by(path: Path) -> frozenset[str]:
    """The modules of the product that a file of tests imports, itself or through a file of its support."""
    found = set[str]()
    for name in _imports_of(path):
        if name in MODULES:
            found.add(name)
        elif name in _SUPPORT and _SUPPORT[name] != path:
            found |= read_by(_SUPPORT[name])
    if "adaptra" in found:
        named = re.findall(r"\badaptra\.(\w+)|from adaptra import (\w+)", path.read_text())
        found |= {_face()[name] for pair in named for name in pair if name in _face()}
    return frozenset(found)


@cache
def _support_of(path: Path) -> frozenset[Path]:
    """The files of support that a file imports, itself or through others."""
    direct = {_SUPPORT[name] for name in _imports_of(path) if name in _SUPPORT} - {path}
    return frozenset(direct.union(*(_support_of(one) for one in direct)))


def _tested_importers_of(module: str) -> set[str]:
    """The modules that import a module; if no test imports any of them, those that import these, and so on."""
    found, wider = {module}, set[str]()
    while not any(read_by(ROOT / path) & wider for path in TEST_FILES):
        wider = {other for other, imported in IMPORTS.items() if imported & found} - {module}
        wider = wider - {"adaptra"} or wider  # the face imports much, and all tests import the face
        if wider <= found:
            break
        found |= wider
    return wider


def _of_module(module: str) -> Iterator[Chosen]:
    """The tests of a module: those that import it, those of its room, and those of what stands on it."""
    importers = _tested_importers_of(module)
    room = room_of(module)
    folder = f"tests/{room.replace('.', '/')}/"
    for path in TEST_FILES:
        read = read_by(ROOT / path)
        if Path(path).stem == f"test_{module.rpartition('.')[2]}":
            yield Chosen(path, Near.OWN, f"is named after {module}")
        elif module in read:
            yield Chosen(path, Near.IMPORTS, f"tests {module}")
        elif room and path.startswith(folder) and "/" not in path.removeprefix(folder):
            yield Chosen(path, Near.ROOM, f"stands in the room of {module}")
        elif found := sorted(read & importers):
            yield Chosen(path, Near.IMPORTERS, f"tests {found[0]}, which stands on {module}")


def _of_extension(changed: str) -> Iterator[Chosen]:
    """The tests of what calls the C++ of a folder: the delegate's, or that of programs and plans."""
    is_delegate = "delegate" in changed
    for module, path in MODULES.items():
        if "adaptra import _C" not in path.read_text() or is_delegate != room_of(module).endswith("delegate"):
            continue
        yield from (
            Chosen(one.path, one.near, f"{one.why}, which calls {changed}")
            for one in _of_module(module)
            if one.near < Near.IMPORTERS
        )


def _of_name(changed: str) -> Iterator[Chosen]:
    """The tests that name a file: an example, a page, a figure, a golden file."""
    path = Path(changed)
    name = re.compile(rf"(?<![\w.-]){re.escape(path.name)}(?![\w-])|['\"]{re.escape(path.stem)}['\"]")
    if path.parts[:2] == ("tests", "golden"):
        name = re.compile(rf"\bgolden\(|{re.escape(path.stem)}")
    for test in TEST_FILES:
        read = [ROOT / test, *_support_of(ROOT / test)]
        if any(name.search(one.read_text()) for one in read):
            yield Chosen(test, Near.IMPORTS, f"names {changed}")
        elif DOCS in (ROOT / changed).parents and test.startswith("tests/docs/"):
            yield Chosen(test, Near.ROOM, "reads the documentation")


def _of_file(changed: str) -> Iterator[Chosen]:
    path = ROOT / changed
    if changed in TEST_FILES:
        yield Chosen(changed, Near.CHANGED, "changed")
    elif changed in _MODULE_OF:
        yield from _of_module(_MODULE_OF[changed])
    elif path in _SUPPORT.values():
        users = (test for test in TEST_FILES if path in _support_of(ROOT / test))
        yield from (Chosen(test, Near.IMPORTS, f"imports {changed}") for test in users)
    elif changed.startswith("csrc/"):
        yield from _of_extension(changed)
    elif changed.startswith(("adaptra_compile/", "passes/", "runtime/")):
        folder = f"tests/{path.parent.relative_to(ROOT)}/".replace("/adaptra_compile", "")
        beside = (test for test in TEST_FILES if test.startswith(folder))
        yield from (Chosen(test, Near.ROOM, f"stands in the room that {changed} stood in") for test in beside)
    else:
        yield from _of_name(changed)


def choose(changed: Sequence[str]) -> list[Chosen]:
    """The files of tests to run after a change, the nearest first; of equally near ones, those first that import least."""
    found: dict[str, Chosen] = {}
    always = [Chosen(path, Near.ALWAYS, "is run always") for path in ALWAYS]
    for one in [*(chosen for path in changed for chosen in _of_file(path)), *always]:
        if one.path not in found or one.near < found[one.path].near:
            found[one.path] = one
    return sorted(found.values(), key=lambda one: (one.near, len(read_by(ROOT / one.path)), one.path))


def to_type_check(changed: Sequence[str]) -> list[str] | None:
    """The files whose types a change may break: the changed ones and those that import them; None for all files."""
    python = [path for path in changed if path.endswith((".py", ".pyi"))]
    if any(not (ROOT / path).exists() or path.endswith(".pyi") for path in python) or "pyproject.toml" in changed:
        return None
    modules = {_MODULE_OF[path] for path in python if path in _MODULE_OF}
    support = {ROOT / path for path in python} & set(_SUPPORT.values())
    found = set(python)
    found |= {str(MODULES[module].relative_to(ROOT)) for module, imported in IMPORTS.items() if imported & modules}
    for path in [*map(ROOT.joinpath, TEST_FILES), *_SUPPORT.values()]:
        names = _imports_of(path)
        if names & modules or any(_SUPPORT.get(name) in support for name in names):
            found.add(str(path.relative_to(ROOT)))
    return sorted(found)
