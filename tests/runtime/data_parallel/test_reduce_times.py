"""What a job tells of REDUCE, measured in one: two replicas of two stages, whose ops are emulated."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from models import Example, square_loss, vectors
from processes import run_processes
from torch import nn
from training import compiled

import adaptra
from adaptra.errors import PipelineError
from adaptra.report import perfetto
from adaptra.report.run_records import load_run, summary
from adaptra.runtime.measuring.reduces import StepReduces
from adaptra.runtime.telemetry.records import StepTaken

STAGES, ROWS, STEPS, WIDTH = 2, 8, 3, 8
LATER = 1.0
"""Seconds by which stage 0 ends later than stage 1, as its last ops are that long."""


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))


LAYERS = Example("layers", two_layers, vectors(WIDTH), square_loss)


def train(rank: int, folder: str) -> dict[str, Any]:
    """Train with stage 0 far slower than stage 1; what this rank knows of REDUCE afterwards."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    told: list[Any] = []
    (inputs,), _, targets = batch = LAYERS.rows(ROWS, 0)
    telemetry = adaptra.Telemetry(folder=folder, on_record=told.append)
    emulate = adaptra.EmulatedDevice(0.01, [LATER, 0.01], 0.01)
    options = adaptra.Options(emulate=emulate, schedule="gpipe", adapt=False, telemetry=telemetry)
    with compiled(LAYERS, batch, stages=STAGES, microbatches=1, split=["1"], options=options) as pipe:
        before = pipe.reduces
        for _ in range(STEPS):
            pipe.step(inputs, targets)
        deadline = time.monotonic() + 60
        while rank % STAGES == 0 and not any(
            isinstance(one.record, StepReduces) and one.record.step == STEPS - 2 for one in told
        ):
            assert time.monotonic() < deadline, "the coordinator has gathered no REDUCE of the last step but one"
            time.sleep(0.01)
        text = pipe.explain()
        pipe.save_trace(Path(folder) / "step.json")
        return {
            "before": before,
            "reduces": [(one.stages, one.seconds, one.hidden, one.exposed, one.nbytes) for one in pipe.reduces],
            "told": [line for line in text.splitlines() if "last measured REDUCE" in line],
        }


def train_with_calls_between(rank: int) -> list[tuple[int, bool]]:
    """Train with other calls between some steps; the steps whose REDUCE this rank has told, and whether its parts are known."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    told: list[Any] = []
    (inputs,), _, targets = batch = LAYERS.rows(ROWS, 0)
    options = adaptra.Options(adapt=False, telemetry=adaptra.Telemetry(on_record=told.append))
    with compiled(LAYERS, batch, stages=STAGES, microbatches=2, split=["1"], options=options) as pipe:
        between = (
            lambda: None,
            lambda: pipe.eval_step(inputs, targets),
            lambda: None,
            lambda: pipe.clip_grad_norm_(1.0),
            pipe.full_state_dict,
            pipe.timeline,
            lambda: None,
        )
        for call in between:
            pipe.step(inputs, targets)
            call()
        pipe.step(inputs, targets)
    measured = [one.record.measurement for one in told if isinstance(one.record, StepTaken)]
    assert [one.step for one in measured] == list(range(len(between) + 1))
    assert measured[0].reduce is None
    return [(one.reduce.step, one.reduce.exposed is not None) for one in measured if one.reduce is not None]


@pytest.mark.alone
@pytest.mark.processes
def test_calls_in_which_ranks_wait_for_each_other_leave_the_parts_unknown() -> None:
    known = [True, False, True, False, False, False, True]
    for found in run_processes(train_with_calls_between, 2 * STAGES):
        assert found == list(enumerate(known))


@pytest.mark.alone
@pytest.mark.processes
def test_a_job_tells_what_delays_the_next_step(tmp_path: Path) -> None:
    results = run_processes(train, 2 * STAGES, str(tmp_path))
    nbytes = 4 * (WIDTH * WIDTH + WIDTH)
    for rank, found in enumerate(results):
        assert found["before"] == ()
        if rank % STAGES == 0:
            first, (stages, seconds, hidden, exposed, count) = found["reduces"]
            assert first == ((0,), first[1], 0.0, first[1], nbytes), "stage 0 waits for no message"
        else:
            ((stages, seconds, hidden, exposed, count),) = found["reduces"]
        assert (stages, count) == ((1,), nbytes)
        assert 0.0 < seconds < LATER, "it does not wait for stage 0"
        assert (hidden, exposed) == (seconds, 0.0), "it ends long before stage 0 sends what the next step begins with"
        assert len(found["told"]) == len(found["reduces"])
    runs = [load_run(tmp_path / f"replica-{replica}") for replica in range(2)]
    assert runs[0].started.run == runs[1].started.run, "so that the spans of a step join one trace"
    for run in runs:
        assert [one.step for one in run.reduces] == list(range(STEPS - 1))
        assert f"REDUCE, median of {STEPS - 1} steps: stage 0: " in summary(run)
    path = tmp_path / "step.json"
    timeline = perfetto.load(path)
    assert [(one.rank, one.nbytes) for one in timeline.reduces] == [(worker, nbytes) for worker in range(2 * STAGES)]
    for late, early in (timeline.reduces[:2], timeline.reduces[2:]):
        assert early.end < late.start, "stage 1 adds while stage 0 computes"
    events = json.loads(path.read_text())["traceEvents"]
    slices = [(one["name"], one["tid"]) for one in events if one.get("cat") == "REDUCE"]
    assert slices == [("REDUCE", row) for row in range(1, 2 * STAGES + 1)], "of the last step it is not known what is exposed"


def test_one_replica_has_none(tmp_path: Path) -> None:
    """Its files have nothing of it either."""
    (inputs,), _, targets = batch = LAYERS.rows(ROWS, 0)
    options = adaptra.Options(telemetry=adaptra.Telemetry(folder=tmp_path))
    with compiled(LAYERS, batch, stages=STAGES, microbatches=2, split=["1"], options=options) as pipe:
        pipe.step(inputs, targets)
        assert pipe.reduces == ()
        assert "REDUCE" not in pipe.explain()
        timeline = pipe.timeline()
        assert timeline is not None
        assert timeline.reduces == ()
    for rank in range(STAGES):
        assert "reduce" not in (tmp_path / f"rank-{rank}.jsonl").read_text()
    assert load_run(tmp_path).reduces == ()


def test_before_the_pipeline_is_compiled_it_is_an_error() -> None:
    pipe = adaptra.compile(two_layers(), stages=STAGES, microbatches=2, loss=square_loss)
    with pytest.raises(PipelineError, match="not compiled yet"):
        _ = pipe.reduces
