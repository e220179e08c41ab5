"""The command ``reduce``: its table, its JSON, its picture, and wrong input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from adaptra.cli import main

NINES = "9" * 5000
"""More digits than Python reads as a number."""
SHARES = "1e-06 to 1e+06, such as 2=0.5"
SUM = ("reduce", "--ranks", "8", "--bytes", "1GiB", "--alpha", "3us", "--rate", "450GiB/s")


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main([*SUM, *arguments]) == 0
    return capsys.readouterr().out


def test_a_late_rank_shows_all_algorithms_the_critical_delay_and_the_bound(capsys: pytest.CaptureFixture[str]) -> None:
    shown = printed(capsys, "--delay", "30ms").splitlines()
    assert shown[0] == "1.0 GiB over 8 ranks, 3 µs a message"
    rows = {line.split()[0]: line.split()[1:] for line in shown[4:9]}
    assert set(rows) == {"direct", "chain", "streamed", "merge", "swap"}
    assert rows["direct"] == ["-", "8", "14", "0.0339309", "0.0339309"]
    assert rows["merge"][-1] == "0.0325141"
    assert "critical  a delay of 0.61415 ms, from which on merge beats direct" in shown
    assert "          = 0 + (2*8 - 2)*(3e-06 + 2.06961e-12*1.07374e+09/8) = 0.00393089" in shown
    assert any(line.startswith("bound     32.2252 ms for any sum") for line in shown)


def test_json_has_ports_arrivals_and_the_choice(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(printed(capsys, "--delay", "2ms", "--late", "3,5", "--port", "2=0.5", "--json"))
    assert found["arrivals"] == [0, 0, 0, 0.002, 0, 0.002, 0, 0]
    assert found["per_byte"][2] == pytest.approx(2 / (450 * 2**30)) and found["per_byte"][3] == found["per_byte"][2] / 2
    assert found["choice"] == found["algorithms"][0]
    assert found["gap"] == pytest.approx(found["choice"]["seconds"] / found["bound"] - 1)
    assert sum(found["shares"]) == pytest.approx(1)


def test_two_ranks_have_no_critical_delay(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reduce", "--ranks", "2", "--bytes", "1MB", "--alpha", "3us", "--rate", "1GB/s"]) == 0
    assert "critical  none: of two ranks" in capsys.readouterr().out


def test_the_rounds_of_the_choice_are_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "rounds.svg"
    printed(capsys, "--port", "1=0.5", "--picture", str(picture))
    drawn = picture.read_text()
    assert all(f">rank {rank}<" in drawn for rank in range(8)) and ">rank 8<" not in drawn
    assert "8 ranks, 3 µs a message: " in drawn


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--delay", "1ms", "--late", "8"], "--late 8: expected a rank of 0..7"),
        (["--delay", "1ms", "--late", "x"], "--late x: expected a rank of 0..7"),
        (["--late", "3"], "--late 3: expected --delay TIME too, by which they are late"),
        (
            ["--delay", "1s", "--late", "0,1,2,3,4,5,6,7"],
            "--late 0,1,2,3,4,5,6,7: all 8 ranks are late: expected one that is not",
        ),
        *(
            (["--port", f"2={share}"], f"--port 2={share:.78}: expected RANK=SHARE, a rank and a share of the rate of {SHARES}")
            for share in ("0", "half", "9" * 320, f"0.{'0' * 310}1")
        ),
        (["--port", "8=1"], "--port 8=1: expected a rank of 0..7"),
        (["--port", f"{NINES}=1"], f"--port {NINES:.73}: expected a rank of 0..7"),
        (["--port", "1=0.5", "--port", "1=0.25"], "--port 1=0.25: rank 1 has a share of 0.5 already: expected each rank once"),
        (["--ranks", "1"], "--ranks 1: expected 2 to 256, as every round of every algorithm is played"),
        (["--ranks", "2000"], "--ranks 2000: expected 2 to 256, as every round of every algorithm is played"),
        (["--picture", "rounds.txt"], "rounds.txt: suffix '.txt': expected .svg or .png"),
    ],
)
def test_wrong_input_is_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert main([*SUM, *arguments]) == 2
    assert capsys.readouterr().err == f"adaptra: {message}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--bytes", "0B"], "'0B': expected a size such as 16GB or 1.5GiB"),
        (["--rate", "450GiB"], "'450GiB': expected a rate such as 10GB/s or 450GiB/s"),
        (["--alpha", "0us"], "'0us': expected a duration such as 100ms or 2s"),
        (["--bytes", f"{NINES}B"], ": expected a size of 1B to 1000000TB"),
        (["--rate", f"{'9' * 320}B/s"], ": expected a size of 1B to 1000000TB"),
        (["--alpha", f"{'9' * 320}s"], ": expected a duration of 0.001us to 36500d"),
        (["--delay", f"{NINES}s"], ": expected a duration of 0.001us to 36500d"),
        (["--alpha", "0.000000000000000001us"], ": expected a duration of 0.001us to 36500d"),
        (["--ranks", NINES], ": expected a whole number of at least 1, at most 1000000000"),
        (["--delay", "1s", "--late", ""], "'': expected names joined by commas, none of them empty"),
        (["--delay", "1s", "--late", "3,,4"], "'3,,4': expected names joined by commas, none of them empty"),
    ],
)
def test_sizes_and_rates_are_refused_by_the_parser(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit):
        main([*SUM, *arguments])
    assert message in capsys.readouterr().err
