"""Docstrings describe the arguments that there are, and the attributes, each once and in their order."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from textwrap import indent

import pytest
from docstrings import Function, attributes, definitions, fields, is_dataclass, mismatch, parameters
from paths import ROOT
from rooms import MODULES

FILES = [*MODULES.values(), ROOT / "adaptra_compile" / "_C.pyi"]


def offences_in(path: Path) -> Iterator[str]:
    for name, node in definitions(path):
        docstring = ast.get_docstring(node) or ""
        for offence in offences_of(node, docstring):
            yield f"{path.relative_to(ROOT) if path.is_relative_to(ROOT) else path.name}: {name}: {offence}"


def offences_of(node: Function | ast.ClassDef, docstring: str) -> Iterator[str]:
    if isinstance(node, Function):
        made = mismatch(docstring, "Args", parameters(node))
        held = None
    else:
        begins = next((one for one in node.body if isinstance(one, Function) and one.name == "__init__"), None)
        made = None if begins is None else mismatch(docstring, "Args", parameters(begins))
        held = mismatch(docstring, "Attributes", public(node)) if is_dataclass(node) else unknown(node, docstring)
    yield from (one for one in (made, held) if one is not None)


def public(node: ast.ClassDef) -> list[str]:
    return [name for name in fields(node) if not name.startswith("_")]


def unknown(node: ast.ClassDef, docstring: str) -> str | None:
    """Other classes describe what matters of them, and nothing that they lack."""
    known = [*attributes(node), *(one.name for one in node.body if isinstance(one, Function))]
    found = mismatch(docstring, "Attributes", known)
    return found if found is not None and ": expected some of" in found else None


def test_docstrings_describe_the_arguments_and_attributes_that_there_are() -> None:
    offences = [offence for path in FILES for offence in offences_in(path)]
    assert not offences, "\n".join(offences)


@pytest.mark.parametrize(
    ("args", "offence"),
    [
        ("a: One.\nb: Two.\nc: Three.", None),
        ("a, c: One and three.\nb: Two.", None),
        ("a: One, over\n    two lines: this is one.\nb, c: Others.", None),
        ("b: Two.\nOthers: As of another.", None),
        ("a: One.\nb: Two.", "Args: c: not described"),
        ("a: One.\nb: Two.\nd: Four.\nc: Three.", "Args: d: expected some of a, b, c"),
        ("a: One.\nb: Two.\nc: Three.\nb: Again.", "Args: b: described twice"),
        ("b: Two.\na: One.\nc: Three.", "Args: b, a, c: expected the order a, b, c"),
        ("b, a: Both.\nc: Three.", "Args: b, a, c: expected the order a, b, c"),
    ],
)
@pytest.mark.parametrize("of_class", [True, False])
def test_a_docstring_that_is_wrong_is_found(tmp_path: Path, args: str, offence: str | None, of_class: bool) -> None:
    docstring = f'"""Take three.\n\nArgs:\n{indent(args, "    ")}\n"""'
    method = f"def method(self, a, *b, c=1):\n{indent(docstring, '    ')}"
    body = f"{docstring}\n\ndef __init__(self, a, *b, c=1): ..." if of_class else method
    (tmp_path / "one.py").write_text(f"class One:\n{indent(body, '    ')}\n")
    found = list(offences_in(tmp_path / "one.py"))
    assert found == ([] if offence is None else [f"one.py: {'One' if of_class else 'One.method'}: {offence}"])


def test_attributes_that_are_wrong_are_found(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text(
        "@dataclass\nclass One:\n"
        '    """Hold two.\n\n    Attributes:\n        b: Two.\n        a: One.\n    """\n\n'
        "    a: int\n    b: int\n    _c: int\n    d: ClassVar[int] = 1\n\n\n"
        "class Two:\n"
        '    """Hold one.\n\n    Attributes:\n        a: One.\n        b: Two.\n    """\n\n'
        "    def __init__(self):\n        self.a = self.c = 1\n"
    )
    assert list(offences_in(tmp_path / "one.py")) == [
        "one.py: One: Attributes: b, a: expected the order a, b",
        "one.py: Two: Attributes: b: expected some of a, c, __init__",
    ]
