"""The command ``resilience``: its tables, its JSON, its picture, and wrong input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from adaptra.cli import main

PIPELINE: dict[str, Any] = {"S": 4, "M": 6, "t_f": 1, "t_b": 1, "t_w": 1, "mem_cap": 8}
JOB: dict[str, Any] = {"P": 3, "S": 4, "M": 6, "t_f": 1, "t_i": 1, "t_w": 1, "t_opt": 3, "lost": ["1.2"], "mem_cap": 8}
THREE: tuple[str, ...] = ("resilience", "pipeline.json", "--replicas", "3", "--optimizer", "3", "--budget", "50ms")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder with the cases ``pipeline.json`` and ``job.json``."""
    monkeypatch.chdir(tmp_path)
    Path("pipeline.json").write_text(json.dumps(PIPELINE))
    Path("job.json").write_text(json.dumps(JOB))
    return tmp_path


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 0
    return capsys.readouterr().out


def test_each_number_of_lost_workers_has_a_row_with_its_bounds(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = printed(capsys, *THREE, "--losses", "2").splitlines()
    assert shown[0] == "pipeline: 3 replicas of 4 stages, 6 microbatches each, by lost workers: decision and period"
    assert shown[2].split() == ["lost", "per", "stage", *"period work healthy scaled of scaled 1F1B held decision".split()]
    assert [line.split()[0] for line in shown[4:]] == ["0", "1", "2"]
    assert shown[4].split()[2:] == ["22", "21", "22", "22", "1.000", "30", "6", "keep", "the", "plan"]


def test_a_loss_shows_all_responses_and_the_decision(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = printed(capsys, *THREE, "--lost", "0.2,1.2", "--losses", "1", "--pieces", "1", "--joiner", "2h")
    for kind in ("reroute", "role move", "re-cut", "shrink", "wait", "restart"):
        assert f"\n {kind} " in shown
    assert "decision of the model, which has watched no job: reroute now, then role move\n" in shown
    assert "healthy period 22, work bound 57, scaled 26.4, 1F1B 30" in shown


def test_a_case_may_say_what_is_lost_and_gpus_say_how_many(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(printed(capsys, "resilience", "job.json", "--losses", "1", "--json"))
    assert found["decision"]["lost"] == [6]
    assert found["decision"]["decision"] == "reroute now, then re-cut"
    assert [row["lost"] for row in found["rows"]] == [0, 1]
    assert found["trace"] is None
    many = json.loads(printed(capsys, "resilience", "pipeline.json", "--gpus", "14", "--losses", "1", "--json"))
    assert many["replicas"] == 3


def test_days_of_failures_give_an_average_and_a_picture(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    days = ("--losses", "1", "--mtbf", "6h", "--repair", "1h", "--days", "3")
    shown = printed(capsys, *THREE, *days, "-o", "days.svg")
    assert " % of the healthy throughput, " in shown
    assert Path("days.svg").read_text().startswith("<?xml")
    (first, second) = (json.loads(printed(capsys, *THREE, *days, "--seed", seed, "--json"))["trace"] for seed in "01")
    assert 0 < first["average_of_healthy"] < 1
    assert first["seconds"] == 3 * 86400
    assert first["curve"] != second["curve"]


def test_a_trace_of_nodes_is_lived_through(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("nodes.csv").write_text("0,add,a\n0,add,b\n0,add,c\n3600000,remove,b\n7200000,add,b\n10800000,remove,a\n")
    options = ("--losses", "1", "--trace", "nodes.csv", "--node", "4", "--planning", "10s", "--json")
    found = json.loads(printed(capsys, *THREE, *options))["trace"]
    assert found["least_live"] == 2
    assert found["transitions"] == 2
    times = [seconds for seconds, _ in found["curve"]]
    assert times == pytest.approx([0, 3600, 3611.6, 7200, 7201.6])
    assert [share for _, share in found["curve"]][0::2] == pytest.approx([1.0, found["curve"][2][1], 1.0])
    assert 0.5 < found["curve"][2][1] < 0.8, "four of twelve workers are lost"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("pipeline.json",), "pipeline.json: a case of one pipeline: expected --replicas N or --gpus N too"),
        (("pipeline.json", "--gpus", "3"), "--gpus 3: pipeline.json has 4 stages: expected at least as many workers"),
        (("pipeline.json", "--gpus", "8", "--replicas", "2"), "--gpus 8 with --replicas 2: expected one of them"),
        (("pipeline.json", "--replicas", "2", "--lost", "5.0"), "lost: worker 20 does not exist: expected 0..7"),
        (
            ("pipeline.json", "--replicas", "2", "--lost", "0.1,1.1"),
            "lost: all 2 workers of stage 1, 1 to 5: expected one that",
        ),
        (("pipeline.json", "--gpus", "1000000"), "P, S, M: 1,000,000 stages × 6 microbatches are 18,000,000 ops"),
        (("job.json", "--days", "3"), "--days: expected --mtbf too"),
        (("job.json", "--mtbf", "3h", "--days", "0"), "days: 0: expected a number above 0"),
        (("job.json", "--node", "3"), "--node: expected --trace too"),
        (("job.json", "--trace", "none.csv"), "none.csv: No such file"),
        (("job.json", "-o", "days.svg"), "-o days.svg: a picture of throughput over time: expected --mtbf or --trace too"),
        (("job.json", "--mtbf", "3h", "-o", "days.pdf"), "days.pdf: suffix '.pdf': expected .svg or .png"),
    ],
)
def test_wrong_input_gets_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    assert main(["resilience", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"adaptra: {message}")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--mtbf", "-3h", "'-3h': expected a duration such as 100ms or 2s"),
        ("--state", "16", "'16': expected a size such as 16GB or 1.5GiB"),
        ("--losses", "0", "'0': expected a whole number of at least 1, at most 1000000000"),
    ],
)
def test_an_impossible_value_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str], option: str, value: str, message: str
) -> None:
    with pytest.raises(SystemExit) as exit_status:
        main(["resilience", "job.json", f"{option}={value}"])
    assert exit_status.value.code == 2
    assert f"argument {option}: {message}; " in capsys.readouterr().err
