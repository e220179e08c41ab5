"""What a rank takes to read, verify and lower a plan after a worker is lost.

Ours is what a running job does, on the rank that takes longest. The baseline reads, verifies and lowers the whole program in
Python, as each rank did before. Both post receives ahead, as gloo needs it. Times are processor time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from _table import Row, parser, print_rows

from adaptra.passes import InsertComm
from adaptra.passes.insert_crossing import InsertCrossing
from adaptra.planning.routes.job_planner import plan_job
from adaptra.program import Kind, Op, Program
from adaptra.program.routing import Routing
from adaptra.program.transport_contract import Contract
from adaptra.program.verify import verify
from adaptra.runtime.control.plans.plan import Plan
from adaptra.runtime.worker.step.lowering import Lowering
from adaptra.simulation.case import Case
from adaptra.simulation.cost import CostModel
from adaptra.simulation.simulate import verify_whole

JOBS = ((4, 8, 32, 20.0), (8, 8, 32, 40.0))
"""Replicas, stages, microbatches, and the bar in milliseconds."""
GLOO = Contract(send_waits_for_receiver=True, in_order=False)


def with_idle_worker(program: Program, case: Case) -> Program:
    """The program of a job whose lost worker is there again, has its stage and computes nothing."""
    (idle,) = case.lost
    grid = Routing.healthy(case.replicas, case.stages, case.microbatches).workers
    orders = list(program.orders)
    if any(op.kind.is_update for order in orders for op in order):
        stage, replica = idle % case.stages, idle // case.stages
        orders[idle] = tuple(Op(stage, kind, 0, None, replica) for kind in (Kind.REDUCE, Kind.STEP))
    return replace(program, routing=Routing(grid, program.routing.routes, case.microbatches), orders=tuple(orders))


def rank_alone(text: str, case: Case, rank: int) -> Program:
    """What a rank does: all of the program is verified, and the rank's own order lowered."""
    program = Program.parse(text)
    verify_whole(program)
    plan = Plan(1, program, case, 1.0, 1.0, "lost")
    return Lowering(GLOO, frozenset(), with_loss=True).of_plan(plan, program, rank)


def whole(text: str, case: Case) -> Program:
    """What each rank did: all of the program is verified and lowered."""
    program = Program.parse(text)
    verify(program)
    lowered = InsertComm.for_contract(GLOO).apply(program, case.cost)
    return InsertCrossing.for_contract(GLOO, ()).apply(lowered, case.cost)


def milliseconds(work: Callable[..., Program], *arguments: object) -> float:
    """The processor time of one run, which other work on the machine does not lengthen much."""
    start = time.process_time()
    work(*arguments)
    return (time.process_time() - start) * 1e3


def rows(runs: int) -> Iterator[Row]:
    """For each job one row beside the former way, and one beside its bar."""
    for replicas, stages, microbatches, bar in JOBS:
        cost = CostModel.uniform(stages, 1.0, 1.0, 1.0)
        case = Case(cost, microbatches, replicas=replicas, step=(3.0,) * stages, lost=frozenset({stages + 2}))
        planned = plan_job(case, effort=1)
        for what, program in (("one lost", planned), ("one idle", with_idle_worker(planned, case))):
            name = f"{replicas} × {stages}, {microbatches} microbatches, {what}"
            ours, former = times_of(program, Case(cost, microbatches), runs)
            yield Row(name, ours, former, "ms", runs)
            yield Row(f"{name}: the bar", ours, bar, "ms", runs)


def times_of(program: Program, one_replica: Case, runs: int) -> tuple[float, float]:
    """Milliseconds of the rank that takes longest, and of the whole program. Fails if an order differs from the whole one's."""
    text = str(program)
    everything = whole(text, one_replica)
    slowest, rank = 0.0, 0
    for worker in program.routing.live:
        assert rank_alone(text, one_replica, worker).orders[worker] == everything.orders[worker]
        slowest, rank = max((slowest, rank), (milliseconds(rank_alone, text, one_replica, worker), worker))
    pairs = [(milliseconds(rank_alone, text, one_replica, rank), milliseconds(whole, text, one_replica)) for _ in range(runs)]
    ours, former = map(statistics.median, zip(*pairs, strict=True))
    return ours, former


def main() -> None:
    """Print a row for each job."""
    arguments = parser(__doc__)
    arguments.add_argument("--runs", type=int, default=15, help="runs of each side, in turn (default 15)")
    given = arguments.parse_args()
    print_rows("From a plan's text to a rank's order", rows(given.runs), baseline="whole program", as_json=given.json)


if __name__ == "__main__":
    main()
