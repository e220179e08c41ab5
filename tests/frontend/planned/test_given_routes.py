"""A program of several replicas that this job can't run is refused before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from chained import compile_example
from errors_table import check_documented
from models import EXAMPLES

import adaptra
from adaptra.errors import AdaptraError, OptionError, PlanError
from adaptra.frontend.planned.given_routes import routed_plan
from adaptra.graph import CompiledStages
from adaptra.passes.insert_comm import InsertComm
from adaptra.planning.routes.job_planner import plan_job
from adaptra.program import Program
from adaptra.program.routing import Routing
from adaptra.simulation.case import Case
from adaptra.simulation.cost import CostModel

ADAPTS = "schedule … with routes and adapt=True: expected adapt=False, as routes are followed and not changed"
OTHER = (
    "schedule …: … replicas of … stages, … microbatches, and workers as its second line says: expected …, …, …, and 'workers …'"
)
LOWERED = "schedule …: it has SEND and RECV ops: expected compute ops, REDUCE and STEP only"
TIED = (
    "schedule …: microbatch … of replica … leaves its home on stage …, which shares … with another stage, and its rank has "
    "several stages: expected routes that keep it at home, or one stage per rank"
)
OUT_OF_ORDER = (
    "schedule …: forwards change … and run in microbatch order over all workers: expected orders that allow it, "
    "but …: deadlock: …"
)
TOO_MANY = "schedule …: worker … holds … microbatches, with those of other replicas: expected at most …, as memory= allows"

CASE = Case(CostModel.uniform(2, 1.0, 1.0, 1.0), 4, (0, 1))
ROWS = ((0, 1), (2, 3))


def program(away: Sequence[int] = (1,), stage: int = 1, case: Case = CASE) -> Program:
    """Replica 0's worker computes these microbatches of replica 1 on a stage."""
    path = (0, 3) if stage == 0 else (2, 1)
    paths = [[(0, 1)] * 4, [path if number in away else (2, 3) for number in range(4)]]
    return plan_job(case.of_replicas(2), routing=Routing.of_paths(ROWS, paths))


V_SHAPED = Case(CostModel.uniform(4, 1.0, 1.0, 1.0), 4, (0, 1, 1, 0))


def v_shaped(stages: Sequence[int] = (1, 2)) -> Program:
    """The other replica's worker computes these stages of some microbatches, in an order in which all may change buffers."""
    path = tuple((0, 1, 1, 0)[stage] if stage in stages else (2, 3, 3, 2)[stage] for stage in range(4))
    paths = [[(0, 1, 1, 0)] * 4, [(2, 3, 3, 2), path, path, (2, 3, 3, 2)]]
    case = replace(V_SHAPED.of_replicas(2), changing=frozenset(range(4)))
    return plan_job(case, routing=Routing.of_paths(((0, 1, 1, 0), (2, 3, 3, 2)), paths))


TWO = replace(CASE, microbatches=2)
CROSSED = """
schedule crossed version=2 stages=2 microbatches=2
workers 0,1 2,3
route 0 0 by 2,1
route 0 1 by 0,1
route 1 0 by 0,3
route 1 1 by 2,3
0: 0:0F1 1:0F0 1:0I0 1:0W0 0:0I1 0:0W1
1: 0:1F0 0:1I0 0:1W0 0:1F1 0:1I1 0:1W1
2: 1:0F1 0:0F0 0:0I0 0:0W0 1:0I1 1:0W1
3: 1:1F0 1:1I0 1:1W0 1:1F1 1:1I1 1:1W1
"""
"""Each first worker computes its own second microbatch before the other replica's first one."""


def compiled(name: str = "skip_mlp", stages: int = 2) -> CompiledStages:
    example = EXAMPLES[name]
    return compile_example(example, example.make(), example.rows(2, 0), stages)


def plan(given: Program, *, name: str = "skip_mlp", case: Case = CASE, replicas: int = 2, **options: object) -> None:
    chosen: dict[str, object] = {"adapt": False, "schedule": given, **options}
    stages = compiled(name, given.stages)
    routed_plan(given, case, replicas, stages, adaptra.Options(**chosen))  # pyright: ignore[reportArgumentType]


REFUSED: dict[str, tuple[type[AdaptraError], Callable[[], object]]] = {
    ADAPTS: (OptionError, lambda: plan(program(), adapt=True)),
    OTHER: (PlanError, lambda: plan(program(), replicas=3)),
    LOWERED: (PlanError, lambda: plan(InsertComm().apply(program(), CASE.cost))),
    TIED: (PlanError, lambda: plan(v_shaped(stages=(0, 3)), name="gpt_tied", case=V_SHAPED)),
    OUT_OF_ORDER: (PlanError, lambda: plan(Program.parse(CROSSED), name="resnet", case=TWO)),
    TOO_MANY: (
        PlanError,
        lambda: plan(program(away=(1, 2)), case=replace(CASE, cost=CASE.cost.limited((1.0, 1.0)))),
    ),
}


@pytest.mark.parametrize("row", REFUSED)
def test_what_a_job_can_not_run_is_refused(row: str) -> None:
    kind, run = REFUSED[row]
    with pytest.raises(kind) as refused:
        run()
    check_documented(kind.__name__, str(refused.value), row)


def test_a_program_that_fits_is_taken_with_its_period() -> None:
    given = program(away=(0, 3))
    found = routed_plan(given, CASE, 2, compiled(), adaptra.Options(adapt=False, schedule=given))
    assert (found.program, found.version) == (given, 0)
    assert found.bound <= found.predicted


def test_the_delegate_takes_over_edges_from_the_start() -> None:
    given = program()
    options = adaptra.Options(adapt=False, schedule=given, delegate=[(0, 1)])
    assert routed_plan(given, CASE, 2, compiled(), options).delegated == ((0, 1),)


def test_stages_that_change_no_buffer_may_run_in_any_order() -> None:
    plan(Program.parse(CROSSED), case=TWO)
    plan(v_shaped(), case=V_SHAPED)


def test_stages_that_change_buffers_or_share_weights_are_routed() -> None:
    plan(program(stage=0), name="resnet")
    plan(v_shaped(), name="resnet", case=V_SHAPED)
    plan(program(), name="gpt_tied")


GIVEN_AWAY = """
schedule away version=2 stages=2 microbatches=2
workers 0,1 2,3
route 0 0-1 by 0,1
route 1 0-1 by 2,1
0: 0:0F0 0:0F1 0:0I0 0:0W0 0:0I1 0:0W1
1: 0:1F0 0:1F1 1:1F0 1:1F1 0:1I0 0:1W0 0:1I1 0:1W1 1:1I0 1:1W0 1:1I1 1:1W1
2: 1:0F0 1:0F1 1:0I0 1:0W0 1:0I1 1:0W1
3:
"""
EXCHANGED = """
schedule exchanged version=2 stages=2 microbatches=2
workers 0,1 2,3
route 0 0-1 by 0,3
route 1 0-1 by 2,1
0: 0:0F0 0:0F1 0:0I0 0:0W0 0:0I1 0:0W1
1: 1:1F0 1:1F1 1:1I0 1:1W0 1:1I1 1:1W1
2: 1:0F0 1:0F1 1:0I0 1:0W0 1:0I1 1:0W1
3: 0:1F0 0:1F1 0:1I0 0:1W0 0:1I1 0:1W1
"""


def test_a_worker_holds_the_microbatches_that_it_computes_whosever_they_are() -> None:
    limited = replace(TWO, cost=TWO.cost.limited((2.0, 2.0)))
    plan(Program.parse(EXCHANGED), case=limited)
    with pytest.raises(PlanError, match=r"worker 0\.1 holds 4 microbatches, .* expected at most 2"):
        plan(Program.parse(GIVEN_AWAY), case=limited)
    with pytest.raises(PlanError, match=r"worker 0\.0 holds 2 microbatches, .* expected at most 1"):
        plan(Program.parse(EXCHANGED), case=replace(TWO, cost=TWO.cost.limited((1.0, 1.0))))
