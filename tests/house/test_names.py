"""Comments, docstrings and pages name modules, what modules define, and files that exist."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from names import FILE, NAME, exists, is_there
from paths import ROOT
from prose import files, sentences

SOURCES = [
    ROOT / name for name in "README.md CONTRIBUTING.md SECURITY.md docs adaptra_compile csrc bench examples tests".split()
]
OTHERS = {"adaptra.transports"}
"""Names that are nobody's module: the entry points under which packages offer transports."""


def missing(text: str, path: Path) -> list[str]:
    """The names in a text that nothing has, and in C++ the files that are not there."""
    found = [name for name in NAME.findall(text) if name not in OTHERS and not exists(name)]
    if path.suffix in {".cc", ".h"}:
        found += [file for file in FILE.findall(text) if not is_there(file, path)]
    return found


def offences_in(path: Path) -> Iterator[str]:
    if missing(path.read_text(), path):  # of code too, which is quicker to see than its sentences are to find
        for sentence in sentences(path):
            yield from (f"{path}:{sentence.line}: {name}" for name in missing(sentence.text, path))


def test_what_comments_and_pages_name_exists() -> None:
    offences = [
        offence
        for path in files([ROOT / name for name in SOURCES])
        for offence in offences_in(path)
        if "golden" not in path.parts
    ]
    assert not offences, "\n".join(offences)


@pytest.mark.parametrize(
    ("name", "is_real"),
    [
        ("adaptra.planning", True),
        ("adaptra.planning.planner.plan", True),
        ("adaptra.program.Kind", True),  # imported there
        ("adaptra.simulation.cost.CostModel.uniform", True),
        ("adaptra.simulation.cost.CostModel.forward", True),
        ("adaptra.simulation.cost.CostModel.sideways", False),
        ("adaptra._C.simulate", True),
        ("adaptra.cost", False),
        ("adaptra.cost.CostModel", False),
        ("adaptra.program.Kinds", False),
        ("adaptra.planning.planner.plan.more", False),
    ],
)
def test_a_name_that_does_not_exist_is_found(tmp_path: Path, name: str, is_real: bool) -> None:
    (tmp_path / "one.cc").write_text(f"// As in\n// {name}.\nint one;\n")
    assert exists(name) is is_real
    assert list(offences_in(tmp_path / "one.cc")) == ([] if is_real else [f"{tmp_path}/one.cc:1: {name}"])


def test_a_file_that_does_not_exist_is_found(tmp_path: Path) -> None:
    (tmp_path / "two.h").touch()
    comment = "// See two.h, docs/security.md, delegate/wire/frame.cc, frame.cc, bindings*.cc, three.h and docs/one.cc."
    (tmp_path / "one.cc").write_text(f"{comment}\nint one;\n")
    assert list(offences_in(tmp_path / "one.cc")) == [f"{tmp_path}/one.cc:1: {name}" for name in ("three.h", "docs/one.cc")]
