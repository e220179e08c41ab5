"""One program from a program per replica, and back."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jobs import even_case

from adaptra.errors import ScheduleError
from adaptra.passes.insert_comm import InsertComm
from adaptra.planning.replicas.job_planner import plan_job
from adaptra.planning.replicas.joined_programs import join, order_of_replica
from adaptra.program.placement import in_turn, v_shaped
from adaptra.program.schedules import generate_for
from adaptra.program.verify import verify
from adaptra.simulation.cost import CostModel

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


def test_a_crossed_replica_has_no_order_of_its_own() -> None:
    case = replace(even_case(4, 2, 2), slow={1: 2.0})
    program = plan_job(case, effort=20_000)
    crossed = re.escape("adapted: a route crosses replica 0: expected one that computes its own alone")
    with pytest.raises(ScheduleError, match=f"^{crossed}$"):
        order_of_replica(program, 0)
    with pytest.raises(
        ScheduleError, match=r"^adapted: no replica 4: expected a program with this replica and routes, version 2$"
    ):
        order_of_replica(program, 4)
    with pytest.raises(ScheduleError, match=r"^1f1b: no replica 0"):
        order_of_replica(generate_for("1f1b", (0, 1), 3), 0)
