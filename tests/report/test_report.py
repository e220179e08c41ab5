"""Timelines as text, pictures and traces, and the live table. The timelines here are written by hand."""

import io
import json
import struct
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from job_timeline import job_timeline
from rich.console import Console

from adaptra.errors import MissingExtraError, ReportError
from adaptra.program import Kind, Program, parse_op
from adaptra.report import perfetto
from adaptra.report.files import write_whole
from adaptra.report.live import LiveTable
from adaptra.report.panels import COLOURS, MESSAGE
from adaptra.report.picture import draw
from adaptra.report.stage_table import MeasuredStep
from adaptra.report.text import bubble_ratio, render
from adaptra.simulation.timeline import MessageInterval, OpInterval, ReduceInterval, Source, Timeline

SVG = "{http://www.w3.org/2000/svg}"


def timeline(
    text: str,
    spans: list[list[tuple[float, float]]],
    messages: tuple[MessageInterval, ...] = (),
    source: Source = Source.SIMULATED,
    seconds_per_unit: float | None = None,
) -> Timeline:
    program = Program.parse(text)
    ops = tuple(
        tuple(OpInterval(rank, op, start, end) for op, (start, end) in zip(order, times, strict=True))
        for rank, (order, times) in enumerate(zip(program.orders, spans, strict=True))
    )
    return Timeline(program, source, ops, messages, seconds_per_unit)


def two_ranks(delay: float = 1.0, source: Source = Source.SIMULATED, seconds_per_unit: float | None = None) -> Timeline:
    """Two microbatches over two ranks; messages take ``delay``, F 2, B 4."""
    d = delay
    spans = [
        [(0.0, 2.0), (2.0, 4.0), (8 + 2 * d, 12 + 2 * d), (14 + 2 * d, 18 + 2 * d)],
        [(2 + d, 4 + d), (4 + d, 8 + d), (8 + d, 10 + d), (10 + d, 14 + d)],
    ]
    messages = (
        MessageInterval(Kind.SEND_F, 0, 1, 0, 2.0, 2.0, 2 + d),
        MessageInterval(Kind.SEND_F, 0, 1, 1, 4.0, 4.0, 4 + d),
        MessageInterval(Kind.SEND_B, 1, 0, 0, 8 + d, 8 + d, 8 + 2 * d),
        MessageInterval(Kind.SEND_B, 1, 0, 1, 14 + d, 14 + d, 14 + 2 * d),
    )
    text = "schedule two placement=0,1 microbatches=2\n0: 0F0 0F1 0B0 0B1\n1: 1F0 1B0 1F1 1B1\n"
    return timeline(text, spans, messages, source, seconds_per_unit)


# Text


def test_text_shows_each_op_where_it_ran_and_dots_where_the_rank_waited() -> None:
    assert render(two_ranks(), width=47) == (
        "two, simulated: makespan 20, bubble 40.0 %\n"
        "rank 0 F0--F1--............B0------....B1------\n"
        "rank 1 ......F0--B0------F1--B1------..........\n"
    )


def test_text_of_ops_too_narrow_for_their_number_shows_the_letter() -> None:
    spans = [[(float(k), k + 1.0) for k in range(16)]]
    text = "schedule s placement=0 microbatches=16\n0: " + " ".join(f"0F{k}" for k in range(16)) + "\n"
    lane = render(timeline(text, spans), width=40).splitlines()[1]
    assert lane == "rank 0 F0F1F2F3F4F5F6F7F8-F9F-F-F-F-F-F-"


def test_text_names_the_stage_where_a_rank_holds_several() -> None:
    text = "schedule v placement=0,0 microbatches=1\n0: 0F0 1F0\n"
    assert "0F0-" in render(timeline(text, [[(0.0, 1.0), (1.0, 2.0)]]), width=40)


def test_text_of_a_measured_timeline_starts_where_its_first_op_did_and_uses_milliseconds() -> None:
    text = "schedule m placement=0 microbatches=1\n0: 0F0\n"
    shown = render(timeline(text, [[(1000.0, 1000.25)]], source=Source.MEASURED, seconds_per_unit=1.0), width=40)
    assert shown == f"m, measured: makespan 250 ms, bubble 0.0 %\nrank 0 F0{'-' * 31}\n"


def test_text_of_a_program_without_ops_is_only_waiting() -> None:
    shown = render(timeline("schedule empty placement=0 microbatches=1\n0:\n", [[]]), width=40)
    assert shown == f"empty, simulated: makespan 0, bubble 0.0 %\nrank 0 {'.' * 33}\n"


def test_text_refuses_a_width_that_shows_nothing() -> None:
    with pytest.raises(ReportError, match=r"^width 39: expected at least 40 characters$"):
        render(two_ranks(), width=39)


def test_bubble_ratio_is_the_idle_share_of_all_ranks() -> None:
    assert bubble_ratio(two_ranks()) == (20 + 20 - 12 - 12) / 40


# Pictures


def texts(svg: Path) -> list[str]:
    return ["".join(node.itertext()).strip() for node in ET.parse(svg).iter(f"{SVG}text")]


def test_svg_holds_titles_makespan_bubble_and_every_microbatch_number(tmp_path: Path) -> None:
    draw([("before", two_ranks(4.0)), ("after", two_ranks(1.0))], tmp_path / "t.svg", slow_edges=[(0, 1)], title="A slow link")
    found = texts(tmp_path / "t.svg")
    assert {"A slow link", "before", "after", "rank 0", "rank 1", "slow 0→1", "waiting", "time (the case's unit)"} <= set(found)
    assert "simulated · makespan 26 · bubble 53.8 %" in found
    assert "simulated · makespan 20 (−23.1 %) · bubble 40.0 %" in found
    assert {"F forward", "B both gradients", "message on a slow edge"} <= set(found)
    assert not {"I input gradient", "W weight gradient"} & set(found)
    # 8 ops per picture, microbatches 0 and 1 in each; the time axis has a 0 of its own.
    assert found.count("1") == 8
    assert found.count("0") == 8 + 1


def boxes(svg: Path, colour: str) -> list[tuple[float, float]]:
    """Left and right of each box of one colour, in points."""
    found: list[tuple[float, float]] = []
    for node in ET.parse(svg).iter(f"{SVG}path"):
        if f"fill: {colour.lower()}" in node.get("style", ""):
            words = node.get("d", "").replace("M", " ").replace("L", " ").replace("z", " ").split()
            across = [float(x) for x in words[0::2]]
            found.append((min(across), max(across)))
    return found


def test_boxes_stand_at_their_times_on_one_axis(tmp_path: Path) -> None:
    """Legend patches aside, B boxes of both panels are 4 units wide and start where they ran."""
    draw([("before", two_ranks(4.0)), ("after", two_ranks(1.0))], tmp_path / "t.svg")
    found = sorted(boxes(tmp_path / "t.svg", COLOURS[Kind.B]))
    legend, *ran = sorted(found, key=lambda box: box[1] - box[0])
    starts = sorted([16, 22, 8, 14, 10, 16, 5, 11])
    unit = (ran[0][1] - ran[0][0]) / 4
    zero = sorted(ran)[0][0] - 5 * unit
    assert legend[1] - legend[0] < 2 * unit
    assert [left for left, _ in sorted(ran)] == pytest.approx([zero + unit * start for start in starts], abs=0.01)


def test_the_same_timelines_give_the_same_file(tmp_path: Path) -> None:
    for name in ("a.svg", "b.svg"):
        draw([("t", two_ranks())], tmp_path / name, slow_edges=[(1, 0)])
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_png_is_a_picture_wide_enough_to_read(tmp_path: Path) -> None:
    draw([("t", two_ranks(seconds_per_unit=1e-3))], tmp_path / "t.png")
    data = (tmp_path / "t.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    assert width >= 1000
    assert height >= 200


def test_both_directions_of_a_slow_link_share_one_mark(tmp_path: Path) -> None:
    draw([("t", two_ranks())], tmp_path / "t.svg", slow_edges=[(1, 0), (0, 1)])
    assert "slow 0⇄1" in texts(tmp_path / "t.svg")


def test_a_measured_panel_marks_an_edge_only_where_its_messages_were_slow(tmp_path: Path) -> None:
    """F takes 2."""
    healthy, slow = (two_ranks(delay, Source.MEASURED, 1e-3) for delay in (0.1, 4.0))
    draw([("healthy", healthy), ("slow link", slow)], tmp_path / "both.svg", slow_edges=[(1, 0), (0, 1)])
    assert texts(tmp_path / "both.svg").count("slow 0⇄1") == 1
    draw([("healthy", healthy)], tmp_path / "healthy.svg", slow_edges=[(1, 0), (0, 1)])
    assert not [one for one in texts(tmp_path / "healthy.svg") if "slow" in one]


def test_later_stages_of_a_rank_are_lighter_and_named_in_the_legend(tmp_path: Path) -> None:
    text = "schedule v placement=0,0 microbatches=1\n0: 0F0 1F0\n"
    draw([("v", timeline(text, [[(0.0, 1.0), (1.0, 2.0)]]))], tmp_path / "v.svg")
    found = texts(tmp_path / "v.svg")
    assert "lighter: the rank's later stages" in found
    assert "rank 0 (0+1)" in found


def dichromat(colour: str, missing: str) -> np.ndarray:
    """What an eye without one cone type sees, linear RGB (Viénot, Brettel, Mollon 1999)."""
    srgb = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    to_lms = np.array([[17.8824, 43.5161, 4.11935], [3.45565, 27.1554, 3.86714], [0.0299566, 0.184309, 1.46709]])
    project = {
        "L": np.array([[0, 2.02344, -2.52581], [0, 1, 0], [0, 0, 1]]),
        "M": np.array([[1, 0, 0], [0.494207, 0, 1.24827], [0, 0, 1]]),
    }[missing]
    seen = np.clip(np.linalg.inv(to_lms) @ project @ to_lms @ linear, 0, 1)
    return 255 * np.where(seen <= 0.0031308, 12.92 * seen, 1.055 * seen ** (1 / 2.4) - 0.055)


@pytest.mark.parametrize("missing", ["L", "M"])
def test_colours_are_told_apart_without_red_green_vision(missing: str) -> None:
    """Boxes that stand side by side; B never stands beside I or W of the same backward, messages lie on grey."""
    kinds = {**{kind.value: colour for kind, colour in COLOURS.items()}, "message": MESSAGE, "waiting": "#FFFFFF"}
    for (one, first), (other, second) in combinations(kinds.items(), 2):
        distance = float(np.linalg.norm(dichromat(first, missing) - dichromat(second, missing)))
        assert distance > 40, f"{one} {first} and {other} {second} are {distance:.0f} apart"


@pytest.mark.parametrize(
    ("name", "edges", "message"),
    [
        ("t.pdf", [], r"t\.pdf: suffix '\.pdf': expected \.svg or \.png$"),
        ("t", [], r"suffix '': expected \.svg or \.png$"),
        ("none/t.svg", [], r"none/t\.svg: there is no folder .*none$"),
        ("t.svg", [(0, 2)], r"^slow edge 0→2: expected two neighbouring stages of 0\.\.1$"),
        ("t.svg", [(1, 2)], r"^slow edge 1→2: expected two neighbouring stages of 0\.\.1$"),
    ],
)
def test_what_can_not_be_drawn_is_refused_and_leaves_no_file(
    tmp_path: Path, name: str, edges: list[tuple[int, int]], message: str
) -> None:
    with pytest.raises(ReportError, match=message):
        draw([("t", two_ranks())], tmp_path / name, slow_edges=edges)
    assert list(tmp_path.iterdir()) == []


def test_no_timeline_and_mixed_units_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="no timeline to draw"):
        draw([], tmp_path / "t.svg")
    with pytest.raises(ReportError, match="in seconds beside timelines in a case's own unit"):
        draw([("a", two_ranks()), ("b", two_ranks(seconds_per_unit=1e-3))], tmp_path / "t.svg")


def test_missing_matplotlib_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'adaptra\[viz\]'"):
        draw([("t", two_ranks())], tmp_path / "t.svg")


# Files


def test_a_failed_write_keeps_the_old_file_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "old").write_text("old")
    with pytest.raises(ReportError, match="folder: "):
        write_whole(tmp_path / "folder", "new")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
    assert (tmp_path / "folder" / "old").read_text() == "old"


# Traces


def test_trace_round_trips_several_timelines(tmp_path: Path) -> None:
    runs = (("before", two_ranks(1 / 3)), ("after, measured", two_ranks(0.1, Source.MEASURED, 1e-3)))
    perfetto.write(runs, tmp_path / "t.json")
    assert perfetto.load_all(tmp_path / "t.json") == runs
    assert perfetto.load(tmp_path / "t.json", run=1) == runs[1][1]


def replicated(*exposed: float | None) -> Timeline:
    """Two ranks that add their gradients over replicas in 5 ms each, of which these milliseconds are exposed."""
    sums = [ReduceInterval(0, 20.0, 25.0, 64), ReduceInterval(1, 18.0, 23.0, 32)]
    reduces = tuple(replace(one, exposed=part) for one, part in zip(sums, exposed, strict=True))
    return replace(two_ranks(1.0, Source.MEASURED, 1e-3), reduces=reduces)


def test_trace_shows_sums_over_replicas_and_their_exposed_part(tmp_path: Path) -> None:
    perfetto.write([("t", replicated(5.0, 3.0))], tmp_path / "t.json")
    assert perfetto.load(tmp_path / "t.json") == replicated(5.0, 3.0)
    slices = [one for one in json.loads((tmp_path / "t.json").read_text())["traceEvents"] if one.get("cat") == "REDUCE"]
    assert [(one["name"], one["tid"], one["ts"], one["dur"]) for one in slices] == [
        ("REDUCE", 1, 20e3, 5e3), ("exposed", 1, 20e3, 5e3), ("REDUCE", 2, 18e3, 5e3), ("exposed", 2, 20e3, 3e3),
    ]  # fmt: skip


def test_no_exposed_part_is_shown_where_there_is_none_or_it_is_not_known(tmp_path: Path) -> None:
    perfetto.write([("t", replicated(0.0, None))], tmp_path / "t.json")
    assert perfetto.load(tmp_path / "t.json") == replicated(0.0, None)
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert [one["name"] for one in events if one.get("cat") == "REDUCE"] == ["REDUCE", "REDUCE"]


@pytest.mark.parametrize("exposed", ["5.5", "-1.0", '"all"', "NaN"])
def test_more_exposed_than_the_sum_took_is_refused(tmp_path: Path, exposed: str) -> None:
    perfetto.write([("t", replicated(4.5, None))], tmp_path / "t.json")
    text = (tmp_path / "t.json").read_text()
    (tmp_path / "t.json").write_text(text.replace('"exposed": 4.5', f'"exposed": {exposed}'))
    with pytest.raises(ReportError, match=r"event REDUCE: exposed .*: expected a time of at most end - start, or null"):
        perfetto.load(tmp_path / "t.json")


def test_a_sum_of_a_rank_that_is_not_there_is_refused(tmp_path: Path) -> None:
    perfetto.write([("t", replace(replicated(None, None), reduces=(ReduceInterval(0, 20.0, 25.0, 64),)))], tmp_path / "t.json")
    text = (tmp_path / "t.json").read_text()
    (tmp_path / "t.json").write_text(text.replace('"reduce": 0', '"reduce": 2'))
    with pytest.raises(ReportError, match=r"event REDUCE of rank 2: expected one of the ranks 0\.\.1"):
        perfetto.load(tmp_path / "t.json")


def test_a_picture_has_room_for_sums_over_replicas(tmp_path: Path) -> None:
    for name, shown in {
        "with": replicated(5.0, 0.0),
        "unknown": replicated(None, None),
        "without": replace(replicated(None, None), reduces=()),
    }.items():
        draw([("t", shown)], tmp_path / f"{name}.svg")
    assert "REDUCE, exposed" in (tmp_path / "with.svg").read_text()
    unknown = (tmp_path / "unknown.svg").read_text()
    assert "REDUCE over replicas" in unknown and "REDUCE, exposed" not in unknown
    assert "REDUCE" not in (tmp_path / "without.svg").read_text()


def test_trace_keeps_the_order_of_messages_posted_at_one_time(tmp_path: Path) -> None:
    """1→2 before 0→1, though edges are sorted in the trace."""
    text = "schedule s placement=0,1,2 microbatches=2\n0: 0F0 0F1\n1: 1F0 1F1\n2: 2F0 2F1\n"
    spans = [[(t, t + 1.0), (t + 1.0, t + 2.0)] for t in (0.0, 1.0, 2.0)]
    moves = [(0, 0, 1.0), (1, 0, 2.0), (0, 1, 2.0), (1, 1, 3.0)]
    messages = tuple(MessageInterval(Kind.SEND_F, s, s + 1, k, t, t, t) for s, k, t in moves)
    written = timeline(text, spans, messages)
    perfetto.write([("t", written)], tmp_path / "t.json")
    assert perfetto.load(tmp_path / "t.json") == written


@given(st.floats(0, 1e6), st.sampled_from([None, 1.0, 1e-3]), st.sampled_from(Source))
def test_trace_round_trips_any_times_to_the_last_bit(
    tmp_path_factory: pytest.TempPathFactory, delay: float, unit: float | None, source: Source
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.json"
    perfetto.write([("t", two_ranks(delay, source, unit))], path)
    assert perfetto.load(path) == two_ranks(delay, source, unit)


def test_trace_is_in_microseconds_from_the_start_of_the_makespan() -> None:
    spans = [[(5.0, 7.0)]]
    text = "schedule s placement=0 microbatches=1\n0: 0F0\n"
    for source, unit, start, length in (
        (Source.SIMULATED, None, 5e3, 2e3),
        (Source.MEASURED, 1.0, 0.0, 2e6),
        (Source.SIMULATED, 1e-6, 5.0, 2.0),
    ):
        (event,) = [
            e for e in perfetto.trace([("t", timeline(text, spans, (), source, unit))])["traceEvents"] if e["ph"] == "X"
        ]
        assert (event["ts"], event["dur"]) == pytest.approx((start, length))


def test_trace_names_processes_and_threads() -> None:
    events = perfetto.trace([("one", two_ranks()), ("two", two_ranks(3.0))])["traceEvents"]
    names = [(e["pid"], e["name"], e["args"]["name"]) for e in events if e["ph"] == "M"]
    assert names[:5] == [
        (1, "process_name", "one"),
        (1, "thread_name", "rank 0 (stage 0)"),
        (1, "thread_name", "rank 1 (stage 1)"),
        (1, "thread_name", "stage 0 → 1"),
        (1, "thread_name", "stage 1 → 0"),
    ]
    # With a delay of 3 the second forward message leaves while the first is under way: it gets a thread of its own.
    assert (2, "thread_name", "stage 0 → 1 #2") in names


def test_no_two_slices_of_a_thread_overlap() -> None:
    slices: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in perfetto.trace([("t", two_ranks(30.0))])["traceEvents"]:
        if event["ph"] == "X":
            slices.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    assert len(slices) == 2 + 2 + 2
    for spans in slices.values():
        spans.sort()
        assert all(one[1] <= other[0] for one, other in pairwise(spans))


def test_every_message_is_an_arrow_from_its_producer_over_itself_to_its_consumer() -> None:
    events = perfetto.trace([("t", two_ranks())])["traceEvents"]
    slices = [e for e in events if e["ph"] == "X"]

    def under(flow: dict[str, float]) -> str:
        (found,) = [e["name"] for e in slices if e["tid"] == flow["tid"] and e["ts"] < flow["ts"] < e["ts"] + e["dur"]]
        return found

    arrows: dict[int, list[tuple[str, str]]] = {}
    for event in events:
        if event["ph"] in "stf":
            arrows.setdefault(event["id"], []).append((event["ph"], under(event)))
    assert sorted(arrows.values()) == [
        [("s", "0F0"), ("t", "0SEND_F0"), ("f", "1F0")],
        [("s", "0F1"), ("t", "0SEND_F1"), ("f", "1F1")],
        [("s", "1B0"), ("t", "1SEND_B0"), ("f", "0B0")],
        [("s", "1B1"), ("t", "1SEND_B1"), ("f", "0B1")],
    ]


def broken(change: str) -> str:
    data = perfetto.trace([("t", two_ranks())])
    first = next(event for event in data["traceEvents"] if event["ph"] == "X")
    match change:
        case "format":
            del data["otherData"]
        case "version":
            data["otherData"]["version"] = 4
        case "events":
            data["traceEvents"] = {}
        case "event":
            data["traceEvents"].append(7)
        case "source":
            data["otherData"]["runs"][0]["source"] = "guessed"
        case "unit":
            data["otherData"]["runs"][0]["seconds_per_unit"] = 0
        case "program":
            data["otherData"]["runs"][0]["program"] = "schedule"
        case "times":
            first["args"]["end"] = -1
        case "text":
            first["args"]["start"] = "0"
        case "stage" | "replica":
            first["args"]["op"] = "9F0" if change == "stage" else "1:0F0"
        case "kind":
            first["args"] = {"message": "0F0", "destination": 1, "posted": 0, "departed": 0, "arrived": 1}
        case _:
            assert change == "unknown"
            first["args"] = {}
    return json.dumps(data)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("format", "not an adaptra trace: expected otherData.format to be 'adaptra-trace'"),
        ("version", "trace version 4: this adaptra reads version 3"),
        ("events", "expected a list traceEvents and a list otherData.runs"),
        ("event", r": expected an object, got 7"),
        ("source", r"expected title, source \(simulated or measured\)"),
        ("unit", "seconds_per_unit 0: expected a number above 0 or null"),
        ("program", "header 'schedule': expected"),
        ("times", "event 0F0: expected finite start <= end, got 0.0, -1"),
        ("text", "event 0F0: expected finite start <= end, got 0, 2.0"),
        ("stage", r"event 9F0: expected a compute op of the stages 0\.\.1"),
        ("replica", r"event 1:0F0: expected a compute op of the stages 0\.\.1"),
        ("kind", r"event 0F0 to 1: expected a SEND between stages 0\.\.1"),
        ("unknown", "expected those of an op, of a message or of REDUCE"),
    ],
)
def test_a_broken_trace_is_refused_by_file_and_field(tmp_path: Path, change: str, message: str) -> None:
    (tmp_path / "t.json").write_text(broken(change))
    with pytest.raises(ReportError, match=rf"t\.json: .*{message}"):
        perfetto.load(tmp_path / "t.json")


def test_files_that_are_no_trace_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match=r"none\.json: No such file"):
        perfetto.load(tmp_path / "none.json")
    (tmp_path / "t.json").write_text("schedule")
    with pytest.raises(ReportError, match=r"t\.json: not JSON"):
        perfetto.load(tmp_path / "t.json")
    perfetto.write([("t", two_ranks())], tmp_path / "t.json")
    with pytest.raises(ReportError, match=r"run 1: expected one of the 1 runs"):
        perfetto.load(tmp_path / "t.json", run=1)


# The live table


def rows(table: LiveTable) -> None:
    with table as live:
        live.update(step=0, loss=4.158883, tokens_per_second=12345.6, iteration_seconds=0.4321, bubble=0.125, plan_version=1)
        live.update(step=1, loss=4.0, slow_edges=[(1, 2), (2, 1)], plan_version=2, note="[plan] switched")


def test_under_a_launcher_one_rank_shows_the_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for rank, shown in (("0", True), ("1", False)):
        monkeypatch.setenv("RANK", rank)
        rows(LiveTable())
        assert ("4.1589" in capsys.readouterr().out) is shown


def test_without_a_terminal_each_step_is_one_plain_line() -> None:
    out = io.StringIO()
    rows(LiveTable(Console(file=out, width=40), title="training"))
    assert out.getvalue() == (
        "training\n"
        "    step        loss         tokens/s  iteration ms  bubble %    plan  slow edges  note\n"
        "       0      4.1589           12,346         432.1      12.5      v1  -\n"
        "       1      4.0000                -             -         -      v2  1→2 2→1     [plan] switched\n"
    )


def test_a_measured_step_fills_in_the_throughput_and_the_duration() -> None:
    out = io.StringIO()
    with LiveTable(Console(file=out, width=40)) as live:
        live.update(step=0, loss=1.0, measured=MeasuredStep(0, 0.25, 8, 256, "tokens"))
        live.update(step=1, loss=1.0, measured=MeasuredStep(1, 0.25, 500))
        live.update(step=2, loss=1.0, tokens_per_second=7, measured=MeasuredStep(2, 0.25, 8))
    shown = [line.split("  ") for line in out.getvalue().splitlines()[1:]]
    cells = [[cell.strip() for cell in line if cell.strip()][2:4] for line in shown]
    assert cells == [["1,024", "250.0"], ["2,000 samples", "250.0"], ["7", "250.0"]]


def test_on_a_terminal_the_last_rows_are_redrawn_in_place() -> None:
    out = io.StringIO()
    table = LiveTable(Console(file=out, width=120, force_terminal=True, color_system=None), rows=2)
    with table as live:
        for step in range(4):
            live.update(step=step, loss=float(step))
    last = out.getvalue().rsplit("\x1b[2K", 1)[-1] if "\x1b[2K" in out.getvalue() else out.getvalue()
    assert "3.0000" in last
    assert "tokens/s" in out.getvalue()
    assert "\x1b[1A" in out.getvalue()


def test_the_workers_of_a_job_stand_below_the_steps() -> None:
    """As lines after the step, or on a terminal as a table that stays until the workers of another step are given."""
    out = io.StringIO()
    with LiveTable(Console(file=out, width=40)) as live:
        live.update(step=0, loss=1.0, workers=job_timeline())
        live.update(step=1, loss=1.0)
    lines = out.getvalue().splitlines()
    assert lines[2:7] == [
        "    worker  compute ms  pace   takes           gives     REDUCE ms  exposed  waits for",
        "    0.0     200.0       1.00×  -               -         -          -        -",
        "    0.1     300.0       0.40×  1 of replica 1  -         100.0      100.0    1.0: 275.0 ms",
        "    1.0     200.0       1.00×  -               -         -          -        -",
        "    1.1     250.0       2.50×  -               1 to 0.1  50.0       50.0     1.0: 500.0 ms",
    ]
    assert len(lines) == 8
    out = io.StringIO()
    with LiveTable(Console(file=out, width=120, force_terminal=True, color_system=None)) as live:
        live.update(step=3, loss=1.0, workers=job_timeline())
        live.update(step=4, loss=2.0)
        last = out.getvalue().rsplit("\x1b[2K", 1)[-1]
        assert "2.0000" in last and "workers in step 3" in last and "2.50×" in last


def test_an_error_while_training_leaves_the_table_and_travels_on() -> None:
    out = io.StringIO()
    with (
        pytest.raises(RuntimeError, match="rank 2"),
        LiveTable(Console(file=out, width=120, force_terminal=True, color_system=None)) as live,
    ):
        live.update(step=7, loss=1.0)
        raise RuntimeError("rank 2")
    assert "1.0000" in out.getvalue()
    assert out.getvalue().endswith("\x1b[?25h"), "the cursor is shown again"


def test_ops_of_traces_are_program_ops() -> None:
    """The trace's op names are the program's own text form."""
    events = perfetto.trace([("t", two_ranks())])["traceEvents"]
    names = [parse_op(e["name"]) for e in events if e["ph"] == "X" and "op" in e["args"]]
    assert sorted(names, key=str) == sorted((op for order in two_ranks().program.orders for op in order), key=str)
