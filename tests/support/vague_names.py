"""Variables whose names say nothing of what they hold, and how many lines each lives."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

VAGUE: Final = frozenset({"one", "found", "given", "made"})

Occurrence = ast.Name | ast.arg
_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_Comprehension = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
_Loop = ast.For | ast.AsyncFor


@dataclass(frozen=True)
class Life:
    """All occurrences of a variable: of a loop's target those within the loop, of another those of its whole function."""

    function: str
    name: str
    occurrences: list[Occurrence]

    @property
    def first(self) -> int:
        return min(occurrence.lineno for occurrence in self.occurrences)

    @property
    def lines(self) -> int:
        return max(occurrence.lineno for occurrence in self.occurrences) - self.first + 1


def lives_in(path: Path) -> Iterator[Life]:
    """The life of each vague variable in a file's functions; those of lambdas and comprehensions are left out."""

    def within(node: ast.AST, prefix: str) -> Iterator[Life]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                for name in sorted(VAGUE & bound_by(child)):
                    yield from _lives(child, prefix + child.name, name)
            named = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            yield from within(child, f"{prefix}{child.name}." if named else prefix)

    return within(ast.parse(path.read_text()), "")


def bound_by(scope: ast.AST) -> set[str]:
    """The names that a function, lambda or comprehension binds itself."""
    if isinstance(scope, _Comprehension):
        targets = [node for generator in scope.generators for node in ast.walk(generator.target)]
        return {node.id for node in targets if isinstance(node, ast.Name)}
    assert isinstance(scope, _Function)
    arguments = {node.arg for node in ast.walk(scope.args) if isinstance(node, ast.arg)}
    outer = {name for node in _own(scope) if isinstance(node, ast.Nonlocal | ast.Global) for name in node.names}
    stored = {node.id for node in _own(scope) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return (arguments | stored) - outer


def _own(scope: ast.AST) -> Iterator[ast.AST]:
    """What stands in a scope itself; of a comprehension within, what assignment expressions bind outside it."""
    for child in ast.iter_child_nodes(scope):
        if isinstance(child, _Comprehension):
            yield from (node.target for node in ast.walk(child) if isinstance(node, ast.NamedExpr))
        elif not isinstance(child, _Function | ast.ClassDef):
            yield child
            yield from _own(child)


def occurrences(node: ast.AST, name: str) -> Iterator[Occurrence]:
    """Where a node names a variable that its function binds, without the scopes within that bind the name anew."""
    for child in ast.iter_child_nodes(node):
        if (isinstance(child, ast.Name) and child.id == name) or (isinstance(child, ast.arg) and child.arg == name):
            yield child
        if not (isinstance(child, _Function | _Comprehension) and name in bound_by(child)):
            yield from occurrences(child, name)
        elif isinstance(child, _Comprehension):
            yield from occurrences(ast.Expr(child.generators[0].iter), name)  # which the scope around it evaluates


def _lives(function: ast.FunctionDef | ast.AsyncFunctionDef, qualified: str, name: str) -> Iterator[Life]:
    rest = list(occurrences(function, name))
    for loop in (node for node in _own(function) if isinstance(node, _Loop)):
        within = [node for node in occurrences(loop, name) if node in rest]
        if any(isinstance(node, ast.Name) and node.id == name for node in ast.walk(loop.target)):
            yield Life(qualified, name, within)
            rest = [node for node in rest if node not in within]
    if rest:
        yield Life(qualified, name, rest)
