"""The pictures of ``docs/replicas.md`` show what the commands beside them draw.

``pytest --accept-golden tests/docs/test_replica_pictures.py`` draws them again.
"""

from __future__ import annotations

import shlex
import shutil
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from documented import Page
from paths import DOCS

from adaptra.cli import main

PAGE = Page.read(DOCS / "replicas.md")
COMMANDS = [shlex.split(example.command)[1:] for example in PAGE.examples if "--picture" in example.command]


def words(svg: Path) -> list[str]:
    """All texts of a picture in their order: titles, rows, periods, and the microbatch of each box."""
    return ["".join(node.itertext()).strip() for node in ET.parse(svg).iter("{http://www.w3.org/2000/svg}text")]


@pytest.mark.parametrize("arguments", COMMANDS, ids=lambda arguments: arguments[-1])
def test_a_picture_is_what_its_command_draws(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in PAGE.files.items():
        Path(name).write_text(text)
    name = arguments[arguments.index("--picture") + 1]
    assert main(arguments) == 0
    if request.config.getoption("--accept-golden"):
        shutil.copy(name, DOCS / name)
    assert f"]({name})" in (DOCS / "replicas.md").read_text()
    assert words(Path(name)) == words(DOCS / name)
