"""The hardware queues of a GPU: as many as streams, and what is said where they are fewer."""

from __future__ import annotations

import pytest
import torch

from adaptra.cli import doctor
from adaptra.runtime.devices.hardware_queues import MOST, STREAMS, VARIABLE, why_too_few


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        (None, "is not set, which means 8: expected 11 to 32"),
        ("1", "is 1: expected 11 to 32"),
        ("10", "is 10: expected 11 to 32"),
        ("many", "is many: expected 11 to 32"),
        ("", "is : expected 11 to 32"),
        (str(STREAMS), None),
        (str(MOST), None),
    ],
)
def test_fewer_queues_than_streams_are_told(setting: str | None, told: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    if setting is not None:
        monkeypatch.setenv(VARIABLE, setting)
    reason = why_too_few()
    assert reason is None if told is None else reason is not None and f"{VARIABLE} {told}" in reason


@pytest.mark.parametrize("setting", ["1", "32"])
def test_doctor_tells_it_of_machines_with_a_gpu(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, setting)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    without = doctor.examine()
    assert without["torch"]["hardware_queues"] is None and "hardware queues" not in doctor.report(without)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    found = doctor.examine()
    reason = why_too_few()
    assert (reason is None) == (setting == "32") and found["torch"]["hardware_queues"] == (reason or "enough")
    (line,) = [line for line in doctor.report(found).splitlines() if line.startswith("hardware queues ")]
    assert line.endswith(reason or " enough")
