"""Plans around lost and slow workers and narrow links, beside published figures and bounds.

ReCycle's unit cases have F, I and W of 1, an optimizer of 3, and twice as many microbatches in memory as stages. Random cases
have unequal F, I and W and one to three lost workers. A plan is good if its period is within 1 % of its bound.
``--exact SECONDS`` (extra exact) also compares with what the exact solver finds in that time, where a plan is more than 1 %
above its bound. A second set of random cases also has latency and a slow worker. Running jobs, whose replicas measure costs
with noise, compare what they can do within four budgets.

``--judge FILE`` compares period, first step and memory of random programs with another simulator. It is run as
``FILE CASE PROGRAM`` and prints a JSON object with ``period``, ``makespan`` and ``peak``.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from _table import Row, parser, print_rows

from adaptra.planning.planner import plan
from adaptra.planning.remedies.job_remedies import compare_remedies
from adaptra.planning.responses.recut import recuts
from adaptra.planning.responses.resilience import Resilience
from adaptra.planning.responses.responses import ResponseKind, ResponsePrices
from adaptra.planning.routes.job_planner import plan_job
from adaptra.planning.routes.joined_programs import join
from adaptra.planning.routes.large_jobs import plan_large
from adaptra.planning.routes.measured_jobs import UpdateSeconds, measured_case
from adaptra.planning.routes.period_bound import flow_bound, period_bound
from adaptra.program import Program
from adaptra.simulation.case import Case, WorkerLink
from adaptra.simulation.case_files import case_to_json
from adaptra.simulation.cost import CostModel
from adaptra.simulation.simulate import simulate

Lost = tuple[tuple[int, int], ...]

UNIT_CASES: tuple[tuple[int, int, int, Lost], ...] = (
    (3, 4, 6, ((1, 2),)),
    (3, 4, 4, ((1, 2),)),
    (3, 4, 5, ((1, 2),)),
    (3, 4, 7, ((1, 2),)),
    (3, 4, 8, ((1, 2),)),
    (3, 4, 10, ((1, 2),)),
    (3, 4, 6, ((1, 0),)),
    (3, 4, 6, ((1, 1),)),
    (3, 4, 6, ((1, 3),)),
    (3, 4, 6, ((0, 1), (1, 2))),
    (3, 4, 6, ((0, 2), (1, 2))),
    (2, 4, 3, ((1, 2),)),
    (2, 4, 4, ((1, 2),)),
    (4, 4, 8, ((1, 2),)),
    (6, 4, 8, ((0, 0),)),
    (6, 4, 8, ((0, 0), (1, 1), (2, 2), (3, 3))),
    (6, 4, 8, ((0, 0), (1, 1), (2, 2), (3, 3), (4, 3))),
    (6, 4, 16, ((0, 2),)),
    (6, 4, 16, ((0, 0), (1, 1), (2, 2), (3, 3))),
    (8, 8, 16, ((0, 3),)),
    (8, 8, 64, ((0, 3),)),
    (4, 2, 8, ((0, 0),)),
)
"""Replicas, stages, microbatches, and the lost workers as (replica, stage)."""


def unit_case(replicas: int, stages: int, microbatches: int, lost: Lost = (), optimizer: float = 3.0) -> Case:
    """A case of F, I and W of 1, with twice as many microbatches in memory as stages."""
    pipeline = Case(CostModel.uniform(stages, 1, 1, 1), microbatches, tuple(range(stages)))
    job = pipeline.of_replicas(replicas, optimizer)
    return replace(job, lost=frozenset(job.worker(*one) for one in lost), memory=(2 * stages,) * stages, hands_over=False)


def random_cases(count: int, seed: int, *, late: bool = False) -> Iterator[Case]:
    """Yield cases of at most 24 workers with unequal F, I and W and one to three lost workers.

    With ``late``, messages take a latency as well, and one worker is slow.
    """
    rng = random.Random(seed)
    while count:
        replicas, stages = rng.randint(2, 6), rng.randint(2, 6)
        microbatches = rng.choice([stages, stages + 1, 2 * stages, 2 * stages + 1, 3 * stages, 3 * stages + 2, 4 * stages])
        cost = CostModel.uniform(stages, rng.randint(1, 4), rng.randint(1, 4), rng.randint(1, 4))
        lost = frozenset(rng.randrange(replicas * stages) for _ in range(rng.randint(1, 3)))
        optimizer = float(rng.randint(0, 4))
        columns = [{replica * stages + stage for replica in range(replicas)} for stage in range(stages)]
        if replicas * stages > 24 or any(column <= lost for column in columns):
            continue
        job = Case(cost, microbatches, tuple(range(stages))).of_replicas(replicas, optimizer)
        job = replace(job, lost=lost, memory=(2 * stages,) * stages, hands_over=False)
        if late:
            latency = (float(rng.randint(1, 8)),) * (stages - 1)
            cost = replace(cost, latency_forward=latency, latency_backward=latency)
            job = replace(job, cost=cost, slow={rng.choice(sorted({*range(job.workers)} - lost)): float(rng.randint(2, 3))})
        yield job
        count -= 1


def planned(case: Case, budget: float) -> tuple[Program, float, float]:
    """The plan, its period, and the bound that no order beats."""
    program = plan_job(case, budget=budget)
    return program, simulate(program, case).period, period_bound(case, program.routing).value


def published_rows(budget: float) -> Iterator[Row]:
    """Yield the rows of ReCycle's cases and of slow workers."""
    yield Row("3×4, 6 microbatches, healthy: period", planned(unit_case(3, 4, 6), budget)[1], 22.0, "units", 1)
    yield Row("the same, one worker lost", planned(unit_case(3, 4, 6, ((1, 2),)), budget)[1], 30.0, "units", 1)
    for name, lost, bar in (("healthy", (), 24.0), ("one worker lost", ((1, 2),), 32.0)):
        case = replace(unit_case(3, 4, 6, lost), barrier=True)
        yield Row(f"the same behind a barrier, {name}", planned(case, budget)[1], bar, "units", 1)
    solved = replace(unit_case(2, 6, 4, ((0, 0), (1, 2), (1, 5)), 0.0), cost=CostModel.uniform(6, 2, 2, 1))
    yield Row("2×6, 4 microbatches, three lost, F and I of 2: period", planned(solved, budget)[1], 53.0, "units", 1)
    missed = 0
    for replicas, stages, microbatches, lost in UNIT_CASES:
        _, period, bound = planned(unit_case(replicas, stages, microbatches, lost), budget)
        missed += period > bound * (1 + 1e-9)
    yield Row(f"unit cases above the bound, of {len(UNIT_CASES)}", missed, 0.0, "cases", len(UNIT_CASES))
    for replicas, stages, microbatches, bar in ((4, 4, 8, 1.25), (8, 4, 16, 1.125)):
        for hands_over in (False, True):
            case = replace(unit_case(replicas, stages, microbatches, optimizer=0.0), hands_over=hands_over)
            slow = replace(case, slow={case.worker(1, 2): 2.0})
            ratio = planned(slow, budget)[1] / planned(case, budget)[1]
            how = "accumulator handed over" if hands_over else "own accumulators"
            yield Row(f"{replicas}×{stages}, one worker 2× slow, {how}: period ÷ healthy", ratio, bar, "", 1)


def port_rows(budget: float) -> Iterator[Row]:
    """Yield the rows of a worker at whose port a message takes a few forwards: at most one and a half, two, three or six."""
    for replicas, stages, microbatches, stage, port in (
        (2, 2, 16, 0, 6.0),
        (2, 4, 16, 1, 6.0),
        (2, 4, 16, 3, 6.0),
        (3, 4, 12, 1, 2.0),
        (4, 4, 16, 0, 6.0),
        (4, 4, 16, 1, 1.5),
        (4, 4, 16, 2, 6.0),
        (2, 6, 24, 3, 3.0),
    ):
        pipeline = Case(CostModel.uniform(stages, 1, 1, 1, occupancy=0.2), microbatches, tuple(range(stages)))
        case = replace(pipeline.of_replicas(replicas), hands_over=False)
        case = replace(case, ports={case.worker(0, stage): port})
        ratio = planned(case, 4 * budget)[1] / flow_bound(case).value
        name = f"{replicas}×{stages}, {microbatches} microbatches, a port of {port:g} at stage {stage}: period ÷ flow bound"
        yield Row(name, ratio, 1.1, "", 1)


def narrow_rows(budget: float) -> Iterator[Row]:
    """Yield the rows of links over which a message takes six forwards, and of such that are busy for less than the period."""
    for replicas, stages, links, occupancy in ((2, 2, 1, 6.0), (2, 4, 1, 6.0), (4, 4, 3, 6.0), (2, 4, 1, 3.0), (4, 4, 3, 2.5)):
        pipeline = Case(CostModel.uniform(stages, 1, 1, 1, occupancy=0.2), 16, tuple(range(stages)))
        case = replace(pipeline.of_replicas(replicas), hands_over=False)
        edge = stages // 2 - 1
        ends = [(case.worker(replica, edge), case.worker(replica, edge + 1)) for replica in range(links)]
        slow = replace(case, links={both: WorkerLink(0.0, occupancy) for one in ends for both in (one, one[::-1])})
        ratio = planned(slow, 4 * budget)[1] / planned(case, budget)[1]
        name = f"{replicas}×{stages}, {links} narrow links of one edge, {occupancy:g} a message"
        yield Row(f"{name}: period ÷ healthy", ratio, 1.05, "", 1)


def large_rows() -> Iterator[Row]:
    """Yield the rows of 1,504 workers with one to sixteen lost ones."""
    case = unit_case(188, 8, 64)
    healthy = planned(case, 1.0)[1]
    for count in (1, 4, 16):
        lost = replace(case, lost=frozenset(3 + (case.stages + 1) * number for number in range(count)))
        started = time.perf_counter()
        program = plan_job(lost, budget=1.0)
        seconds = time.perf_counter() - started
        limit = (case.workers - count) / case.workers
        throughput = healthy / simulate(program, lost).period
        name = f"1,504 workers, {count} lost"
        yield Row(f"{name}: throughput ÷ that of the workers left", throughput / limit, 0.985, "", 1)
        yield Row(f"{name}: seconds to plan", seconds, None, "s", 1)


def huge_rows(budget: float) -> Iterator[Row]:
    """Yield the rows of 9,984 workers with one to sixteen lost ones. Seconds are of the wall clock."""
    case = unit_case(156, 64, 256)
    healthy = plan_large(case)
    assert healthy is not None
    for count in (1, 4, 16):
        lost = replace(case, lost=frozenset((7 * one % 156) * 64 + (5 * one + 3) % 64 for one in range(count)))
        started = time.perf_counter()
        first = plan_large(lost)
        seconds = time.perf_counter() - started
        started = time.perf_counter()
        best = plan_large(lost, budget=budget)
        total = time.perf_counter() - started
        assert first is not None and best is not None
        limit = (case.workers - count) / case.workers
        name = f"9,984 workers, {count} lost"
        yield Row(f"{name}: seconds to the first plan", seconds, 0.5, "s", 1)
        yield Row(f"{name}: its throughput ÷ that of the workers left", healthy.period / first.period / limit, None, "", 1)
        yield Row(f"{name}: seconds to the best plan", total, 3.0, "s", 1)
        yield Row(f"{name}: its throughput ÷ that of the workers left", healthy.period / best.period / limit, 0.985, "", 1)


def recut_rows(budget: float) -> Iterator[Row]:
    """Yield the rows of re-cuts. Memory is that in which twice as many microbatches as stages fit after the re-cut."""
    for replicas, stages, microbatches, lost, pieces, bar in (
        (3, 4, 6, (1, 2), 12, 0.86),
        (6, 4, 16, (0, 2), 12, 0.92),
        (3, 4, 6, (1, 2), 96, None),
        (6, 4, 16, (0, 2), 96, None),
    ):
        healthy = planned(unit_case(replicas, stages, microbatches), budget)[1]
        case = unit_case(replicas, stages, microbatches, (lost,))
        cuts = [replace(one.case, memory=case.memory) for one in recuts(case, pieces)]
        throughput = healthy / min(planned(cut, budget)[1] for cut in cuts)
        name = f"{replicas}×{stages}, one lost, re-cut at {pieces} pieces a stage: throughput ÷ "
        if bar is not None:
            yield Row(f"{name}healthy", throughput, bar, "", 1)
            yield Row(f"{replicas}×{stages}, one lost, rerouted: the same", healthy / planned(case, budget)[1], None, "", 1)
        else:
            yield Row(f"{name}that of the workers left", throughput * case.workers / (case.workers - 1), 0.98, "", 1)


def resilience_rows(budget: float) -> Iterator[Row]:
    """Yield the rows of 1,504 workers with one to sixteen lost ones where they cost least, and of a week of failures."""
    started = time.process_time()
    job = Resilience(unit_case(188, 8, 64), ResponsePrices(), budget=budget)
    rows = list(job.rows(16))
    worst = min(row["of_limit"] for row in rows)
    yield Row("1,504 workers, 1 to 16 lost: least throughput ÷ that of the workers left", worst, 0.985, "", len(rows))
    shrunk = next(one for one in job.decision(16).responses if one.kind is ResponseKind.SHRINK)
    left = (job.case.workers - 16) / job.case.workers
    without = job.decision(16).healthy_period / (shrunk.period or 1) / left
    yield Row("the same, 16 lost, without their replicas", without, None, "", 1)
    yield Row("the same, 17 decisions: processor seconds", time.process_time() - started, None, "s", 1)


def remedy_rows(budget: float) -> Iterator[Row]:
    """Yield the rows of what a running job does, from costs that its replicas measure with a noise of 2 %."""
    chance = random.Random(1)
    names = ("forward", "input_grad", "weight_grad", "occupancy_forward", "occupancy_backward")

    def noisy(cost: CostModel) -> CostModel:
        return replace(cost, **{one: tuple(value * chance.gauss(1, 0.02) for value in getattr(cost, one)) for one in names})

    def case_of(costs: Iterable[CostModel], microbatches: int, stages: int) -> Case:
        return measured_case(list(costs), microbatches, UpdateSeconds((0.02,) * stages, (0.02,) * stages, 0.02))

    for name, replicas, stages, microbatches, many, bar in (
        ("one worker 2× slow", 4, 4, 8, 1, 1.30),
        ("one narrow edge, 6 forwards a message", 2, 2, 16, 1, 1.10),
        ("3 of 4 links narrow", 4, 4, 8, 3, 1.10),
        ("one of 24 workers 2× slow", 6, 4, 8, 1, 1.30),
    ):
        even = CostModel.uniform(stages, 0.04, 0.04, 0.04, occupancy=0.03)
        ends = (stages // 2 - 1, stages // 2), (stages // 2, stages // 2 - 1)
        hurt = even.with_stage(1, 0.08, 0.08, 0.08) if "slow" in name else even.with_occupancies(ends, 8)
        costs = [hurt if 0 < replica <= many else even for replica in range(replicas)]
        pipeline = Case(even, microbatches, tuple(range(stages)))
        healthy = case_of([even] * replicas, microbatches, stages)
        running = compare_remedies(healthy, join([plan(pipeline, budget=budget)] * replicas)).best
        started = time.process_time()
        found = compare_remedies(case_of(map(noisy, costs), microbatches, stages), running.program, budget=4 * budget)
        seconds = time.process_time() - started
        period = simulate(found.best.program, case_of(costs, microbatches, stages)).period
        where = f"{replicas}×{stages}, {name}: {found.best.kind.value}"
        yield Row(f"{where}: period ÷ healthy", period / running.period, bar, "", 1)
        yield Row(f"{where}: processor seconds to compare", seconds, 0.3, "s", 1)


def random_rows(what: str, cases: Iterable[Case], budget: float, exact: float) -> Iterator[Row]:
    """Yield the rows of random cases."""
    ratios: list[float] = []
    seconds: list[float] = []
    for case in cases:
        started = time.perf_counter()
        program, period, best = planned(case, budget)
        seconds.append(time.perf_counter() - started)
        if exact > 0 and period > 1.01 * best:
            from _exact_period import exact_period

            found = exact_period(case, program, exact, best, period)
            best = max(best, min(period, found.period)) if found is not None else period
        ratios.append(period / best)
    count = len(ratios)
    beyond = "the bound or the exact solver" if exact > 0 else "the bound"
    yield Row(f"{what} more than 1 % above {beyond}", sum(r > 1.01 for r in ratios), 0.05 * count, "cases", count)
    yield Row("the worst of them, ÷ that", max(ratios), 1.03, "", count)
    yield Row("slowest plan", max(seconds), 0.05, "s", count)


def judged_rows(judge: str, count: int) -> Iterator[Row]:
    """Yield the row of random programs that another simulator times otherwise."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests/support"))
    from jobs import random_case, random_job_program

    differing = 0
    with tempfile.TemporaryDirectory() as folder:
        files = Path(folder, "case.json"), Path(folder, "program.sched")
        for seed in range(count):
            case = random_case(seed)
            case = replace(case, cost=replace(case.cost, latency_backward=case.cost.latency_forward))
            program = random_job_program(case, seed)
            fields = {name: value for name, value in case_to_json(case).items() if name in _JUDGED}
            files[0].write_text(json.dumps(fields | {"c": (*case.cost.latency_forward, 0.0)[0]}))
            files[1].write_text(str(program))
            shown = subprocess.run(
                [sys.executable, judge, *map(str, files)], capture_output=True, text=True, check=False
            ).stdout
            theirs, ours = json.loads(shown), simulate(program, case)
            same = (theirs.get("period"), theirs.get("makespan"), theirs.get("peak"))
            differing += same != (ours.period, ours.makespan, max(ours.held))
    yield Row("random programs that the judge times otherwise", differing, 0.0, "programs", count)


_JUDGED = {"S", "M", "P", "t_f", "t_i", "t_w", "t_opt", "t_reduce", "slow", "handover", "fold"}


def main() -> int:
    """Measure and print."""
    arguments = parser(__doc__)
    arguments.add_argument("--random", type=int, default=400, help="random cases; 0 for none")
    arguments.add_argument("--seed", type=int, default=7, help="of the random cases")
    arguments.add_argument("--budget", type=float, default=0.05, help="seconds per plan")
    arguments.add_argument("--exact", type=float, default=0.0, help="seconds of the exact solver for each case above the bound")
    arguments.add_argument("--large", action="store_true", help="1,504 and 9,984 workers as well")
    arguments.add_argument("--judge", metavar="FILE", help="another simulator to agree with")
    arguments.add_argument("--programs", type=int, default=1000, help="random programs for --judge")
    given = arguments.parse_args()
    rows = [
        *published_rows(given.budget),
        *narrow_rows(given.budget),
        *port_rows(given.budget),
        *recut_rows(given.budget),
        *remedy_rows(given.budget),
    ]
    if given.random > 0:
        lost = random_cases(given.random, given.seed)
        late = random_cases(max(given.random // 8, 1), given.seed, late=True)
        rows += random_rows("random cases", lost, given.budget, given.exact)
        rows += random_rows("with latency and a slow worker,", late, given.budget, given.exact)
    if given.large:
        rows += [*large_rows(), *huge_rows(2.0), *resilience_rows(1.0)]
    if given.judge is not None:
        rows += judged_rows(given.judge, given.programs)
    print_rows("plans around lost and slow workers", rows, baseline="bar", as_json=given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
