"""Classes hold at most 15 attributes and functions take at most 9 arguments, but for those named here, which may only shrink.

A number here is exact. One that goes down is written down at once, so that it can't go up again; one at the bound is removed.
None is added, and none goes up: what has grown too large is cut instead.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path

import pytest
from docstrings import attributes, definitions, parameters
from rooms import MODULES

MOST_ATTRIBUTES = 15
MOST_ARGUMENTS = 9

CLASSES = {
    "adaptra.frontend.arguments.arguments.CompileArguments": 16,
    "adaptra.equations.replicas.ReplicaEquations": 23,
    "adaptra.runtime.control.deciding.policy.Policy": 17,
    "adaptra.runtime.step_messages.shared_gradients.Gradients": 18,
    "adaptra.runtime.worker.stages.stage.TrainingStage": 16,
    "adaptra.simulation.case.Case": 18,
}
"""Fields of a dataclass, or what the methods of another class assign to ``self``; inherited ones are the base class's."""

FUNCTIONS = {
    "adaptra.frontend.api.compile": 16,
    "adaptra.graph.compile.compile_stages": 12,
    "adaptra.report.live.LiveTable.update": 10,
    "adaptra.runtime.devices.pack_kernel.copy_flat": 14,
    "adaptra.runtime.measuring.monitor.Monitor.message": 10,
    "adaptra.runtime.membership.membership.Membership.__init__": 10,
    "adaptra.runtime.worker.stages.stage.TrainingStage.__init__": 11,
    "adaptra.runtime.worker.stages.stage.TwoPassStage.__init__": 10,
}


def attributes_in(modules: Mapping[str, Path]) -> dict[str, int]:
    return {
        f"{module}.{name}": len(attributes(node))
        for module, path in modules.items()
        for name, node in definitions(path)
        if isinstance(node, ast.ClassDef)
    }


def arguments_in(modules: Mapping[str, Path]) -> dict[str, int]:
    return {
        f"{module}.{name}": len(parameters(node))
        for module, path in modules.items()
        for name, node in definitions(path)
        if not isinstance(node, ast.ClassDef)
    }


def offences(found: Mapping[str, int], most: int, allowed: Mapping[str, int]) -> list[str]:
    """What is too large and not allowed, and what is allowed but is smaller, or gone."""
    grown = [
        f"{name} has {count}: expected {allowed.get(name, most)}"
        for name, count in found.items()
        if count > allowed.get(name, most)
    ]
    shrunk = [
        f"{name} has {found.get(name, 0)}: write that down in place of {count}, or remove it"
        for name, count in allowed.items()
        if found.get(name, 0) < count
    ]
    return [*grown, *shrunk]


def test_classes_have_few_attributes() -> None:
    assert not offences(attributes_in(MODULES), MOST_ATTRIBUTES, CLASSES)
    assert min(CLASSES.values()) > MOST_ATTRIBUTES


def test_functions_take_few_arguments() -> None:
    assert not offences(arguments_in(MODULES), MOST_ARGUMENTS, FUNCTIONS)
    assert min(FUNCTIONS.values()) > MOST_ARGUMENTS


@pytest.mark.parametrize(
    ("allowed", "found"),
    [
        ({}, ["m.One has 3: expected 2", "m.Two has 3: expected 2"]),
        ({"m.One": 3, "m.Two": 3}, []),
        ({"m.One": 4, "m.Two": 3}, ["m.One has 3: write that down in place of 4, or remove it"]),
        ({"m.One": 3, "m.Two": 3, "m.Three": 3}, ["m.Three has 0: write that down in place of 3, or remove it"]),
    ],
)
def test_what_grows_and_what_shrinks_is_found(tmp_path: Path, allowed: Mapping[str, int], found: list[str]) -> None:
    (tmp_path / "m.py").write_text(
        "class One:\n    def __init__(self, a):\n        self.a, self.b = a, 1\n\n    def more(self):\n        self.c = 1\n\n\n"
        "class Two:\n    a: int\n    b: int\n    c: int\n    d: ClassVar[int]\n"
    )
    assert offences(attributes_in({"m": tmp_path / "m.py"}), 2, allowed) == found


def test_arguments_of_every_sort_count(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text("class One:\n    def two(self, a, /, b, *c, d, **e):\n        def three(f): ...\n")
    assert arguments_in({"m": tmp_path / "m.py"}) == {"m.One.two": 5, "m.One.two.three": 1}
