"""The versions that adaptra says it was tested with: those that the constraints pin, and what ``doctor`` says of others."""

from __future__ import annotations

import re
import tomllib

import pytest
from paths import ROOT

from adaptra.cli import doctor, main
from adaptra.cli.tested_versions import TESTED, outside


def pins(name: str) -> dict[str, str]:
    """The versions that a file of constraints pins, by package."""
    lines = (ROOT / "constraints" / name).read_text().splitlines()
    return dict(line.replace("-", "_").split("==") for line in lines if not line.startswith("#"))


PACKAGES = sorted(set(TESTED) - {"python"})


@pytest.mark.parametrize("package", PACKAGES)
def test_what_is_called_tested_is_what_the_constraints_pin(package: str) -> None:
    lowest, newest = TESTED[package]
    assert outside(package, pins("lowest.txt")[package]) is None
    assert pins("lowest.txt")[package].startswith(lowest)
    tested = pins("tested.txt")[package]
    assert tested == newest or (package == "torch" and outside(package, tested) is None)


def test_the_lowest_pins_are_the_bounds_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [*project["dependencies"], *project["optional-dependencies"]["test"]]
    for extra in ("viz", "exact", "metrics", "tensorboard", "otel", "safetensors", "transformers"):
        needed += project["optional-dependencies"][extra]
    bounds = dict(re.findall(r"^([\w-]+)>=([\d.]+)", "\n".join(needed).replace("-", "_"), re.MULTILINE))
    lowest = pins("lowest.txt")
    assert set(bounds) == set(lowest)
    for package, bound in bounds.items():
        assert lowest[package].startswith(bound), f"{package}: {lowest[package]} is pinned, {bound} is allowed"


@pytest.mark.parametrize(
    ("package", "installed", "expected"),
    [
        ("torch", "2.10.1", "older than 2.11, the oldest tested"),
        ("torch", "2.11.0+cu130", None),
        ("torch", "2.13.3", None),
        ("torch", "2.16.0a0+git", "newer than 2.13, the newest tested"),
        ("python", "3.13.7", None),
        ("python", "3.14.0rc1", "newer than 3.13, the newest tested"),
        ("numpy", "0.1", None),
    ],
)
def test_versions_outside_are_told(package: str, installed: str, expected: str | None) -> None:
    assert outside(package, installed) == expected


def test_doctor_warns(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    known = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda package: "99.0" if package == "rich" else known(package))
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^untested +rich 99\.0: newer than 15\.0\.0, the newest tested$", shown, re.MULTILINE)
