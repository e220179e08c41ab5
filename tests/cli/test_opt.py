"""The command ``opt``: where programs come from, what it says of them, and where errors are. Passes have golden files."""

from __future__ import annotations

import dataclasses
import io
import json
import sys
from pathlib import Path

import pytest

from adaptra.cli import main
from adaptra.passes import PASSES, parse_pipeline
from adaptra.program import Program
from adaptra.program.schedules import one_f_one_b
from adaptra.program.torch_csv import to_csv
from adaptra.simulation.case_files import load_case

CASE = {"S": 2, "M": 3, "t_f": 2, "t_b": 2, "t_w": 1, "c_f": 4}
JOB = {"P": 2, "S": 2, "M": 1, "t_f": 1, "t_i": 1, "t_w": 1}
FUSED = one_f_one_b(2, 3, split=False)
SPLIT = one_f_one_b(2, 3)
REPLICAS = """schedule healthy version=2 stages=2 microbatches=1
workers 0,1 2,3
route 0 0 by 0,1
route 1 0 by 2,3
0: 0:0F0 0:0B0
1: 0:1F0 0:1B0
2: 1:0F0 1:0B0
3: 1:1F0 1:1B0
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a working folder with programs and cases."""
    monkeypatch.chdir(tmp_path)
    files = {
        "case.json": json.dumps(CASE),
        "job.json": json.dumps(JOB),
        "p.sched": str(FUSED),
        "p.csv": to_csv(FUSED),
        "replicas.sched": REPLICAS,
        "token.sched": "# a comment\n\n" + str(FUSED).replace("1F1", "1G1"),
        "header.sched": str(FUSED).replace("placement=0,1", "placement=0,2"),
        "missing.sched": str(FUSED).replace(" 1F1", ""),
        "misplaced.sched": str(FUSED).replace("0F1", "  1F1"),
        "stuck.sched": "schedule stuck placement=0,1 microbatches=1\n0: 0B0 0F0\n1: 1F0 1B0\n",
        "unrouted.sched": REPLICAS.replace("route 1 0 by 2,3\n", ""),
        "misrouted.sched": REPLICAS.replace("2: 1:0F0 1:0B0", "2: 1:0F0 0:0B0"),
        "bad.csv": "forward\n",
    }
    for name, text in files.items():
        Path(name).write_text(text)


def out(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return what a command that must succeed prints."""
    assert main(["opt", *arguments]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    return shown.out


def test_a_program_comes_from_a_file_of_either_form_or_standard_input_or_is_generated(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert out(capsys, "split-backward", "p.sched") == str(SPLIT)
    assert out(capsys, "split-backward", "p.csv") == str(dataclasses.replace(SPLIT, name="p"))
    monkeypatch.setattr(sys, "stdin", io.StringIO(str(FUSED)))
    assert out(capsys, "split-backward", "-") == str(SPLIT)
    assert out(capsys, "split-backward", "1f1b", "--case", "case.json") == str(SPLIT)


@pytest.mark.parametrize(
    "arguments",
    [
        ["fuse-backward", "1f1b", "--case", "case.json"],
        ["fuse-backward", "--case", "case.json", "1f1b"],
        ["--case", "case.json", "fuse-backward", "1f1b"],
        ["--case=case.json", "fuse-backward", "1f1b"],
    ],
)
def test_options_stand_anywhere(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    expected = parse_pipeline("fuse-backward").apply(SPLIT, load_case("case.json").cost)
    assert out(capsys, *arguments) == str(expected)


def test_json_has_the_program_and_the_passes(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(out(capsys, "split-backward,lower-comm{lane=delegate}", "p.sched", "--json"))
    assert found == {
        "name": "1f1b",
        "stages": 2,
        "ranks": 2,
        "microbatches": 3,
        "ops": 18,
        "passes": "split-backward,lower-comm",
        "program": str(SPLIT),
    }


def test_verify_only_says_what_was_verified(capsys: pytest.CaptureFixture[str]) -> None:
    size = "2 stages, 2 ranks, 3 microbatches, 12 ops"
    assert out(capsys, "--verify-only", "p.sched") == f"p.sched: 1f1b is a program that its ranks can execute: {size}\n"
    found = json.loads(out(capsys, "p.sched", "--verify-only", "--json"))
    assert found == {"name": "1f1b", "stages": 2, "ranks": 2, "microbatches": 3, "ops": 12}
    assert "its workers can execute: 2 stages, 4 workers, 1 " in out(capsys, "--verify-only", "replicas.sched")


def test_the_case_of_several_replicas_says_who_adds_up_gradients(capsys: pytest.CaptureFixture[str]) -> None:
    """Without accumulators handed over, workers of one stage may add up in an order in which they would wait for each other."""
    turns = "schedule turns version=2 stages=1 microbatches=2\nworkers 0 1\nroute 0 0 by 0\nroute 0 1 by 1\n"
    turns += "route 1 0 by 1\nroute 1 1 by 0\n0: 1:0F1 1:0B1 0:0F0 0:0B0\n1: 0:0F1 0:0B1 1:0F0 1:0B0\n"
    Path("turns.sched").write_text(turns)
    assert main(["opt", "--verify-only", "turns.sched"]) == 2
    assert capsys.readouterr().err.startswith("adaptra: turns.sched:7:10: turns: deadlock: 2 of 2 workers wait forever\n")
    Path("alone.json").write_text(json.dumps(JOB | {"S": 1, "M": 2, "fold": "contributions"}))
    assert out(capsys, "insert-comm{fold=contributions,receives=late}", "turns.sched", "--case", "alone.json") == turns


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--verify-only token.sched", "token.sched:5:12: op '1G1': expected STAGE KIND MICROBATCH"),
        ("split-backward token.sched", "token.sched:5:12: op '1G1': expected STAGE KIND MICROBATCH"),
        ("split-backward header.sched", "header.sched:1:1: placement=0,2 with 2 op sequences: expected every rank 0..1"),
        ("split-backward missing.sched", "missing.sched:3:1: 1f1b: stage 1, microbatch 1: rank 1 has 1B1: expected 1F1 1I1"),
        ("split-backward misplaced.sched", "misplaced.sched:2:10: 1f1b: 1F1, op 1 of rank 0: the placement puts stage 1 on"),
        (
            "--verify-only stuck.sched",
            "stuck.sched:2:4: stuck: deadlock: 2 of 2 ranks wait forever\n  rank 0: 0B0, op 0, waits",
        ),
        ("--verify-only unrouted.sched", "unrouted.sched:2:1: microbatch 0 of replica 1 has no route: expected exactly one"),
        ("--verify-only misrouted.sched", "misrouted.sched:7:10: healthy: 0:0B0, op 1 of worker 2: the route of microbatch 0"),
        ("--verify-only bad.csv", "bad.csv: row 1, column 1: "),
        ("--verify-only none.sched", "none.sched: no such file, and no schedule of that name: gpipe, 1f1b"),
        ("--verify-only 1f1b", "1f1b: a schedule of the case's size: expected --case CASE, or a file"),
        ("--verify-only split-backward p.sched", "--verify-only with split-backward: expected no passes, as none is run"),
        ("p.sched", "opt: expected PASSES before PROGRAM, such as split-backward, or --verify-only"),
        (
            "split-backwards p.sched",
            "pipeline 'split-backwards': column 1: pass 'split-backwards': expected one of adapt-order,",
        ),
        ("split-backward p.sched --case none.json", "none.json: No such file or directory"),
        (
            "split-backward p.sched --case job.json",
            "1f1b has 1 replicas of 2 stages and 3 microbatches: expected 2, 2 and 1, as job has",
        ),
        ("split-backward replicas.sched --case case.json", "replicas.sched: healthy has 2 replicas: expected a program of one"),
    ],
)
def test_errors_say_where(capsys: pytest.CaptureFixture[str], arguments: str, message: str) -> None:
    assert main(["opt", *arguments.split()]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(f"adaptra: {message}")


def test_what_is_printed_is_read_again(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """So commands can be joined by pipes, and give what one command with both passes gives."""
    whole = out(capsys, "split-backward,insert-comm{receives=late}", "p.sched")
    monkeypatch.setattr(sys, "stdin", io.StringIO(out(capsys, "split-backward", "p.sched")))
    assert out(capsys, "insert-comm{receives=late}", "-") == whole
    assert Program.parse(whole).is_lowered


def test_the_help_names_every_pass_with_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["opt", "--help"])
    shown = "".join(capsys.readouterr().out.split())
    for name, known in PASSES.items():
        options = dataclasses.fields(known)
        assert f"{name}{{{options[0].name}=" in shown if options else f"{name}," in shown
        assert all(f"{option.name}=" in shown for option in options)
