"""What a rank takes to make, read, verify and lower a plan after a worker is lost.

Plans are made for random losses of up to two of at most 32 workers, with uneven ops. Their periods stand beside the flow bound,
which no routing can go below, and which few microbatches may not reach either.

Reading and lowering are timed on the rank that takes longest, as a running job does them. The baseline reads, verifies and
lowers the whole program in Python, as each rank did before. Both post receives ahead, as gloo needs it. Times are processor
time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain
from random import Random

from _table import Row, parser, print_rows

from adaptra.frontend.planned.given_routes import EFFORT
from adaptra.passes import InsertComm
from adaptra.passes.insert_crossing import InsertCrossing
from adaptra.planning.routes.job_planner import plan_job
from adaptra.planning.routes.period_bound import flow_bound
from adaptra.program import Kind, Op, Program
from adaptra.program.routing import Routing
from adaptra.program.transport_contract import Contract
from adaptra.program.verify import verify
from adaptra.runtime.control.plans.plan import Plan
from adaptra.runtime.worker.step.lowering import Lowering
from adaptra.simulation.case import Case
from adaptra.simulation.cost import CostModel
from adaptra.simulation.simulate import simulate, verify_whole

JOBS = ((4, 8, 32, 20.0), (8, 8, 32, 40.0))
"""Replicas, stages, microbatches, and the bar in milliseconds."""
GRIDS = ((2, 2), (2, 4), (2, 8), (3, 2), (3, 4), (3, 8), (4, 2), (4, 4), (4, 8))
"""Replicas and stages of jobs that lose a worker."""
GLOO = Contract(send_waits_for_receiver=True, in_order=False)


def random_losses(number: int) -> Iterator[Case]:
    """Cases in which guests have the workers of lost processes."""
    random = Random(5)
    for _ in range(number):
        replicas, stages = random.choice(GRIDS)
        ops = [tuple(random.uniform(*of) for _ in range(stages)) for of in ((0.7, 1.3), (0.7, 1.5), (0.5, 1.2))]
        cost = replace(CostModel.uniform(stages, 1.0, 1.0, 1.0), forward=ops[0], input_grad=ops[1], weight_grad=ops[2])
        lost = random.sample(range(stages), random.choice((1, 2)))
        guests = frozenset(stage + stages * random.randrange(replicas) for stage in lost)
        case = Case(cost, stages * random.choice((1, 2, 4)), tuple(range(stages))).of_replicas(replicas)
        yield replace(case, guests=guests)


def plans(number: int) -> Iterator[Row]:
    """The time that plans take, and how far their periods are from their bounds."""
    seconds: list[float] = []
    ratios: list[float] = []
    for case in random_losses(number):
        start = time.process_time()
        program = plan_job(case, effort=EFFORT)
        seconds.append((time.process_time() - start) * 1e3)
        ratios.append(simulate(program, case).period / flow_bound(case).value)
    yield Row("a plan at the loss, longest: the bar", max(seconds), 50.0, "ms", number)
    yield Row("its period to the flow bound, median: the bar", statistics.median(ratios), 1.03, "", number)
    yield Row("its period to the flow bound, longest: the bar", max(ratios), 1.03, "", number)
    within = sum(ratio <= 1.03 for ratio in ratios) / number
    yield Row("plans within 3 % of the flow bound", 100 * within, 100.0, "%", number)


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
    arguments.add_argument("--losses", type=int, default=100, help="random losses that are planned for (default 100)")
    given = arguments.parse_args()
    both = chain(plans(given.losses), rows(given.runs))
    print_rows("From a loss to a rank's order", both, baseline="whole program", as_json=given.json)


if __name__ == "__main__":
    main()
