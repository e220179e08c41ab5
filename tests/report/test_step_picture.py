"""The picture of a step of several replicas: names, marks and what is left out of a large job."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import pytest
from job_timeline import job_timeline

from adaptra.errors import ReportError
from adaptra.planning.routes.joined_programs import join
from adaptra.program.schedules import one_f_one_b
from adaptra.report import perfetto
from adaptra.report.picture import draw
from adaptra.report.step_picture import draw_steps
from adaptra.simulation.cost import CostModel
from adaptra.simulation.simulate import simulate
from adaptra.simulation.standing_out import slow_links_of
from adaptra.simulation.timeline import OpInterval, Source, Timeline


def texts(path: Path) -> list[str]:
    return ["".join(element.itertext()) for element in ET.parse(path).iter("{http://www.w3.org/2000/svg}text")]


def test_rows_are_workers_with_their_pace_and_whom_they_wait_for(tmp_path: Path) -> None:
    draw_steps([("a step", job_timeline())], tmp_path / "step.svg", title="Worker 1.1 is slow")
    found = texts(tmp_path / "step.svg")
    assert {"Worker 1.1 is slow", "a step", "0.0", "0.1", "1.0", "1.1 · 2.5× slow", "time (ms)"} <= set(found)
    assert found.count("waits for 1.0: 275 ms") == 1 and found.count("waits for 1.0: 500 ms") == 1
    assert {"outlined: another replica's", "crosses replicas", "REDUCE, exposed"} <= set(found)
    assert not any("more" in text for text in found)
    draw_steps([("a step", job_timeline())], tmp_path / "again.svg", title="Worker 1.1 is slow")
    assert (tmp_path / "again.svg").read_bytes() == (tmp_path / "step.svg").read_bytes()


def test_a_slow_link_is_marked_and_no_other_of_its_stages(tmp_path: Path) -> None:
    """Messages from worker 1.0 to 1.1 take longer than those to 0.1."""
    whole = job_timeline()
    late = {(0, 0): 0.12, (0, 1): 0.22, (1, 0): 0.12, (1, 1): 0.5}
    messages = tuple(replace(one, arrived=late[one.replica or 0, one.microbatch]) for one in whole.messages)
    timeline = replace(whole, messages=messages)
    assert slow_links_of(timeline) == ((2, 3),)
    draw_steps([("a step", timeline)], tmp_path / "step.svg")
    assert "on a slow link" in texts(tmp_path / "step.svg")
    names = [one["args"]["name"] for one in perfetto.trace([("a step", timeline)], [(0, 1)])["traceEvents"] if one["ph"] == "M"]
    assert {"1.0 → 1.1, slow", "0.0 → 0.1", "1.0 → 0.1"} <= set(names)
    draw_steps([("a step", replace(timeline, messages=()))], tmp_path / "step.svg")
    assert "on a slow link" not in texts(tmp_path / "step.svg")


def test_only_what_is_there_is_in_the_legend(tmp_path: Path) -> None:
    whole = job_timeline()
    ops = tuple(tuple(one for one in order if one.op.replica == 0) for order in whole.ops)
    own = replace(whole, ops=ops, messages=tuple(one for one in whole.messages if one.replica == 0), reduces=())
    draw_steps([("a step", own)], tmp_path / "step.svg")
    found = texts(tmp_path / "step.svg")
    assert {"replica 0", "message"} <= set(found)
    assert {"replica 1", "outlined: another replica's", "crosses replicas", "REDUCE, exposed"}.isdisjoint(found)


def test_of_a_large_job_the_slow_worker_is_shown(tmp_path: Path) -> None:
    """Of 40 replicas 32 fit. Worker 39.1 takes three times as long as others."""
    program = join([one_f_one_b(2, 2)] * 40)

    def order(worker: int) -> tuple[OpInterval, ...]:
        ops = [op for op in program.orders[worker] if op.kind.is_compute]
        seconds = 0.3 if worker == 79 else 0.1
        ends = accumulate(seconds for _ in ops)
        return tuple(OpInterval(worker, op, end - seconds, end) for op, end in zip(ops, ends, strict=True))

    timeline = Timeline(program, Source.MEASURED, tuple(map(order, range(80))), (), 1.0)
    draw_steps([("a step", timeline)], tmp_path / "step.svg")
    found = texts(tmp_path / "step.svg")
    assert {"39.0", "39.1 · 3.0× slow", "0.0", "30.1", "and 8 replicas more"} <= set(found)
    assert "31.0" not in found and "38.1" not in found


def test_steps_of_pipelines_and_of_jobs_have_no_picture_in_common(tmp_path: Path) -> None:
    alone = simulate(one_f_one_b(2, 2), CostModel.uniform(2, 1.0, 1.0, 1.0)).timeline
    alone = replace(alone, seconds_per_unit=1.0)
    for drawn in (draw, draw_steps):
        with pytest.raises(ReportError, match="timelines of several replicas beside those of one pipeline"):
            drawn([("alone", alone), ("job", job_timeline())], tmp_path / "step.svg")
        with pytest.raises(ReportError, match="no timeline to draw"):
            drawn([], tmp_path / "step.svg")
