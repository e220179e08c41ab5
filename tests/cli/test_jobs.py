"""The command line with several replicas: plans around lost and slow workers, and wrong input."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from adaptra.cli import main
from adaptra.program import Program
from adaptra.program.verify import verify

PIPELINE: dict[str, Any] = {"S": 4, "M": 6, "t_f": 1, "t_b": 1, "t_w": 1}
JOB: dict[str, Any] = {"P": 3, "S": 4, "M": 6, "t_f": 1, "t_i": 1, "t_w": 1, "t_opt": 3, "lost": ["1.2"]}


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


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 2
    return capsys.readouterr().err


def test_a_plan_around_a_lost_worker_is_written_and_simulated(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = printed(capsys, "plan", "job.json", "--budget", "1s", "-o", "plan.sched")
    assert "period   30\n" in shown
    assert "healthy  22: this plan takes 36.4 % longer\n" in shown
    assert "scaled   24: " in shown
    verify(Program.parse(Path("plan.sched").read_text()))
    figures = json.loads(printed(capsys, "simulate", "plan.sched", "job.json", "--json"))
    assert figures["period"] == 30.0
    assert "period   30\n" in printed(capsys, "simulate", "plan.sched", "job.json")


def test_options_on_the_line_say_the_same_as_a_case(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--replicas", "3", "--optimizer", "3", "--lost", "1.2")
    line = json.loads(printed(capsys, "plan", "pipeline.json", *options, "--json"))
    case = json.loads(printed(capsys, "plan", "job.json", "--json"))
    assert line["program"] == case["program"]
    assert (line["period"], line["bound"], line["healthy_period"], line["fault_scaled_period"]) == (30.0, 30.0, 22.0, 24.0)


def test_a_slow_worker_gives_microbatches_away(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "plan", "pipeline.json", "--replicas", "4", "--slow", "1.2=2")
    program = Program.parse(text)
    given = [microbatch for microbatch in range(6) if program.holder(1, 2, microbatch) != 6]
    assert 1 <= len(given) <= 3


def test_a_plan_is_explained_by_its_equations(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed(capsys, "plan", "job.json", "-o", "plan.sched")
    shown = printed(capsys, "explain", "job.json", "plan.sched", "--equations")
    assert shown.startswith("adapted on job: period 30, no order on its routes beats 30 (work, worker 2), gap 0.0 %; ")
    assert "    stage 2: 3 + 0 + (6 + ceiling(6*1/(3 - 1)))*(1 + 1 + 1) = 30\n" in shown
    assert shown == printed(capsys, "explain", "job.json", "--equations"), "without PROGRAM the plan for CASE"
    figures = json.loads(printed(capsys, "explain", "job.json", "plan.sched", "--json"))
    planned = json.loads(printed(capsys, "plan", "job.json", "--json"))
    for name in ("period", "bound", "bound_kind", "bound_where", "healthy_period", "fault_scaled_period"):
        assert figures[name] == planned[name], name
    options = ("--replicas", "3", "--optimizer", "3", "--lost", "1.2", "--json")
    assert json.loads(printed(capsys, "explain", "pipeline.json", *options))["equations"] == figures["equations"]


def test_a_slow_worker_is_explained_by_what_it_keeps(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = printed(capsys, "explain", "pipeline.json", "--replicas", "3", "--slow", "1.2=2", "--reduce", "1", "--equations")
    assert "    worker 6 of stage 2: 6*3/(2*(-0.5 + 3)) = 3.6\n" in shown


def test_one_pipeline_with_a_slow_worker_is_a_job_of_one_replica(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--slow", "0.2=2", "--optimizer", "3")
    shown = printed(capsys, "plan", "pipeline.json", *options, "-o", "plan.sched")
    assert shown == printed(capsys, "plan", "pipeline.json", "--replicas", "1", *options, "-o", "plan.sched")
    assert "healthy  22: this plan takes " in shown, "the other workers end with the optimizer too"
    assert "workers" not in Path("plan.sched").read_text(), "all is at home"
    found = printed(capsys, "simulate", "plan.sched", "pipeline.json", *options)
    assert next(line for line in found.splitlines() if line.startswith("0.2 ")).startswith("0.2 2× slow ")


@pytest.mark.parametrize("fold", ["handover", "contributions"])
def test_a_lowered_plan_has_the_same_orders_and_times(folder: Path, capsys: pytest.CaptureFixture[str], fold: str) -> None:
    Path("job.json").write_text(json.dumps({**JOB, "fold": fold}))
    plain, lowered = (json.loads(printed(capsys, "plan", "job.json", "--json", *more)) for more in ((), ("--lower",)))
    program = Program.parse(lowered["program"])
    verify(program, hands_over=fold == "handover")
    assert program.is_lowered
    assert ("SEND_W" in lowered["program"]) == (fold == "handover")
    assert program.compute_only() == Program.parse(plain["program"]).compute_only()
    assert [lowered[name] for name in ("period", "makespan", "held")] == [
        plain[name] for name in ("period", "makespan", "held")
    ]


def test_a_lowered_plan_has_what_crosses_replicas(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also the buffers of the stages that the case names."""
    slow = {key: value for key, value in JOB.items() if key != "lost"} | {"slow": {"1.2": 2}}
    Path("job.json").write_text(json.dumps(slow | {"changing": [0, 2]}))
    text = printed(capsys, "plan", "job.json", "--lower")
    verify(Program.parse(text), changing={0, 2})
    assert set(re.findall(r":([0-9])SEND_BUFFERS", text)) == {"2"}, "only stage 2 is computed elsewhere"


def test_workers_with_several_stages_are_planned_alike_from_both_kinds_of_cases(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    placement = {"placement": [[0, 3], [1, 2]]}
    Path("pipeline.json").write_text(json.dumps(PIPELINE | placement))
    Path("job.json").write_text(json.dumps(JOB | placement))
    options = ("--replicas", "3", "--optimizer", "3", "--lost", "1.2")
    line = json.loads(printed(capsys, "plan", "pipeline.json", *options, "--json"))
    case = json.loads(printed(capsys, "plan", "job.json", "--json"))
    assert line["program"] == case["program"]
    assert "workers 0,1,1,0 2,-,-,2 4,5,5,4\n" in line["program"]
    # 9 microbatches of 3 on both stages of the workers left, and two optimizers.
    assert (line["period"], line["bound"], line["bound_kind"]) == (60.0, 60.0, "work")


def test_behind_a_barrier_the_published_example_takes_the_published_time(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = json.loads(printed(capsys, "plan", "job.json", "--barrier", "--json"))
    assert (figures["period"], figures["bound"], figures["bound_kind"]) == (32.0, 32.0, "barrier")
    assert figures["healthy_period"] == 24.0
    Path("job.json").write_text(json.dumps({**JOB, "barrier": True}))
    assert json.loads(printed(capsys, "plan", "job.json", "--json")) == figures


def test_a_large_plan_is_written_to_a_file_only(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    large = JOB | {"P": 40, "S": 8, "M": 1100, "lost": ["3.2"], "fold": "contributions", "mem_cap": 60, "name": "large"}
    Path("large.json").write_text(json.dumps(large))
    figures = json.loads(printed(capsys, "plan", "large.json", "--json"))
    assert figures["fault_scaled_period"] <= figures["bound"] <= figures["period"] <= 1.01 * figures["bound"]
    shown = printed(capsys, "plan", "large.json", "-o", "large.sched")
    assert f"period   at most {figures['period']:.10g}\n" in shown
    text = Path("large.sched").read_text()
    assert text.startswith("schedule adapted version=2 stages=8 microbatches=1100\nworkers 0,1,2,3,4,5,6,7 ")
    assert "-o FILE writes it" in printed(capsys, "plan", "large.json")
    for option in (["--lower"], ["--picture", "large.svg"], ["--compare", "healthy"]):
        error = refused(capsys, "plan", "large.json", *option)
        assert error == f"adaptra: {option[0]}: large has 320 workers: expected a job of fewer than a million ops\n"
    assert refused(capsys, "explain", "large.json").startswith("adaptra: explain: large has 320 workers: ")


def test_a_plan_is_compared_with_others_in_a_table_and_a_picture(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("slow.json").write_text(json.dumps({**JOB, "lost": [], "slow": {"1.2": 2}}))
    compared = ("plan", "slow.json", "--compare", "healthy,kept,blocks,turns")
    table = printed(capsys, *compared, "--picture", "compared.svg")
    rows = {line.split()[0]: line.split()[1:] for line in table.splitlines() if line.startswith(" ")}
    assert [*rows][:1] + [*rows][-5:] == ["plan", "healthy", "kept", "blocks", "turns", "adapted"]
    assert (rows["healthy"][:2], rows["kept"][0]) == (["22", "-"], "42")
    drawn = Path("compared.svg").read_text()
    assert all(f">{name}</text>" in drawn for name in ("healthy", "kept", "blocks", "turns", "adapted"))
    found = json.loads(printed(capsys, *compared, "--json"))
    periods = {run["name"]: run["period"] for run in found["runs"]}
    assert [f"{period:.10g}" for period in periods.values()] == [rows[name][0] for name in periods]
    assert periods["adapted"] == min(period for name, period in periods.items() if name != "healthy") >= found["bound"]


def test_a_simulated_program_is_printed_drawn_and_traced(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed(capsys, "plan", "job.json", "-o", "plan.sched", "--picture", "plan.svg")
    shown = printed(capsys, "simulate", "plan.sched", "job.json", "--picture", "s.png", "--trace", "t.json", "--width", "90")
    assert any(line.startswith("1.2 lost ////") and len(line) == 90 for line in shown.splitlines())
    assert "period 30" in Path("plan.svg").read_text()
    assert Path("s.png").read_bytes().startswith(b"\x89PNG")
    read = printed(capsys, "trace", "t.json", "--width", "90")
    assert read.startswith("adapted on job\nadapted, simulated: makespan ")
    assert " ms" not in read, "the unit of the case is not known"
    assert printed(capsys, "trace", "t.json", "-o", "again.svg") == ""
    assert ">0.2</text>" in Path("again.svg").read_text()


def test_a_job_that_takes_no_time_is_planned(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("nothing.json").write_text(json.dumps({**JOB, "t_f": 0, "t_i": 0, "t_w": 0, "t_opt": 0}))
    assert "healthy  0: this plan takes no time either\n" in printed(capsys, "plan", "nothing.json", "-o", "plan.sched")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("plan", "pipeline.json", "--lost", "1.2"), "lost: worker 6 does not exist: expected 0..3"),
        (("plan", "job.json", "--replicas", "2"), "--replicas 2: job.json says how many: P=3"),
        (("plan", "pipeline.json", "--replicas", "2", "--lost", "5.0"), "lost: worker 20 does not exist: expected 0..7"),
        (
            ("plan", "pipeline.json", "--replicas", "2", "--lost", "0.1,1.1"),
            "lost: all 2 workers of stage 1, 1 to 5: expected one that lives",
        ),
        (("plan", "pipeline.json", "--replicas", "2", "--lost", "x"), "--lost: 'x': expected a worker such as '1.2'"),
        (("plan", "pipeline.json", "--replicas", "2", "--slow", "1.2"), "--slow 1.2: expected WORKER=FACTOR such as 1.2=2.0"),
        (("plan", "pipeline.json", "--replicas", "2", "--slow", "1.2=0"), "slow: 0 for worker 6: expected a factor above 0"),
        (("plan", "pipeline.json", "--replicas", "1000000"), "P, S, M: 4,000,000 stages × 6 microbatches are 72,000,000 ops"),
        (
            ("plan", "job.json", "--compare", "1f1b"),
            "schedule '1f1b': expected some of healthy, kept, blocks, turns, adapted",
        ),
        (
            ("plan", "job.json", "--slow-edge", "1-2"),
            "--slow-edge: job has 3 replicas or workers of their own: ",
        ),
        (("plan", "job.json", "--picture", "plan.pdf"), "plan.pdf: suffix '.pdf': expected .svg or .png"),
        (
            ("simulate", "x.sched", "job.json", "--slow-edge", "1-2"),
            "--slow-edge: job has 3 replicas or workers of their own: ",
        ),
        (
            ("plan", "job.json", "--in-flight", "3"),
            "--in-flight: job has 3 replicas or workers of their own: ",
        ),
        (("plan", "job.json", "-o", "plan.csv"), "plan.csv: suffix '.csv': expected .sched"),
        (("explain", "job.json", "1f1b"), "1f1b: a schedule of one pipeline: expected the file of a program for job"),
        (
            ("explain", "job.json", "--sensitivity"),
            "--sensitivity: job has 3 replicas or workers of their own: ",
        ),
        (("explain", "pipeline.json", "--slow", "1.2=2"), "slow: worker 6 does not exist: expected 0..3"),
        (("simulate", "1f1b", "job.json"), "1f1b: a schedule of one pipeline: expected the file of a program for job"),
        (("simulate", "none.sched", "job.json"), "none.sched: no such file"),
    ],
)
def test_wrong_input_gets_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    error = refused(capsys, *arguments)
    assert error.startswith(f"adaptra: {message}")
    assert error.count("\n") == 1


def test_a_program_of_several_replicas_does_not_fit_one_pipeline(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed(capsys, "plan", "job.json", "-o", "plan.sched")
    error = refused(capsys, "simulate", "plan.sched", "pipeline.json")
    assert error == "adaptra: plan.sched: adapted has 3 replicas: expected a program of one pipeline\n"
    Path("one.sched").write_text("schedule x placement=0 microbatches=1\n0: 0F0 0B0\n")
    assert "x has 1 replicas of 1 stages and 1 microbatches: expected 3, 4 and 6, as job has" in refused(
        capsys, "simulate", "one.sched", "job.json"
    )
