"""The command ``modes``: its table, its JSON, files beside options, and wrong input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from adaptra.cli import main

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
