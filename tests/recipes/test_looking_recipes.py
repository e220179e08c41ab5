"""What the recipe for torch.profiler shows: the ops of all stages, which a profiler of one thread does not see."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
from recipes import write_recipe

ALL_THREADS = ", experimental_config=everything"


@pytest.mark.parametrize("sees_all", [True, False], ids=["all threads", "one thread"])
def test_a_profile_has_the_ops_of_each_stage(sees_all: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_recipe("profiler", tmp_path)
    script = tmp_path / "train.py"
    assert ALL_THREADS in script.read_text()
    if not sees_all:
        script.write_text(script.read_text().replace(ALL_THREADS, ""))
    monkeypatch.chdir(tmp_path)
    runpy.run_path("train.py")
    events = json.loads((tmp_path / "profile-0.json").read_text())["traceEvents"]
    products = [event["tid"] for event in events if event.get("name") == "aten::addmm"]
    ops = [event["name"].removeprefix("adaptra: ") for event in events if event.get("name", "").startswith("adaptra: ")]
    steps = {event["tid"] for event in events if event.get("name") == "Optimizer.step#AdamW.step"}
    assert len(steps) == 1
    if sees_all:
        assert len(products) == 2 * 4 * 4  # steps, microbatches, layers
        assert len(set(products)) == 2 and not steps & set(products)
        for microbatch in range(4):
            named = [f"0F{microbatch}", f"0SEND_F{microbatch}", f"1F{microbatch}", f"1SEND_B{microbatch}"]
            assert [ops.count(one) for one in named] == [2] * 4, "one of each step"
    else:
        assert not products
