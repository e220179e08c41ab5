"""Pictures, texts and traces of several replicas: rows, colours of homes, the period, and workers that are alike."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections import Counter
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from job_timeline import job_timeline
from jobs import even_case, random_case, random_job_program

from adaptra.errors import ReportError
from adaptra.planning.routes.job_planner import plan_job
from adaptra.planning.routes.joined_programs import join
from adaptra.planning.routes.route import share_evenly
from adaptra.program import Kind
from adaptra.program.placement import v_shaped
from adaptra.program.schedules import one_f_one_b
from adaptra.report import perfetto
from adaptra.report.job_rows import MOST_ROWS, job_rows, render_job
from adaptra.report.panels import STEPS_SHOWN, UPDATES, colour_of
from adaptra.report.picture import draw
from adaptra.report.text import bubble_ratio, render
from adaptra.simulation.case import Case
from adaptra.simulation.cost import CostModel
from adaptra.simulation.simulate import Simulation, simulate
from adaptra.simulation.standing_out import slow_links_of
from adaptra.simulation.timeline import OpInterval, Source, Timeline

SVG = "{http://www.w3.org/2000/svg}"
LOST = replace(even_case(3, 4, 6, 3.0), lost=frozenset({6}))


def planned(case: Case) -> Simulation:
    routing = share_evenly(case, in_turns=False)
    return simulate(plan_job(case, effort=20_000, routing=routing), case)


def texts(svg: Path) -> list[str]:
    return ["".join(node.itertext()).strip() for node in ET.parse(svg).iter(f"{SVG}text")]


def boxes(svg: Path) -> Counter[tuple[str, str]]:
    """The number of boxes by fill and line colour."""
    found: Counter[tuple[str, str]] = Counter()
    for node in ET.parse(svg).iter(f"{SVG}path"):
        style = dict(part.strip().split(": ", 1) for part in node.get("style", "").split(";") if ": " in part)
        found[style.get("fill", ""), style.get("stroke", "")] += 1
    return found


def test_foreign_microbatches_have_the_colour_of_their_home_and_a_line(tmp_path: Path) -> None:
    draw([("one lost", planned(LOST))], tmp_path / "t.svg")
    found = boxes(tmp_path / "t.svg")
    for kind in (Kind.F, Kind.I, Kind.W):
        # Replica 1 gives the 6 microbatches of its lost stage to the workers of others, in each of the steps shown.
        colour = colour_of(1, kind).lower()
        assert found[colour, "#111111"] == 6 * STEPS_SHOWN
        assert found[colour, "#ffffff"] == 3 * 6 * STEPS_SHOWN
        own = colour_of(0, kind).lower()
        assert (found[own, "#ffffff"], found[own, "#111111"]) == (4 * 6 * STEPS_SHOWN, 0)
    assert found[UPDATES[Kind.STEP].lower(), "#ffffff"] == 11 * STEPS_SHOWN


def test_each_worker_has_a_row_that_says_what_is_wrong_with_it(tmp_path: Path) -> None:
    case = replace(LOST, slow={9: 2.0})
    draw([("hurt", planned(case))], tmp_path / "t.svg", title="Two workers")
    found = texts(tmp_path / "t.svg")
    names = [text for text in found if text[:3] in {f"{replica}.{stage}" for replica in range(3) for stage in range(4)}]
    assert names == ["0.0", "0.1", "0.2", "0.3", "1.0", "1.1", "1.2 lost", "1.3", "2.0", "2.1 2× slow", "2.2", "2.3"]
    assert {"Two workers", "hurt", "lost", "replica 0", "replica 1", "replica 2", "outlined: another replica's"} <= set(found)


def test_the_period_is_marked_and_compared_with_the_first_program(tmp_path: Path) -> None:
    healthy = even_case(3, 4, 6, 3.0)
    draw([("healthy", planned(healthy)), ("lost", planned(LOST))], tmp_path / "t.svg")
    found = texts(tmp_path / "t.svg")
    assert {"period 22", "period 30"} <= set(found)
    assert any("12 workers, none lost or slow · period 22 ·" in text for text in found)
    assert any("12 workers, 1 lost · period 30 (+36.4 %) ·" in text for text in found)


def test_a_healthy_job_outlines_nothing(tmp_path: Path) -> None:
    draw([("healthy", planned(even_case(2, 2, 3)))], tmp_path / "t.svg")
    assert not any(line == "#111111" for _, line in boxes(tmp_path / "t.svg"))
    assert not {"lost", "outlined: another replica's", "STEP"} & set(texts(tmp_path / "t.svg"))


def test_the_same_programs_give_the_same_file(tmp_path: Path) -> None:
    simulated = planned(LOST)
    for name in ("a.svg", "b.svg"):
        draw([("t", simulated)], tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_nothing_to_draw_and_unknown_suffixes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="no timeline to draw: expected at least one"):
        draw([], tmp_path / "t.svg")
    with pytest.raises(ReportError, match=r"t\.pdf: suffix '\.pdf': expected \.svg or \.png"):
        draw([("t", planned(LOST))], tmp_path / "t.pdf")
    assert list(tmp_path.iterdir()) == []


def test_of_many_replicas_that_are_alike_one_is_drawn(tmp_path: Path) -> None:
    case = replace(even_case(183, 4, 8), lost=frozenset({6}))
    simulated = planned(case)
    shown = job_rows(simulated)
    apart = {op.replica for order in simulated.program.orders for op in order} - set(shown.stands_for)
    assert len(shown.rows) <= MOST_ROWS
    assert max(shown.stands_for.values()) == 183 - (len(shown.stands_for) - 1)
    assert (len(apart), shown.hidden) == (max(shown.stands_for.values()) - 1, 0)
    draw([("many", simulated)], tmp_path / "t.svg")
    assert f"stands for {max(shown.stands_for.values())} replicas" in texts(tmp_path / "t.svg")
    assert f"the next replica stands for {max(shown.stands_for.values())}" in render_job(simulated)


def test_replicas_with_lost_workers_come_first_where_room_ends(tmp_path: Path) -> None:
    case = replace(even_case(60, 2, 40), lost=frozenset({118}))
    shown = job_rows(planned(case), most=20)
    assert len(shown.rows) == 20
    assert 59 in shown.stands_for
    assert shown.hidden == 60 - sum(shown.stands_for.values()) > 0


def test_text_shows_lost_workers_and_small_letters_for_foreign_ops() -> None:
    lines = render_job(planned(LOST), width=150).splitlines()
    rows = {line.split(" ")[0]: line for line in lines[1:]}
    assert lines[0].startswith("two steps, to ")
    assert set(rows["1.2"].removeprefix("1.2 lost ")) == {"/"}
    assert all(len(line) == 150 for line in rows.values())
    assert all(letter in rows["0.2"] + rows["2.2"] for letter in "fiwS")
    assert not any(letter in rows["0.0"] + rows["1.3"] for letter in "fiw")


def test_text_refuses_a_width_that_shows_nothing() -> None:
    with pytest.raises(ReportError, match=r"^width 39: expected at least 40 characters$"):
        render_job(planned(LOST), width=39)


def traced(simulated: Simulation) -> list[dict[str, Any]]:
    steps = simulated.steps[:STEPS_SHOWN]
    return perfetto.trace([("one lost", simulated.timeline)], steps=steps)["traceEvents"]


def test_a_trace_of_steps_in_a_row_has_all_their_ops_and_is_read_back(tmp_path: Path) -> None:
    simulated = planned(LOST)
    events = traced(simulated)
    names = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert {"one lost", "worker 6 (lost)", "worker 2 (0.2)", "0.1 → 0.2"} <= names
    ops = [event for event in events if event["ph"] == "X" and "message" not in event["args"]]
    assert len(ops) == STEPS_SHOWN * (3 * 3 * 4 * 6 + 2 * 11)
    foreign = [event for event in ops if event["name"].endswith(" of replica 1")]
    assert len(foreign) == STEPS_SHOWN * 3 * 6
    assert {event["tid"] for event in foreign} == {3, 11}, "the threads of workers 0.2 and 2.2"
    shown = Counter((event["tid"] - 1, event["args"]["start"], event["args"]["end"]) for event in ops)
    assert shown == Counter((i.rank, i.start, i.end) for step in simulated.steps[:STEPS_SHOWN] for order in step for i in order)
    steps = simulated.steps[:STEPS_SHOWN]
    perfetto.write([("one lost", simulated.timeline)], tmp_path / "t.json", steps=steps)
    assert perfetto.load(tmp_path / "t.json") == simulated.timeline


@pytest.mark.parametrize("seed", range(12))
def test_the_first_of_steps_in_a_row_is_the_step_alone(seed: int) -> None:
    """So a trace may have the ops of both. The first F of a step comes after all messages of the step before."""
    case = random_case(seed, links=True, shapes=True)
    simulated = simulate(random_job_program(case, seed), case)
    first = tuple(tuple(one for one in order if one.op.kind.is_compute) for order in simulated.steps[0])
    assert first == simulated.timeline.ops


def test_a_lost_worker_neither_idles_nor_has_a_row_in_a_timeline() -> None:
    timeline = planned(LOST).timeline
    work = 3 * 4 * 6 * 3
    assert bubble_ratio(timeline) == pytest.approx(1 - work / (11 * timeline.makespan))
    rows = [line.split(" ")[0] for line in render(timeline).splitlines()[1:]]
    assert rows == ["0.0", "0.1", "0.2", "0.3", "1.0", "1.1", "1.3", "2.0", "2.1", "2.2", "2.3"]


def test_arrows_of_a_trace_begin_and_end_in_ops_of_neighbouring_stages() -> None:
    events = traced(planned(LOST))
    slices = [event for event in events if event["ph"] == "X" and event["dur"] > 0 and "message" not in event["args"]]

    def under(flow: dict[str, Any]) -> str:
        (found,) = [
            event["args"].get("op") or event["args"]["runs"]
            for event in slices
            if (event["pid"], event["tid"]) == (flow["pid"], flow["tid"])
            and event["ts"] < flow["ts"] < event["ts"] + event["dur"]
        ]
        return found

    arrows: dict[int, list[str]] = {}
    for event in events:
        if event["ph"] in "sf":
            arrows.setdefault(event["id"], []).append(under(event))
    # Forwards and backwards, over 3 edges, for 6 microbatches of 3 replicas.
    assert len(arrows) == STEPS_SHOWN * 2 * 3 * 6 * 3
    assert ["1:1F0", "1:2F0"] in arrows.values()
    assert ["1:2I0", "1:1I0"] in arrows.values()


def test_a_lost_worker_of_several_stages_has_one_row() -> None:
    case = replace(even_case(2, 4, 3), placement=v_shaped(2), lost=frozenset({3}))
    lost = [row for row in job_rows(planned(case)).rows if row.lost]
    assert [(row.name, row.worker, row.stages) for row in lost] == [("1.1+2 lost", 3, (1, 2))]


def test_rows_are_workers_with_their_pace_and_whom_they_wait_for(tmp_path: Path) -> None:
    draw([("a step", job_timeline())], tmp_path / "step.svg", title="Worker 1.1 is slow")
    found = texts(tmp_path / "step.svg")
    assert {"Worker 1.1 is slow", "a step", "0.0", "0.1", "1.0", "1.1 · 2.5× slow", "time (ms)"} <= set(found)
    assert found.count("waits for 1.0: 275 ms") == 1 and found.count("waits for 1.0: 500 ms") == 1
    assert {"outlined: another replica's", "crosses replicas", "REDUCE, exposed"} <= set(found)
    assert not any("more" in text for text in found)
    draw([("a step", job_timeline())], tmp_path / "again.svg", title="Worker 1.1 is slow")
    assert (tmp_path / "again.svg").read_bytes() == (tmp_path / "step.svg").read_bytes()


def test_a_slow_link_is_marked_and_no_other_of_its_stages(tmp_path: Path) -> None:
    """Messages from worker 1.0 to 1.1 take longer than those to 0.1."""
    whole = job_timeline()
    late = {(0, 0): 0.12, (0, 1): 0.22, (1, 0): 0.12, (1, 1): 0.5}
    messages = tuple(replace(one, arrived=late[one.replica or 0, one.microbatch]) for one in whole.messages)
    timeline = replace(whole, messages=messages)
    assert slow_links_of(timeline) == ((2, 3),)
    draw([("a step", timeline)], tmp_path / "step.svg")
    assert "on a slow link" in texts(tmp_path / "step.svg")
    names = [one["args"]["name"] for one in perfetto.trace([("a step", timeline)], [(0, 1)])["traceEvents"] if one["ph"] == "M"]
    assert {"1.0 → 1.1, slow", "0.0 → 0.1", "1.0 → 0.1"} <= set(names)
    draw([("a step", replace(timeline, messages=()))], tmp_path / "step.svg")
    assert "on a slow link" not in texts(tmp_path / "step.svg")


def test_only_what_is_there_is_in_the_legend(tmp_path: Path) -> None:
    whole = job_timeline()
    ops = tuple(tuple(one for one in order if one.op.replica == 0) for order in whole.ops)
    own = replace(whole, ops=ops, messages=tuple(one for one in whole.messages if one.replica == 0), reduces=())
    draw([("a step", own)], tmp_path / "step.svg")
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
    draw([("a step", timeline)], tmp_path / "step.svg")
    found = texts(tmp_path / "step.svg")
    assert {"39.0", "39.1 · 3.0× slow", "0.0", "30.1", "and 8 replicas more"} <= set(found)
    assert "31.0" not in found and "38.1" not in found


def test_steps_of_pipelines_and_of_jobs_have_no_picture_in_common(tmp_path: Path) -> None:
    alone = simulate(one_f_one_b(2, 2), CostModel.uniform(2, 1.0, 1.0, 1.0)).timeline
    alone = replace(alone, seconds_per_unit=1.0)
    with pytest.raises(ReportError, match="timelines of several replicas beside those of one pipeline"):
        draw([("alone", alone), ("job", job_timeline())], tmp_path / "step.svg")
