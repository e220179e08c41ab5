"""Every pass by text files: a program in, a program or a refusal out. ``tests/support/pass_goldens.py`` says how they read."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from pass_goldens import FILES, FOLDER, PassGolden
from paths import DOCS, GOLDEN

from adaptra.passes import PASSES


def name_of(path: Path) -> str:
    return path.relative_to(FOLDER).with_suffix("").as_posix()


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_the_command_prints_what_the_file_says(
    path: Path, golden: Callable[[str, str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    golden(path.relative_to(GOLDEN).as_posix(), PassGolden.read(path).run())


def test_each_file_tests_the_pass_of_its_folder_and_says_what_it_shows() -> None:
    for path in FILES:
        test = PassGolden.read(path)
        name = path.parent.name.replace("_", "-")
        assert name in PASSES
        assert re.search(rf"(^|,){name}(\{{|,|$)", test.passes), f"{name_of(path)}: {test.passes}: expected {name}"
        comments = [line for line in test.program.splitlines()[1:] if line.startswith("# ") and "case.json: " not in line]
        assert comments, f"{name_of(path)}: expected a comment that says what it shows"


def test_the_documented_file_is_one_of_them() -> None:
    assert f"```\n{(FOLDER / 'split_backward/two_stages.test').read_text()}```" in (DOCS / "writing-a-pass.md").read_text()


@pytest.mark.parametrize("name", PASSES)
def test_each_option_of_a_pass_has_a_file_that_prints(name: str) -> None:
    files = [path for path in FILES if path.parent.name == name.replace("-", "_")]
    prints = [PassGolden.read(path).passes for path in files if "\n# prints" in path.read_text()]
    assert prints
    assert len(prints) < len(files), "a pass refuses something, unknown options at least"
    for option in dataclasses.fields(PASSES[name]):
        assert any(re.search(rf"{name}\{{[^}}]*\b{option.name}=", passes) for passes in prints), option.name
