"""Programs of several replicas: their text form, who computes what, and what the text form refuses."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jobs import random_case, random_job_program, random_routing

from adaptra.errors import ScheduleError
from adaptra.program import Kind, Op, Program
from adaptra.program.routing import Route, Routing
from adaptra.program.verify import verify

TEXT = """schedule rerouted version=2 stages=2 microbatches=3
workers 0,1 2,-
route 0 0-2 by 0,1
route 1 0-2/2 by 2,1
route 1 1 by 2,1
0: 0:0F0 0:0F1 0:0F2 0:0B0 0:0B1 0:0B2 0REDUCE 0STEP
1: 0:1F0 0:1B0 1:1F0 1:1B0 0:1F1 0:1B1 1:1F1 1:1B1 0:1F2 0:1B2 1:1F2 1:1B2 1REDUCE 1STEP
2: 1:0F0 1:0F1 1:0F2 1:0B0 1:0B1 1:0B2 0REDUCE 0STEP
"""


@given(st.integers(0, 10_000))
def test_a_program_of_several_replicas_comes_back_from_its_text(seed: int) -> None:
    program = random_job_program(random_case(seed), seed)
    assert Program.parse(str(program)) == program


def test_the_text_form_of_version_2() -> None:
    program = Program.parse(TEXT)
    assert str(program) == TEXT
    assert (program.stages, program.ranks, program.replicas) == (2, 3, 2)
    assert program.orders[2][-1] == Op(0, Kind.STEP, 0, None, 1)
    assert program.routing == Routing(
        ((0, 1), (2, None)),
        (Route(0, range(3), (0, 1)), Route(1, range(0, 3, 2), (2, 1)), Route(1, range(1, 2), (2, 1))),
        3,
    )


def test_the_holder_is_the_worker_on_the_route() -> None:
    program = Program.parse(TEXT)
    assert [program.holder(1, stage, 2) for stage in range(2)] == [2, 1]
    assert program.holder(0, 1, 0) == 1
    one = Program.parse("schedule x placement=1,0 microbatches=1\n0: 1F0\n1: 0F0\n")
    assert [one.holder(0, stage, 0) for stage in range(2)] == [1, 0]


@given(st.integers(0, 10_000))
def test_every_microbatch_is_held_by_a_worker_that_has_the_stage(seed: int) -> None:
    case = random_case(seed)
    routing = random_routing(case, seed)
    for replica in range(case.replicas):
        for stage in range(case.stages):
            for microbatch in range(case.microbatches):
                assert routing.holder(replica, stage, microbatch) in routing.column(stage)
    assert not case.lost & set(routing.live)


def test_a_healthy_routing_keeps_each_replica_on_its_own_workers() -> None:
    routing = Routing.healthy(2, 3, 4)
    assert routing.workers == ((0, 1, 2), (3, 4, 5))
    assert [routing.holder(1, stage, 3) for stage in range(3)] == [3, 4, 5]
    assert routing.stages_of(4) == (1,)
    assert routing.replica_of(4) == 1


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("workers 0,1 2,-\n", "", r"^line 1, column 1: expected a line 'workers 0,1 2,-' behind the header"),
        (
            "workers 0,1 2,-",
            "workers 0,1 2,x",
            r"^line 2, column 1: 'workers 0,1 2,x': expected per replica the worker of each stage",
        ),
        (
            "workers 0,1 2,-",
            "workers 0,1,3 2,-,4",
            r"^line 2, column 1: replica 0 has 3 stages: expected 2, as the header says$",
        ),
        (
            "workers 0,1 2,-",
            "workers 0,1 2",
            r"^line 2, column 1: workers: replica 1 has 1 stages: expected 2, as replica 0 has$",
        ),
        (
            "workers 0,1 2,-",
            "workers 0,1 0,-",
            r"^line 2, column 1: workers: worker 0 is in the replicas 0 and 1: expected one$",
        ),
        ("route 1 1 by 2,1", "route 1 1 by", r"^line 5, column 1: 'route 1 1 by': expected a route such as"),
        ("route 1 1 by 2,1", "route 1 1-0 by 2,1", r"^line 5, column 1: .* expected microbatches in ascending order$"),
        (
            "route 1 1 by 2,1",
            "route 2 1 by 2,1",
            r"^line 2, column 1: route 2 1 by 2,1: replica 2 does not exist: expected 0\.\.1$",
        ),
        (
            "route 1 1 by 2,1",
            "route 1 3 by 2,1",
            r"^line 2, column 1: route 1 3 by 2,1: microbatch 3 does not exist: expected 0\.\.2$",
        ),
        (
            "route 1 1 by 2,1",
            "route 1 1 by 2",
            r"^line 2, column 1: route 1 1 by 2: 1 workers: expected one for each of 2 stages$",
        ),
        (
            "route 1 1 by 2,1",
            "route 1 1 by 2,0",
            r"^line 2, column 1: route 1 1 by 2,0: worker 0 does not have stage 1: expected one of 1$",
        ),
        ("route 1 1 by 2,1\n", "", r"^line 2, column 1: microbatch 1 of replica 1 has no route: expected exactly one$"),
        (
            "route 1 1 by",
            "route 1 0-1 by",
            r"^line 2, column 1: microbatch 0 of replica 1 takes two routes: route 1 0-2/2 by 2,1 and route 1 0-1 by",
        ),
        ("2: 1:0F0", "3: 1:0F0", r"^line 8, column 1: '3:': expected the line of worker 2 to start with '2:'$"),
        ("0: 0:0F0", "0: 0F0", r"^line 6, column 4: op '0F0': expected REPLICA:STAGE KIND MICROBATCH"),
        (TEXT[TEXT.index("2: 1:0F0") :], "", r"^line 1, column 1: 2 lines of ops: expected 3, one for each live worker$"),
    ],
)
def test_a_bad_text_of_version_2_is_refused_with_the_form_expected(old: str, new: str, message: str) -> None:
    assert old in TEXT
    with pytest.raises(ScheduleError, match=message):
        Program.parse(TEXT.replace(old, new))


def test_each_worker_has_an_order_of_ops() -> None:
    with pytest.raises(ScheduleError, match=r"^3 op sequences: expected 2, one for each worker 0\.\.1$"):
        Program("x", Routing.healthy(1, 2, 1), ((), (), ()))


def test_one_pipeline_is_a_job_of_one_replica() -> None:
    routing = Routing.of_pipeline((1, 0, 1), 3)
    assert routing == Routing.at_home((1, 0, 1), 1, 3)
    assert routing is Routing.of_pipeline((1, 0, 1), 3), "programs compare and hash it often"
    assert (routing.placement, routing.live, routing.replicas) == ((1, 0, 1), (0, 1), 1)
    assert [routing.holder(0, stage, 2) for stage in range(3)] == [1, 0, 1]
    assert not any(list(routing.away(stage)) for stage in range(3))
    assert routing.is_one_pipeline and not Routing.healthy(2, 3, 3).is_one_pipeline
    gap = Routing.of_paths(((0, 2),), [[(0, 2)] * 3])
    assert gap.stays_at_home and not gap.is_one_pipeline, "worker 1 is no rank of it"


def test_a_program_of_one_replica_is_printed_as_one_pipeline() -> None:
    text = "schedule x placement=0,1 microbatches=1\n0: 0F0 0B0 0REDUCE 0STEP\n1: 1F0 1B0 1REDUCE 1STEP\n"
    routed = (
        "schedule x version=2 stages=2 microbatches=1\nworkers 0,1\nroute 0 0 by 0,1\n"
        "0: 0:0F0 0:0B0 0REDUCE 0STEP\n1: 0:1F0 0:1B0 1REDUCE 1STEP\n"
    )
    program = Program.parse(routed)
    verify(program)
    assert program == Program.parse(text) and str(program) == text
    assert [one.replica for order in program.orders for one in order] == [0] * 8


def test_only_one_pipeline_is_accepted_where_replicas_have_no_meaning() -> None:
    with pytest.raises(ScheduleError, match=r"^adapt-order: rerouted has 2 replicas: expected a program of one pipeline$"):
        Program.parse(TEXT).require_one_pipeline("adapt-order")
