"""The command ``modes``: its table, its JSON, files beside options, and wrong input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from run_files import write

from adaptra.cli import main
from adaptra.planning.synchrony.noise_scale import TermNorms
from adaptra.runtime.measuring.measurement import ReduceTimes, StepMeasurement
from adaptra.runtime.measuring.step_norms import StepNorms
from adaptra.runtime.telemetry.records import NormsTold, Record, RunStarted, StepTaken
from adaptra.simulation.worker_steps import WorkerStep

CASE = ("modes", "--replicas", "8", "--slow", "0=2", "--phi", "1000")


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 0
    return capsys.readouterr().out


def test_the_table_has_all_modes_the_choice_and_the_equation_with_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    shown = printed(capsys, *CASE, "--jitter", "0.3").splitlines()
    assert shown[0] == "8 replicas, 128 samples each a step, noise scale 1000 samples"
    rows = {line.split()[0]: line.split()[1:] for line in shown[4:11]}
    assert [*rows] == ["exact", "stealing", "x-order=7", "groups", "asynchronous", "deadline=0.9", "local=32"]
    assert rows["exact"][1:] == ["1024", "0", "1.000", "1.000", "same"]
    assert rows["local=32"][-3:] == ["trial", "trial", "other"]
    assert "≈" in rows["asynchronous"] and "≈" not in rows["deadline=0.9"]
    assert "first     shares of microbatches: 1.6734 s an update instead of 2.1403 (21.8% less)" in shown
    assert "choice    stealing" in shown
    assert any(line.startswith("because   stealing takes 33.0% less time to a loss than exact") for line in shown)
    assert "time to a loss: T*(1/sin(pi/(4*tau + 2)) + phi/B)" in shown
    assert any(line.startswith("STAR      fastest x=7 (0.535), interpolated x=7") for line in shown)


def test_json_has_the_case_and_options_replace_what_a_file_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "case.json"
    path.write_text(json.dumps({"replicas": 4, "phi": 50, "slow": {"1": 3}, "exchange": 0.5, "allow": ["local"]}))
    found = json.loads(printed(capsys, "modes", str(path), "--phi", "70", "--seconds", "100ms", "--json"))
    assert found["case"]["phi"] == 70 and found["case"]["replicas"] == 4 and found["case"]["slow"] == {"1": 3}
    assert found["case"]["seconds"] == 0.1 and found["case"]["exchange"] == 0.5
    assert found["choice"] == "exact" and found["trials"] == ["local=32"]
    assert found["modes"][-1]["updates"] is None


def test_a_jobs_links_say_what_a_detour_brings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "job.json"
    job = {"P": 2, "S": 2, "M": 4, "t_f": 1, "t_i": 1, "t_w": 1, "c": 0.1, "links": {"0-1": {"c": 4, "o": 3}}}
    path.write_text(json.dumps(job))
    pair = ("modes", "--replicas", "2", "--phi", "9", "--job", str(path))
    assert "the job's case, from 1F1B: detour is best of keep " in printed(capsys, *pair)
    found = json.loads(printed(capsys, *pair, "--json"))["reallocation"]
    assert found["equal"] == found["shared"] == 1.0 and found["job"]["choice"] == "detour"
    assert main(["modes", "--replicas", "3", "--phi", "9", "--job", str(path)]) == 2
    assert capsys.readouterr().err == "adaptra: job job: 2 replicas: expected 3, as in the case of the modes\n"


def test_modes_are_those_that_are_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(printed(capsys, *CASE, "--modes", "x-order=6,local=8", "--json"))
    assert [one["mode"] for one in found["modes"]] == ["exact", "x-order=6", "local=8"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "modes: expected a case's file, or --replicas N and --phi SAMPLES"),
        (["--replicas", "8"], "modes: expected a case's file, or --replicas N and --phi SAMPLES"),
        (["--replicas", "8", "--phi", "0"], "phi 0.0: expected a number above 0"),
        ([*CASE[1:], "--slow", "8=2"], "slow 8: expected a replica of 0..7"),
        ([*CASE[1:], "--slow", "one"], "--slow one: expected REPLICA=FACTOR, such as 0=2"),
        (
            [*CASE[1:], "--slow", "1=2", "--slow", "01=3"],
            "--slow 01=3: replica 1 has a factor of 2 already: expected each once",
        ),
        ([*CASE[1:], "--modes", "x-order=9"], "mode x-order=9: expected 1 to 8 replicas in an update"),
        ([*CASE[1:], "--allow", "stale"], "allow 'stale': expected some of exact, x-order, deadline, local"),
        (["missing.json"], "missing.json: No such file or directory"),
    ],
)
def test_wrong_input_of_modes_is_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert main(["modes", *arguments]) == 2
    assert capsys.readouterr().err == f"adaptra: {message}\n"


def test_a_file_that_is_no_case_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "case.json"
    for text, message in (
        ("[1]", "expected a JSON object, got list"),
        ('{"replicas": 8, "phi": 0}', "phi 0.0: expected a number above 0"),
        ('{"replicas": 8}', "missing field 'phi'"),
    ):
        path.write_text(text)
        assert main(["modes", str(path)]) == 2
        assert capsys.readouterr().err == f"adaptra: {path}: {message}\n"


def recorded(folder: Path, replica: int, *, norms: bool = True, slow: float = 1.0, steps: int = 40) -> None:
    """What a rank of a replica has written, with a step of 100 ms and a noise scale of 24 samples."""
    microbatch = 0.02 * slow
    records: list[Record] = [RunStarted(0, "run one", 1, 4, 0, "1f1b", 0.1, 0.1, replica, (0,))]
    for step in range(steps):
        work = WorkerStep(replica, replica, (0,), 4 * microbatch, microbatch, 4, (), (), ())
        reduce = ReduceTimes(step - 1, 0.03, 0.02 / slow, 64) if step else None
        measurement = StepMeasurement(0, step, 0.1, (), (), reduce=reduce)
        records.append(StepTaken(measurement, (), 0, 0.1, work))
        if norms:
            found = TermNorms((1 + 24 / 8, 1 + 24 / 8), 1 + 24 / 16)
            loss = 4 * (step + 1) ** -0.5
            records.append(NormsTold(0, step, StepNorms((0,), found, (8.0, 8.0), "rows", loss)))
    write(folder / f"replica-{replica}", 0, records)


def test_a_run_tells_its_own_case(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded(tmp_path, 0)
    recorded(tmp_path, 1, slow=2.0)
    found = json.loads(printed(capsys, "modes", str(tmp_path), "--loss", "0.5", "--json"))
    case = found["case"]
    assert (case["replicas"], case["microbatches"], case["batch"], case["jitter"]) == (2, 4, 8.0, 0.0)
    assert case["phi"] == pytest.approx(24.0) and case["slow"] == {"1": 2.0}
    # The last replica to come does not wait. Nobody shared microbatches, so the slow one takes the whole rest of the step.
    assert case["exchange"] == pytest.approx(0.01) and case["seconds"] == pytest.approx((0.1 - 0.01) / 2)
    assert found["run"]["noise"] == pytest.approx({"value": 24, "low": 24, "high": 24, "noise": 24, "signal": 1, "steps": 40})
    assert found["loss"]["updates"] == pytest.approx(64, rel=0.02) and found["loss"]["low"] <= 64.5

    lines = printed(capsys, "modes", str(tmp_path), "--loss", "0.5").splitlines()
    assert lines[0] == "2 replicas, 8 rows each a step, noise scale 24 rows"
    assert "run       40 steps, usually 0.1 s; of replicas 1 takes 2 times as long; jitter 0" in lines
    assert "noise     24 rows (24 to 24), from 40 steps" in lines
    (exact,) = (line.split() for line in lines if line.startswith("          exact: "))
    left = found["loss"]["updates"] - 40
    assert float(exact[1]) == pytest.approx(left * found["modes"][0]["seconds"], rel=0.01)
    reached = printed(capsys, "modes", str(tmp_path), "--loss", "1.0").splitlines()
    assert not [line for line in reached if "from now on" in line], "that loss is behind the run"
    assert printed(capsys, "modes", str(tmp_path), "--phi", "70").startswith(
        "2 replicas, 8 rows each a step, noise scale 70 rows"
    )


def test_a_run_that_lacks_something_says_what(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, without, nothing = tmp_path / "one", tmp_path / "without", tmp_path / "nothing"
    recorded(one, 0)
    for replica in range(2):
        recorded(without, replica, norms=False)
    nothing.mkdir()
    expected = "expected a run with Options(noise_scale=True)"
    case = tmp_path / "case.json"
    case.write_text('{"replicas": 8, "phi": 50}')
    for arguments, message in (
        ([one], f"{one}: a run of one replica: expected two or more, of which modes differ"),
        ([without], f"{without}: no norms of gradients: {expected}, or --phi SAMPLES"),
        ([without, "--phi", "5", "--loss", "1"], f"{without}: no losses: {expected}, which records them"),
        ([nothing], f"{nothing}: no rank-*.jsonl: expected the folder of a run, Telemetry(folder=...)"),
        ([case, "--loss", "1"], "modes: --loss: expected the folder of a run, whose losses tell how many updates it takes"),
    ):
        assert main(["modes", *map(str, arguments)]) == 2
        assert capsys.readouterr().err == f"adaptra: {message}\n"
    assert main(["modes", str(without), "--phi", "5"]) == 0


def test_a_loss_that_is_too_far_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for replica in range(2):
        recorded(tmp_path, replica)
    assert main(["modes", str(tmp_path), "--loss", "0.01"]) == 2
    message = "the line through the losses of 40 updates does not come to 0.01 in 100 times as many"
    assert capsys.readouterr().err == f"adaptra: --loss 0.01: {message}\n"
