"""What the recipe for torch.profiler shows: the ops of all stages, which a profiler of one thread does not see."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
from recipes import write_recipe

from adaptra.report import perfetto

ALL_THREADS = ", experimental_config=everything"


@pytest.mark.parametrize("sees_all", [True, False], ids=["all threads", "one thread"])
def test_a_profile_has_the_ops_of_each_stage(
    sees_all: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_recipe("profiler", tmp_path)
    script = tmp_path / "train.py"
    assert ALL_THREADS in script.read_text()
    if not sees_all:
        script.write_text(script.read_text().replace(ALL_THREADS, ""))
    monkeypatch.chdir(tmp_path)
    runpy.run_path("train.py")
    printed = [line.split()[3] for line in capsys.readouterr().out.splitlines() if line.startswith("thread ")]
    events = json.loads((tmp_path / "profile-0.json").read_text())["traceEvents"]
    products = [event["tid"] for event in events if event.get("name") == "aten::addmm"]
    ops = [event["name"].removeprefix("adaptra: ") for event in events if event.get("name", "").startswith("adaptra: ")]
    steps = {event["tid"] for event in events if event.get("name") == "Optimizer.step#AdamW.step"}
    assert len(steps) == 1
    if sees_all:
        assert len(products) == 4 * 4  # microbatches, layers
        assert len(set(products)) == 2 and not steps & set(products)
        for microbatch in range(4):
            named = [f"0F{microbatch}", f"0SEND_F{microbatch}", f"1F{microbatch}", f"1SEND_B{microbatch}"]
            assert [ops.count(one) for one in named] == [1] * 4
        assert printed == sorted(ops, key=printed.index) and printed[0] == "0F0"
    else:
        assert not products and not printed
    step = perfetto.load(tmp_path / "step.json")
    assert {str(one.op) for one in step} == {f"{stage}{kind}{k}" for stage in range(2) for kind in "FIW" for k in range(4)}
