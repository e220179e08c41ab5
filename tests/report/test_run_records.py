"""A run read back from its files, whatever ended it, and its page."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest
from run_files import records_of, slow_from, step_taken, whole_run, write

from adaptra.cli import main
from adaptra.errors import ReportError
from adaptra.report.run_page import draw_run
from adaptra.report.run_records import load_run, summary
from adaptra.runtime.control.plans.events import ControlEvent, EventKind
from adaptra.runtime.measuring.measurement import ReduceTimes
from adaptra.runtime.measuring.reduces import StageReduce, StepReduces
from adaptra.runtime.telemetry.records import Record, RunEnded, RunStarted, StepFailed
from adaptra.simulation.worker_steps import WorkerStep

SVG = "{http://www.w3.org/2000/svg}"


def test_a_run_is_read_back(tmp_path: Path) -> None:
    whole_run(tmp_path)
    run = load_run(tmp_path)
    assert [(one.step, one.version) for one in run.steps] == [(step, 1 if step >= 6 else 0) for step in range(8)]
    assert run.steps[4].seconds == pytest.approx(0.16), "of the slower rank"
    assert run.flights[0, 1] == tuple((step, slow_from(step)) for step in range(8))
    assert [(one.step, one.rank, one.kind) for one in run.happenings] == [
        (5, 0, "detected"), (5, 1, "path"), (5, 0, "path"), (6, 0, "agreed"),  # as they were told
    ]  # fmt: skip
    assert run.notes == ()


def test_a_run_as_text(tmp_path: Path) -> None:
    whole_run(tmp_path)
    assert summary(load_run(tmp_path)) == (
        "run run one: 2 ranks, 4 microbatches, 8 steps\n"
        "plan 0: steps 0 to 5, median 111.0 ms, predicted at the end 100.0 ms\n"
        "plan 1: steps 6 to 7, median 135.0 ms, predicted at the end 100.0 ms\n"
        "step 5: detected plan 0: edge 0→1 slow: 50.0 ms (was 1.0 ms)\n"
        "step 5: path edge 0→1: paths failed: 1, moves to another path: 0\n"
        "step 5: path edge 0→1: paths failed: 1, moves to another path: 1\n"
        "step 6: agreed plan 1: edge 0→1 slow\n"
    )


def test_sums_over_replicas_are_read_printed_and_drawn(tmp_path: Path) -> None:
    """Of every step; the coordinator's records have them."""
    records = records_of(0)
    for step in range(8):
        seconds = 0.02 + step / 1000
        stages = (StageReduce((0,), seconds, 0.0, seconds, 4096), StageReduce((1,), seconds, 0.015, seconds - 0.015, 2048))
        if step == 3:  # after an evaluation
            stages = tuple(replace(one, hidden=None, exposed=None) for one in stages)
        records.append(StepReduces(0, step, stages))
    write(tmp_path, 0, [*records, RunEnded(0, 8)])
    write(tmp_path, 1, [*records_of(1), RunEnded(1, 8)])
    run = load_run(tmp_path)
    assert [one.step for one in run.reduces] == list(range(8))
    assert (
        "REDUCE, median of 8 steps: stage 0: 24.0 ms, hidden 0.0 ms, exposed 24.0 ms, 4096 bytes\n"
        "REDUCE, median of 8 steps: stage 1: 24.0 ms, hidden 15.0 ms, exposed 9.0 ms, 2048 bytes\n"
    ) in summary(run)
    assert run.to_json()["reduces"][7]["stages"][1] == {
        "stages": [1], "seconds": 0.027, "hidden": 0.015, "exposed": pytest.approx(0.012), "bytes": 2048,
    }  # fmt: skip
    draw_run(run, tmp_path / "page.svg")
    assert {"REDUCE exposed (ms)", "stage 0", "stage 1"} <= set(texts(tmp_path / "page.svg"))


@pytest.mark.parametrize("cut", [1, 40, -3])
def test_a_killed_run_is_drawn_and_said(tmp_path: Path, cut: int) -> None:
    for rank in range(2):
        write(tmp_path, rank, records_of(rank))
    file = tmp_path / "rank-1.jsonl"
    *whole, last = file.read_text().splitlines(keepends=True)
    file.write_text("".join(whole) + last[:cut])
    run = load_run(tmp_path)
    assert [one.step for one in run.steps] == list(range(8))
    assert run.notes == (
        "rank-1.jsonl: the last line is cut off",
        "rank 0, 1 neither closed nor failed: still running, or killed",
    )
    draw_run(run, tmp_path / "page.svg")
    assert "the last line is cut off" in (tmp_path / "page.svg").read_text()


def test_a_rank_without_records_is_named(tmp_path: Path) -> None:
    write(tmp_path, 0, [*records_of(0), StepFailed(0, 8, "PeerLostError: rank 1 is lost", None)])
    run = load_run(tmp_path)
    assert run.notes == ("nothing from rank 1",)
    assert run.happenings[-1].text == "rank 0: PeerLostError: rank 1 is lost"


def test_the_last_start_counts_whatever_stands_before_it(tmp_path: Path) -> None:
    """The first start was killed in the middle of a line, of three ranks; the second has two."""
    for rank in range(3):
        write(tmp_path, rank, records_of(rank, "run one", ranks=3)[:-1])
    with (tmp_path / "rank-0.jsonl").open("a") as file:
        file.write('{"adaptra": 4, "time": 5')
    for rank in range(2):
        write(tmp_path, rank, [*records_of(rank, "run two", steps=3), RunEnded(rank, 3)], begin=1000.0)
    run = load_run(tmp_path)
    assert (run.started.run, len(run.steps), run.missing) == ("run two", 3, ())
    assert run.notes == ("the folder holds 1 earlier runs, which are left out",)


def test_a_run_goes_on_by_another_start_where_its_layout_changed(tmp_path: Path) -> None:
    """Steps are those of both layouts, what is usual that of the last one, and a rank that began it has not ended."""
    for rank in range(2):
        before = [*records_of(rank, "run one"), RunEnded(rank, 8)]
        start, *steps = records_of(rank, "run one", steps=10)
        write(tmp_path, rank, [*before, start, *steps[8:]])
    run = load_run(tmp_path)
    assert (run.earlier, [one.step for one in run.steps]) == (0, list(range(10)))
    assert run.notes == ("rank 0, 1 neither closed nor failed: still running, or killed",)


def test_a_start_that_only_one_rank_reached_is_the_last(tmp_path: Path) -> None:
    whole_run(tmp_path)
    write(tmp_path, 0, [RunStarted(0, "run two", 2, 4, 0, "1f1b", 0.1, 0.1)], begin=1000.0)
    run = load_run(tmp_path)
    assert (run.started.run, run.steps, run.missing) == ("run two", (), (1,))
    with pytest.raises(ReportError, match="no step was run: expected at least one to draw"):
        draw_run(run, tmp_path / "page.svg")


@pytest.mark.parametrize(
    ("line", "content", "message"),
    [
        (1, "GET / HTTP/1.1", "not JSON: .*: expected a line of adaptra's telemetry"),
        (1, '{"event": "step"}', "not adaptra's: expected a JSON object with a field 'adaptra'"),
        (1, "[]", "not adaptra's"),
        (1, '{"adaptra": 1, "time": 1.0, "event": "started"}', "version 1: this adaptra reads version 4"),
        (3, '{"adaptra": 4, "ti', "not JSON: .*: only a last line may be cut off"),
        (3, '{"adaptra": 4, "time": 1.0, "event": "lunch", "rank": 0}', "field 'event': expected one of started, step"),
        (3, '{"adaptra": 4, "time": 1.0, "event": "ended", "rank": 0}', "missing field 'steps'"),
        (3, '{"adaptra": 4, "time": 1.0, "event": "step", "rank": -1}', "missing field 'step'"),
        (3, '{"adaptra": 4, "time": 1.0, "event": "ended", "rank": 0, "steps": 1, "x": 1}', "unknown field 'x'"),
    ],
)
def test_a_line_that_is_not_of_a_run_is_told_with_its_place(tmp_path: Path, line: int, content: str, message: str) -> None:
    whole_run(tmp_path)
    file = tmp_path / "rank-1.jsonl"
    lines = file.read_text().splitlines()
    lines[line - 1] = content
    file.write_text("\n".join(lines) + "\n")
    with pytest.raises(ReportError, match=rf"rank-1\.jsonl:{line}: {message}"):
        load_run(tmp_path)


def test_a_folder_without_a_run_is_told(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match=r"no rank-\*\.jsonl: expected the folder of a run, Telemetry\(folder=\.\.\.\)$"):
        load_run(tmp_path)
    whole_run(tmp_path / "second")
    with pytest.raises(ReportError, match=r"; perhaps .*second$"):
        load_run(tmp_path)
    write(tmp_path, 0, [RunEnded(0, 0)])
    with pytest.raises(ReportError, match="no rank tells of its start"):
        load_run(tmp_path)


# A job


def job_run(folder: Path) -> None:
    """Two replicas of two stages. Worker 1.1 is slow from step 2 on, and gives two microbatches to 0.1 from step 6 on."""
    for replica in range(2):
        for rank in range(2):
            records: list[Record] = [RunStarted(rank, f"run {replica}", 2, 4, 0, "1f1b", 0.1, 0.1, replica, (0, 1))]
            for step in range(8):
                slow = 0.06 if (replica, rank) == (1, 1) and step >= 2 else 0.03
                moved = 2 if rank == 1 and step >= 6 else 0
                taken = ((1, moved),) if moved and replica == 0 else ()
                given = ((1, moved),) if moved and replica == 1 else ()
                own = 4 - moved if replica == 1 else 4
                waits = ((2 * replica + 1 - rank, 0.01 * (1 + rank)),)
                count = own + (moved if replica == 0 else 0)
                work = WorkerStep(2 * replica + rank, replica, (rank,), slow * count, slow, own, taken, given, waits)
                measured = step_taken(rank, step, slow * count, 0.001, version=int(step >= 6))
                reduce = ReduceTimes(step - 1, 0.25, 0.05 + 0.2 * rank, 64) if step else None
                records.append(replace(measured, measurement=replace(measured.measurement, reduce=reduce), work=work))
            if rank == 0:
                records.append(
                    StepReduces(0, 7, (StageReduce((0,), 0.25, 0.2, 0.05, 64), StageReduce((1,), 0.25, 0, 0.25, 64)))
                )
                text = "2 of 2 microbatches" if replica else "worker 1.1 slow"
                records.append(ControlEvent(EventKind.REFUSED if replica else EventKind.AGREED, 0, 6, 1, text, 0.1, 0.2))
            write(folder / f"replica-{replica}", rank, [*records, RunEnded(rank, 8)])


def test_the_run_of_a_job_has_a_row_for_each_worker(tmp_path: Path) -> None:
    job_run(tmp_path)
    run = load_run(tmp_path)
    assert [one.started.replica for one in run.replicas] == [0, 1]
    assert [one.seconds for one in run.steps] == pytest.approx([0.12, 0.12, *[0.24] * 4, 0.18, 0.18]), "of the slowest worker"
    text = summary(run)
    assert text.startswith("run run 0: 2 replicas of 2 ranks, 4 microbatches, 8 steps\n")
    rows = [line.split("  ") for line in text.splitlines()[-4:]]
    assert [[cell.strip() for cell in row if cell.strip()] for row in rows] == [
        ["0.0", "120.0", "1.00×", "-", "-", "250.0", "50.0", "0.1: 10.0 ms"],
        ["0.1", "180.0", "0.50×", "2 of replica 1", "-", "250.0", "250.0", "0.0: 20.0 ms"],
        ["1.0", "120.0", "1.00×", "-", "-", "250.0", "50.0", "1.1: 10.0 ms"],
        ["1.1", "120.0", "2.00×", "-", "2 to 0.1", "250.0", "250.0", "1.0: 20.0 ms"],
    ]
    assert "REDUCE of replica 1, median of 1 steps: stage 0: 250.0 ms" in text
    assert "step 6: refused replica 1: plan 1: 2 of 2 microbatches\n" in text
    found = run.to_json()
    assert [one["worker"] for one in found["workers"]] == ["0.0", "0.1", "1.0", "1.1"]
    assert found["workers"][3]["steps"][7]["given"] == [[1, 2]]
    assert [(one["replica"], one["source"]) for one in found["edges"]] == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_the_page_of_a_job_shows_who_is_slow(tmp_path: Path) -> None:
    job_run(tmp_path)
    draw_run(load_run(tmp_path), tmp_path / "page.svg")
    found = texts(tmp_path / "page.svg")
    assert {"microbatch (ms)", "1.1", "other workers", "REDUCE exposed (ms)", "0.0", "1.0"} <= set(found)
    assert any(text.startswith("1.1     120.0") and "2 to 0.1" in text for text in found)
    assert "2 replicas of 2 ranks, 4 microbatches, 8 steps" in found


def test_a_worker_that_paused_once_does_not_stand_out(tmp_path: Path) -> None:
    job_run(tmp_path)
    file = tmp_path / "replica-1" / "rank-1.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line in lines:
        if line["event"] == "step" and line["step"] != 4:
            line["work"]["per_microbatch"] = 0.03
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    draw_run(load_run(tmp_path), tmp_path / "page.svg")
    assert "workers" in texts(tmp_path / "page.svg") and "other workers" not in texts(tmp_path / "page.svg")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("waits", [[1, -0.5]], "field 'waits': expected pairs of a whole number and a number, both not negative"),
        ("taken", [[0, 0.5]], "field 'taken': expected pairs of whole numbers"),
        ("stages", [], "field 'stages': expected the numbers of a rank's stages"),
        ("lunch", 1, "unknown field 'lunch'"),
    ],
)
def test_broken_work_of_a_worker_is_refused(tmp_path: Path, field: str, value: object, message: str) -> None:
    job_run(tmp_path)
    file = tmp_path / "replica-1" / "rank-1.jsonl"
    first, second, *others = map(json.loads, file.read_text().splitlines())
    second["work"][field] = value
    file.write_text("".join(json.dumps(line) + "\n" for line in (first, second, *others)))
    with pytest.raises(ReportError, match=rf"rank-1\.jsonl:2: work: {message}"):
        load_run(tmp_path)


# The page


def texts(path: Path) -> list[str]:
    return ["".join(element.itertext()) for element in ET.parse(path).iter(f"{SVG}text")]


def test_the_page_shows_times_plans_delays_and_what_happened(tmp_path: Path) -> None:
    whole_run(tmp_path)
    run = load_run(tmp_path)
    draw_run(run, tmp_path / "page.svg")
    found = texts(tmp_path / "page.svg")
    assert {"run run one", "2 ranks, 4 microbatches, 8 steps", "plan 0", "plan 1", "measured", "predicted"} <= set(found)
    assert {"0→1", "1→0", "1", "2"} <= set(found), "the edges that stand out, and the circles"
    assert any("detected  plan 0: edge 0→1 slow: 50.0 ms (was 1.0 ms)" in text for text in found)
    assert any("agreed    plan 1" in text for text in found)
    draw_run(run, tmp_path / "again.svg")
    assert (tmp_path / "again.svg").read_bytes() == (tmp_path / "page.svg").read_bytes()


def test_what_is_long_goes_on_below_itself(tmp_path: Path) -> None:
    """Nothing runs past the right edge, and nothing is left out."""
    reason = " ".join(f"edge {edge}→{edge + 1} slow: 126.8 ms (was 1.5 ms);" for edge in range(9))
    write(tmp_path, 0, [*records_of(0), StepFailed(0, 8, reason, None)])
    draw_run(load_run(tmp_path), tmp_path / "page.svg")
    found = texts(tmp_path / "page.svg")
    first = next(index for index, text in enumerate(found) if "edge 0→1 slow: 126.8 ms" in text)
    listed = " ".join(" ".join(found[first:]).split())
    assert reason in listed and max(len(text) for text in found[first:]) <= 130


def test_the_page_of_a_long_run_stays_a_page(tmp_path: Path) -> None:
    """A thousand steps with something at every tenth."""
    records: list[Record] = [RunStarted(0, "long", 1, 4, 0, "1f1b", 0.1, 0.1)]
    for step in range(1000):
        records.append(step_taken(0, step, 0.1, 0.001))
        if step % 10 == 0:
            records.append(ControlEvent(EventKind.KEPT, 0, step, 0, "the best plan found is the running one", 0.1, 0.1))
    write(tmp_path, 0, records)
    draw_run(load_run(tmp_path), tmp_path / "page.svg")
    assert any("and 76 more, which adaptra trace prints without -o" in text for text in texts(tmp_path / "page.svg"))
    assert (tmp_path / "page.svg").stat().st_size < 200_000


def test_one_step_is_enough_for_a_page(tmp_path: Path) -> None:
    write(tmp_path, 0, [RunStarted(0, "short", 1, 4, 0, "1f1b", 0.1, 0.1), step_taken(0, 0, 0.1, 0.001)])
    draw_run(load_run(tmp_path), tmp_path / "page.png", title="One step")
    assert (tmp_path / "page.png").read_bytes().startswith(b"\x89PNG")


# The command


def test_trace_of_a_run_prints_draws_and_gives_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole_run(tmp_path)
    page = tmp_path / "page.svg"
    assert main(["trace", str(tmp_path), "-o", str(page), "--title", "A slow link"]) == 0
    assert capsys.readouterr().out == ""
    assert "A slow link" in texts(page)
    assert main(["trace", str(tmp_path)]) == 0
    assert capsys.readouterr().out == summary(load_run(tmp_path))
    assert main(["trace", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads(json.dumps(load_run(tmp_path).to_json()))
    assert found["steps"][6] == {"step": 6, "seconds": pytest.approx(0.135), "predicted": 0.1, "version": 1}
    assert main(["trace", str(tmp_path), str(page)]) == 2
    assert "expected traces only, or one folder of a run" in capsys.readouterr().err
    assert main(["trace", str(tmp_path / "rank-0.jsonl")]) == 2
    assert "give the folder" in capsys.readouterr().err
    assert main(["trace", "step.json", "--json"]) == 2
    assert "trace --json: expected the folder of a run" in capsys.readouterr().err
