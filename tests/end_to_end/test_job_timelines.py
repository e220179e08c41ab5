"""The measured timeline of a job: a row per worker, other replicas' microbatches, and who waits for whom."""

from __future__ import annotations

import json
import pickle
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from processes import run_processes

from adaptra.cli import main
from adaptra.planning.routes.job_planner import plan_job
from adaptra.program import Kind, Program
from adaptra.program.routing import Routing
from adaptra.report import perfetto
from adaptra.report.panels import colour_of
from adaptra.report.run_records import load_run
from adaptra.simulation.case import Case
from adaptra.simulation.cost import CostModel
from adaptra.simulation.timeline import Timeline
from adaptra.simulation.worker_steps import paces, worker_steps

pytestmark = [pytest.mark.processes, pytest.mark.alone]

REPLICAS, STAGES, MICROBATCHES, ROWS = 2, 3, 4, 8
FIRST, SECOND = (0, 1, 2), (3, 4, 5)
SECONDS = 0.02
NAMES = ["0.0", "0.1", "0.2", "1.0", "1.1", "1.2"]


def shared() -> Program:
    """Worker 1.1 gives its microbatches 1 and 2 to worker 0.1."""
    case = Case(CostModel.uniform(STAGES, 1.0, 1.0, 1.0), MICROBATCHES, (0, 1, 2)).of_replicas(REPLICAS)
    paths = [[FIRST] * 4, [SECOND, (3, 1, 5), (3, 1, 5), SECOND]]
    return plan_job(case, routing=Routing.of_paths((FIRST, SECOND), paths))


def train(rank: int, folder: str, given: Program) -> dict[str, bytes | None]:
    """Train three steps with worker 1.1 twice as slow, with routes and without; what ``timeline`` returns."""
    import torch.distributed as dist
    from models import EXAMPLES
    from training import call, compiled

    import adaptra

    dist.init_process_group("gloo")
    example, found = EXAMPLES["gpt_dropout"], {}
    device = adaptra.EmulatedDevice(SECONDS, SECONDS, SECONDS)
    for name, schedule in (("shared", given), ("apart", "1f1b")):
        options = adaptra.Options(
            schedule=schedule,
            adapt=False,
            share=name == "shared",
            emulate=device,
            faults=["slow 1.1 2x"],
            telemetry=adaptra.Telemetry(folder=f"{folder}/{name}"),
        )
        with compiled(example, example.rows(ROWS, 0), stages=STAGES, microbatches=MICROBATCHES, options=options) as pipe:
            for step in range(3):
                args, kwargs = call(example.rows(ROWS, 2 * step + pipe.replica))
                pipe.step(*args, **kwargs)
            timeline = pipe.timeline()
            for suffix in ("json", "svg"):
                pipe.save_trace(f"{folder}/{name}.{suffix}")
        found[name] = None if timeline is None else pickle.dumps(timeline)
    return found


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Timeline]]:
    folder = tmp_path_factory.mktemp("job")
    first, *others = run_processes(train, REPLICAS * STAGES, str(folder), shared())
    assert all(set(one.values()) == {None} for one in others), "the rank of worker 0 alone gets the job's timeline"
    return folder, {name: pickle.loads(value) for name, value in first.items()}


Measured = tuple[Path, dict[str, Timeline]]


def test_every_worker_has_its_own_ops_and_those_of_others(measured: Measured) -> None:
    timeline = measured[1]["shared"]
    own = [{(op.replica, op.microbatch) for op in (one.op for one in order)} for order in timeline.ops]
    assert own[1] == {(0, 0), (0, 1), (0, 2), (0, 3), (1, 1), (1, 2)}
    assert own[4] == {(1, 0), (1, 3)}
    assert [len(order) for order in timeline.ops] == [12, 18, 12, 12, 6, 12]
    assert sorted(one.rank for one in timeline.reduces) == list(range(REPLICAS * STAGES))


def test_messages_across_replicas_are_drawn_between_their_workers(measured: Measured) -> None:
    timeline = measured[1]["shared"]
    crossing = sorted(timeline.ends_of(one) for one in timeline.messages if one.replica == 1 and one.microbatch == 1)
    assert crossing == [(1, 3), (1, 5), (3, 1), (5, 1)]
    between_stages = [one for one in timeline.messages if one.source != one.destination]
    assert len(between_stages) == REPLICAS * MICROBATCHES * 2 * (STAGES - 1)
    others = {(str(one.send), *timeline.ends_of(one)) for one in timeline.messages if one not in between_stages}
    assert others == {("1:1SEND_W0", 4, 1), ("1:1SEND_W2", 1, 4)}
    assert all(one.posted <= one.arrived for one in timeline.messages)


def test_a_slow_worker_is_found_and_what_it_gives(measured: Measured) -> None:
    timeline = measured[1]["shared"]
    by_name = {one.name: one for one in worker_steps(timeline)}
    assert list(by_name) == NAMES
    slow, host = by_name["1.1"], by_name["0.1"]
    assert (slow.own, slow.taken, slow.given) == (2, (), ((1, 2),))
    assert (host.own, host.taken, host.given) == (4, ((1, 2),), ())
    assert slow.compute == pytest.approx(12 * SECONDS, rel=0.5)
    assert paces(by_name.values())[4] > 1.5
    assert sum(paces(by_name.values())[worker] > 1.5 for worker in range(6)) == 1
    assert slow.reduce is not None and slow.exposed is None, "that shows only in the next step"
    assert {whom for whom, _ in by_name["0.0"].waits} == {1}, "its gradients come from worker 0.1 alone"
    assert {whom for whom, _ in by_name["1.2"].waits} <= {1, 4}
    for one in by_name.values():
        assert 0 < sum(seconds for _, seconds in one.waits) < timeline.makespan


@pytest.mark.parametrize("name", ["shared", "apart"])
def test_the_files_of_the_run_tell_the_same(measured: Measured, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the step that the timeline shows, the last one. Each rank has written what it alone did."""
    folder, timelines = measured
    run = load_run(folder / name)
    steps = {one.worker: one for one in worker_steps(timelines[name])}
    assert len(run.replicas) == REPLICAS and list(run.works) == list(steps)
    for worker, works in run.works.items():
        (step, work), whole = works[-1], steps[worker]
        assert step == 2 and work.name == NAMES[worker]
        assert (work.own, work.taken, work.given) == (whole.own, whole.taken, whole.given)
        assert (work.compute, work.per_microbatch) == pytest.approx((whole.compute, whole.per_microbatch))
        assert work.reduce is None and works[-2][1].reduce is not None, "a step tells of REDUCE of the one before"
        assert {whom for whom, _ in work.waits} <= {whom for whom, _ in whole.waits} | {0, 3}
    assert main(["trace", str(folder / name)]) == 0
    (slow,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("1.1 ")]
    assert ("2 to 0.1" in slow) is (name == "shared")


def test_replicas_that_never_share_are_shown_together(measured: Measured) -> None:
    timeline = measured[1]["apart"]
    assert [len(order) for order in timeline.ops] == [12] * REPLICAS * STAGES
    assert {one.op.replica for order in timeline.ops[:3] for one in order} == {0}
    assert {one.op.replica for order in timeline.ops[3:] for one in order} == {1}
    assert all(not one.taken and not one.given for one in worker_steps(timeline))


def test_the_trace_reads_back_and_prints_a_row_per_worker(measured: Measured, capsys: pytest.CaptureFixture[str]) -> None:
    folder, timelines = measured
    path = folder / "shared.json"
    again = perfetto.load(path)
    assert [len(order) for order in again.ops] == [len(order) for order in timelines["shared"].ops]
    events = json.loads(path.read_text())["traceEvents"]
    threads = {one["args"]["name"].removesuffix(", slow") for one in events if one["ph"] == "M"}
    assert {f"worker {worker} ({name})" for worker, name in enumerate(NAMES)} <= threads
    assert "1.0 → 0.1" in threads and "0.1 → 1.2" in threads
    assert sum(one["name"].endswith(" of replica 1") for one in events) == 6
    assert main(["trace", str(path), "--width", "120"]) == 0
    shown = capsys.readouterr().out
    lanes = dict(line.split(" ", 1) for line in shown.splitlines() if line[:3] in NAMES)
    assert "f1" in lanes["0.1"] and "f2" in lanes["0.1"] and "F1" not in lanes["1.1"]
    assert "2 to 0.1" in shown and "2 of replica 1" in shown


def test_pictures_colour_microbatches_by_home(measured: Measured, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, _ = measured
    again = tmp_path / "again.svg"
    assert main(["trace", str(folder / "shared.json"), str(folder / "apart.json"), "-o", str(again)]) == 0
    for path, names in ((folder / "shared.svg", NAMES[:4]), (again, NAMES[:4])):
        root = ET.parse(path)
        texts = ["".join(one.itertext()) for one in root.iter("{http://www.w3.org/2000/svg}text")]
        assert set(names) <= set(texts)
        assert any(text.startswith("1.1 · ") and text.endswith("× slow") for text in texts)
        assert {"replica 0", "replica 1", "outlined: another replica's", "crosses replicas"} <= set(texts)
        assert any(text.startswith("waits for 0.1: ") for text in texts)
        for home in range(REPLICAS):
            assert colour_of(home, Kind.F).lower() in path.read_text()
    assert main(["trace", str(folder / "shared.json"), "-o", str(again), "--slow-edge", "0-1"]) == 2
    assert "expected traces of one pipeline" in capsys.readouterr().err
