"""What the README shows runs as it stands there, without a close or a guard that it does not show. What it says is true."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from documented import Page
from paths import ROOT

README = (ROOT / "README.md").read_text()
SNIPPET = Page.read(ROOT / "README.md").program


def run(command: list[str], tmp_path: Path) -> str:
    script = tmp_path / "snippet.py"
    script.write_text(SNIPPET)
    done = subprocess.run([*command, str(script)], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    return done.stdout


def anchors(page: str) -> set[str]:
    """What links can point to in a page: its headings, as GitHub and MkDocs write them."""
    prose = re.sub(r"^```.*?^```$", "", page, flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title).strip().lower().replace(" ", "-") for title in titles}


def rows(page: str) -> list[list[str]]:
    """The cells of all tables, heads left out."""
    found = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line.startswith("|")]
    return [row for row in found if row[0][:1].isdigit() or row[0].startswith(("none", "middle"))]


def test_the_ten_lines_run_in_one_process(tmp_path: Path) -> None:
    printed = run([sys.executable], tmp_path)
    assert printed.startswith("tensor(")
    assert "4 stages, 16 microbatches" in printed
    shown = re.findall(r"^(?:4 stages.*|[┃│].*)$", README, re.MULTILINE)
    assert len(shown) == 4
    for line in shown:
        by_plan = r"[^┃│]*[┃│][^┃│]*[┃│]$"  # in flight and peak, which a re-plan changes
        assert re.sub(by_plan, "", line) in printed, "the report that the README shows"


@pytest.mark.processes
def test_the_ten_lines_run_under_torchrun_with_the_same_loss_on_every_rank(tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=4"]
    alone = run([sys.executable], tmp_path)
    printed = run(launcher, tmp_path)
    losses = re.findall(r"tensor\([^)]*\)", printed)
    assert losses == re.findall(r"tensor\([^)]*\)", alone) * 4
    assert printed.count("4 stages, 16 microbatches") == 1, "one table for all ranks"


def test_the_commands_it_names_are_targets_and_files() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)", README, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    for path in re.findall(r"python (bench/\w+\.py)", README):
        assert (ROOT / path).exists(), path


def test_its_links_lead_to_files_and_headings() -> None:
    for link in re.findall(r"\]\((?!http)([^)]+)\)", README):
        path, _, anchor = link.partition("#")
        assert (ROOT / path).exists(), link
        if anchor:
            assert anchor in anchors((ROOT / path).read_text() if path else README), link


def test_it_is_short_and_has_one_table() -> None:
    assert len(README.splitlines()) <= 120
    assert len(re.findall(r"^\|[-|]+\|$", README, re.MULTILINE)) == 1


def test_its_figures_are_those_of_the_benchmarks() -> None:
    page = rows((ROOT / "docs" / "benchmarks.md").read_text().partition("## Beside torch")[2])
    measured = {row[0]: row for row in reversed(page)}
    for delay, *figures in rows(README):
        _, as_a_v, straight, unlimited, one_f_one_b, zbv = measured["none" if delay == "0 ms" else f"middle, {delay}"]
        assert figures == [one_f_one_b, zbv, as_a_v, unlimited]
        assert re.search(rf"one stage it takes .*\b{straight}\b", README)
    assert len(rows(README)) == 4


def test_the_first_page_of_the_site_is_the_beginning_of_the_readme() -> None:
    beginning = README.partition("## Two commands")[0].replace("](docs/", "](")
    assert (ROOT / "docs" / "index.md").read_text().startswith(beginning)
