"""Every program, file and command that the documentation shows, run as it stands there, in an empty folder.

``docs/command-line.md`` is run by ``tests/cli/test_cli.py``, the README by ``test_readme.py``; ``docs/plans.md`` is generated.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from documented import Page
from installed import install_transport
from paths import DOCS, ROOT
from warm_python import warm_commands

ELSEWHERE = {"command-line.md"}
ALL = {path.relative_to(DOCS).as_posix(): Page.read(path) for path in sorted(DOCS.rglob("*.md"))}
# Recipes are run by tests/recipes, as test_recipe_marks.py makes sure.
PAGES = {name: page for name, page in ALL.items() if (page.program or page.files) and not name.startswith("recipes/")}


def run(command: list[str], folder: Path) -> str:
    """What a command prints, run as somebody would who has adaptra installed."""
    places = {"PATH": f"{warm_commands(folder)}:{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(folder)}
    # Unbuffered, a print is two writes, a line and its end, and those of two ranks would mix.
    places |= {"PYTHONUNBUFFERED": ""}
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, env=os.environ | places)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout


@pytest.mark.processes
@pytest.mark.parametrize("name", PAGES)
def test_what_a_page_shows_runs(name: str, tmp_path: Path) -> None:
    page = PAGES[name]
    for title, text in page.files.items():
        (tmp_path / title).write_text(text)
    if "pyproject.toml" in page.files:
        points = tomllib.loads(page.files["pyproject.toml"])["project"]["entry-points"]["adaptra.transports"]
        for transport, factory in points.items():
            install_transport(tmp_path, transport, factory)
    if page.program:
        (tmp_path / "page.py").write_text(page.program)
        run(["python", "page.py"], tmp_path)
    for example in page.examples:
        printed = run(shlex.split(example.command), tmp_path)
        assert example.matches(printed), f"{example.command}\n{printed}"


def test_every_command_shown_is_run_by_some_test() -> None:
    assert {name for name, page in ALL.items() if page.examples} == ELSEWHERE | {
        name for name, page in PAGES.items() if page.examples
    }


def test_every_page_is_in_the_site() -> None:
    listed = (ROOT / "mkdocs.yml").read_text()
    assert [name for name in ALL if f": {name}\n" not in listed] == []
