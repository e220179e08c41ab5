"""``make check`` runs the tests that stand near a change, says what it left out, and ``make help`` names every target."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from check_changes import Change, left_out, main, outcomes_in
from paths import FAKE_CUDA, LINKS, ROOT, RXE, SUPPORT, TESTS
from rooms import MODULES
from selection import TEST_FILES, Near, changed_files, choose, to_type_check


def near(*changed: str) -> dict[str, Near]:
    return {one.path: one.near for one in choose(changed)}


def test_a_module_brings_its_own_tests_then_its_room_then_what_imports_it() -> None:
    chosen = near("passes/split_backward.py")
    assert [path for path in chosen if not path.startswith("tests/house/")][:2] == [
        "tests/passes/test_split_backward.py",
        "tests/passes/test_goldens.py",
    ]
    assert chosen["tests/passes/test_split_backward.py"] == Near.OWN
    assert chosen["tests/passes/test_fuse_backward.py"] == Near.ROOM
    assert chosen["tests/planning/test_limitation.py"] == Near.IMPORTERS, "planning.planner imports the pass"
    assert "tests/runtime/launch/test_connecting.py" not in chosen
    assert [*chosen.values()] == sorted(chosen.values())


@pytest.mark.parametrize(
    ("changed", "brings", "how_near"),
    [
        ("tests/planning/test_robust.py", "tests/planning/test_robust.py", Near.CHANGED),
        ("runtime/control/deciding/policy.py", "tests/house/test_floors.py", Near.ALWAYS),
        ("Makefile", "tests/house/test_check_changes.py", Near.IMPORTS),
        ("tests/support/errors_table.py", "tests/docs/test_errors.py", Near.IMPORTS),
        ("tests/links/linked_hosts.py", "tests/links/test_links.py", Near.IMPORTS),
        ("tests/golden/plan_one_stage.sched", "tests/planning/test_golden_plans.py", Near.IMPORTS),
        ("adaptra_compile/frontend/api.py", "tests/frontend/test_dynamo.py", Near.IMPORTS),
        ("csrc/schedule/simulate/simulator.cc", "tests/simulation/test_simulate.py", Near.OWN),
        ("csrc/delegate/engine.cc", "tests/runtime/transports/delegate/test_close.py", Near.IMPORTS),
        ("docs/planner.md", "tests/docs/test_documentation.py", Near.ROOM),
        ("README.md", "tests/docs/test_readme.py", Near.IMPORTS),
        ("examples/hf_llama.py", "tests/examples/test_hf_llama.py", Near.IMPORTS),
        ("bench/versions.py", "tests/packaging/test_versions_table.py", Near.IMPORTS),
        ("constraints/tested.txt", "tests/cli/test_tested_versions.py", Near.IMPORTS),
        ("runtime/measuring/removed.py", "tests/runtime/measuring/test_stalls.py", Near.ROOM),
    ],
)
def test_every_kind_of_file_brings_tests(changed: str, brings: str, how_near: Near) -> None:
    assert near(changed)[brings] == how_near


def test_a_change_in_the_planners_extension_brings_no_test_of_the_delegate() -> None:
    assert not [path for path in near("csrc/schedule/simulate/simulator.cc") if "/delegate/" in path]


def test_every_module_brings_tests() -> None:
    """Else a change of it would be green without a test that looks at it."""
    paths = [str(path.relative_to(ROOT)) for path in MODULES.values() if path.name not in ("__init__.py", "__main__.py")]
    assert [path for path in paths if not {*near(path).values()} - {Near.ALWAYS}] == []


def test_types_are_checked_where_a_change_may_break_them() -> None:
    assert to_type_check(["passes/split_backward.py"]) == [
        "adaptra_compile/planning/planner.py",
        "passes/__init__.py",
        "passes/split_backward.py",
    ]
    assert "tests/house/test_prose.py" in (to_type_check(["tests/support/prose.py"]) or [])
    assert to_type_check(["docs/index.md"]) == []
    for everything in ("adaptra_compile/_C.pyi", "pyproject.toml", "passes/removed.py"):
        assert to_type_check([everything]) is None


def test_commits_the_working_tree_and_new_files_are_the_change(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments], cwd=tmp_path, check=True)

    git("init", "-q", "-b", "main")
    for name in ("same", "removed", "committed", "staged", "of_main"):
        (tmp_path / name).write_text("1")
    git("add", ".")
    git("commit", "-q", "-m", "a")
    assert changed_files(tmp_path, None) == ("HEAD", []), "on main, without a copy elsewhere"
    git("checkout", "-q", "-b", "branch")
    for name in ("committed", "staged"):
        (tmp_path / name).write_text("2")
    git("commit", "-q", "-m", "b", "committed")
    git("add", "staged")
    (tmp_path / "removed").unlink()
    (tmp_path / "new").write_text("1")
    git("checkout", "-q", "--merge", "main")
    (tmp_path / "of_main").write_text("2")
    git("commit", "-q", "-m", "c", "of_main")
    git("checkout", "-q", "--merge", "branch")
    assert changed_files(tmp_path, None) == ("main", ["committed", "new", "removed", "staged"])
    with pytest.raises(ValueError, match="git merge-base elsewhere HEAD"):
        changed_files(tmp_path, "elsewhere")


def test_a_test_that_would_begin_too_late_is_not_begun_and_counted(tmp_path: Path) -> None:
    report, body = tmp_path / "report.xml", tmp_path / "test_two.py"
    body.write_text("def test_one(): pass\n\n\ndef test_other(): raise ValueError\n")
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "-o", "junit_family=xunit1", f"--junitxml={report}", body]
    path = os.pathsep.join(map(str, (TESTS, SUPPORT, LINKS, RXE, FAKE_CUDA)))
    for latest, expected in ((time.time() - 1, {"not begun": 2}), (time.time() + 100, {"passed": 1, "failed": 1})):
        subprocess.run(
            [*command, f"--begin-before={latest}"],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": path},
            capture_output=True,
            check=False,
        )
        outcomes, late = outcomes_in(report)
        assert outcomes == expected and late.total() == outcomes["not begun"]


def test_the_choice_is_said_also_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list", "--base", "HEAD", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert {"tests/house/test_floors.py", "tests/house/test_prose.py"} <= {one["path"] for one in printed["chosen"]}
    assert printed["base"] == "HEAD" and printed["failed"] == []
    assert main(["--list", "--base", "no-such-commit"]) == 2
    assert "no-such-commit" in capsys.readouterr().err


def test_what_is_left_to_make_test_is_said() -> None:
    change = Change.of("main", ["csrc/delegate/engine.cc", "docs/rdma.md"])
    first, *_, cxx, site = left_out(change)
    assert first == f"{len(TEST_FILES) - len(change.tests)} files of tests that stand further away"
    assert (cxx, site) == ("the tests in C++ (make cxx)", "the site and its links (make docs)")


def test_make_help_names_every_target() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([\w-]+):(?!=)", makefile, re.MULTILINE))
    assert "check" in targets and targets == set(re.findall(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)[0].split())
    printed = subprocess.run(
        ["make", "--no-print-directory", "help"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    said = dict(line.removeprefix("make ").split(maxsplit=1) for line in printed.splitlines())
    assert set(said) == targets


def test_marks_by_which_make_chooses_files_stand_in_these_files() -> None:
    """It looks for them in files of tests, and would leave out a test whose mark comes from elsewhere."""
    elsewhere = [path for path in (ROOT / "tests").rglob("*.py") if not path.name.startswith("test_")]
    assert [path for path in elsewhere if re.search(r"mark\.(processes|root|alone|rdma)\b", path.read_text())] == []
