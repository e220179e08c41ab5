"""One program from a program per replica, and back."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jobs import even_case

from adaptra.errors import ScheduleError
from adaptra.passes.insert_comm import InsertComm
from adaptra.planning.routes.job_planner import plan_job
from adaptra.planning.routes.joined_programs import join, order_of_replica
from adaptra.program import Program
from adaptra.program.placement import in_turn, v_shaped
from adaptra.program.schedules import generate_for
from adaptra.program.verify import verify
from adaptra.report import perfetto
from adaptra.report.picture import draw
from adaptra.report.stage_table import worker_table
from adaptra.simulation.cost import CostModel
from adaptra.simulation.simulate import simulate
from adaptra.simulation.timeline import Source, Timeline
from adaptra.simulation.worker_steps import worker_steps

NAMES = {in_turn(3): ("1f1b", "gpipe", "zb_h1", "zb_h2"), in_turn(2, 2): ("interleaved",), v_shaped(2): ("zbv",)}


@settings(max_examples=40, deadline=None)
@given(st.data(), st.sampled_from(list(NAMES)), st.integers(1, 4), st.integers(1, 6))
def test_each_replica_keeps_its_order(data: st.DataObject, placement: tuple[int, ...], replicas: int, size: int) -> None:
    names = [data.draw(st.sampled_from(NAMES[placement])) for _ in range(replicas)]
    programs = [generate_for(name, placement, size) for name in names]
    joined = join(programs)
    verify(joined)
    for replica, program in enumerate(programs):
        assert order_of_replica(joined, replica) == replace(program, name=programs[0].name)


def test_only_programs_of_one_pipeline_are_joined() -> None:
    one = generate_for("1f1b", (0, 1), 3)
    with pytest.raises(ScheduleError, match=r"^join: no program: expected one per replica$"):
        join([])
    with pytest.raises(
        ScheduleError, match=r"^join: 1f1b of replica 1 has placement 0,1 and 4 microbatches: expected those of"
    ):
        join([one, generate_for("1f1b", (0, 1), 4)])
    with pytest.raises(ScheduleError, match=r"^join: 1f1b has 2 replicas: expected a program of one pipeline$"):
        join([join([one, one])])
    lowered = InsertComm("late").apply(one, CostModel.uniform(2, 1, 1, 1))
    with pytest.raises(ScheduleError, match=r"^join: 1f1b of replica 0 has SEND and RECV ops: expected compute ops only$"):
        join([lowered])


def test_replicas_of_one_measured_step_may_have_other_numbers_of_microbatches(tmp_path: Path) -> None:
    """The last batch of a set may have fewer rows in one replica. Text, picture, trace and table show what ran."""
    programs = [generate_for("1f1b", (0, 1), size) for size in (3, 5, 1)]
    joined = join(programs, uneven=True)
    assert joined.microbatches == 5
    assert Program.parse(str(joined)) == joined
    ran = [
        replace(interval, rank=2 * replica + interval.rank, op=replace(interval.op, replica=replica))
        for replica, program in enumerate(programs)
        for interval in simulate(program, CostModel.uniform(2, 1.0, 1.0, 1.0)).timeline
    ]
    ops = tuple(tuple(one for one in ran if one.rank == worker) for worker in range(6))
    timeline = Timeline(joined, Source.MEASURED, ops, (), 1e-3)
    assert [len(one) for one in timeline.ops] == [9, 9, 15, 15, 3, 3]
    assert [(one.own, one.given, one.taken) for one in worker_steps(timeline)] == [(own, (), ()) for own in (3, 3, 5, 5, 1, 1)]
    draw([("uneven", timeline)], tmp_path / "step.svg")
    perfetto.write([("uneven", timeline)], tmp_path / "step.json")
    ((_, loaded),) = perfetto.load_all(tmp_path / "step.json")
    assert loaded.program == joined and [len(one) for one in loaded.ops] == [len(one) for one in ops]
    assert worker_table(timeline).count("\n") > 6
    with pytest.raises(ScheduleError, match=r"^join: 1f1b of replica 1 has placement 0,1,2 and 3 microbatches: expected those"):
        join([programs[0], generate_for("1f1b", (0, 1, 2), 3)], uneven=True)


def test_a_crossed_replica_has_no_order_of_its_own() -> None:
    case = replace(even_case(4, 2, 2), slow={1: 2.0})
    program = plan_job(case, effort=20_000)
    crossed = re.escape("adapted: a route crosses replica 0: expected one that computes its own alone")
    with pytest.raises(ScheduleError, match=f"^{crossed}$"):
        order_of_replica(program, 0)
    with pytest.raises(ScheduleError, match=r"^adapted: no replica 4: expected 0..3$"):
        order_of_replica(program, 4)
    alone = generate_for("1f1b", (0, 1), 3)
    assert order_of_replica(alone, 0) == alone, "one pipeline is a job of one replica"
