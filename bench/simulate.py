"""How fast the simulator is: ZB-H1 programs from 4 stages x 8 microbatches to 256 x 2048.

Rows named "whole call" are simulation.simulate, from a Python program to its figures; "converted" and "simulated" are
the two parts of it. The baseline is an event-driven simulation in plain Python (in this file; the same makespan, checked). In
the rows named "torch" it is torch.distributed.pipelining's own simulator of a quarter of the microbatches, which counts steps
and knows no times.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Any

from _table import Row, median_seconds, parser, print_rows

from adaptra import _C
from adaptra.program import Kind, Program
from adaptra.program.schedules import generate
from adaptra.simulation.cost import CostModel
from adaptra.simulation.job import pipeline_of
from adaptra.simulation.simulate import simulate

SIZES = [(4, 8), (8, 32), (16, 64), (32, 256), (64, 512), (256, 2048)]
TORCH_SIZES = [(8, 32), (16, 64), (64, 512)]
SLOWEST_BASELINE = 200_000
"""The most ops for which the plain-Python baseline is run."""


def simulate_in_python(program: Program, cost: CostModel) -> float:
    """The makespan of a program with one stage per rank, event by event: full duplex, communication that does not block."""
    stages, orders = program.stages, program.orders
    there: dict[tuple[int, bool], set[int]] = {(s, forward): set() for s in range(stages) for forward in (True, False)}
    there[0, True] = set(range(program.microbatches))
    position, running = [0] * stages, [False] * stages
    free = dict.fromkeys(there, 0.0)
    events: list[tuple[float, int, int, bool, int]] = []
    makespan, number = 0.0, 0

    def begin(stage: int, now: float) -> None:
        nonlocal number
        if running[stage] or position[stage] == len(orders[stage]):
            return
        op = orders[stage][position[stage]]
        if op.kind is not Kind.W and op.microbatch not in there[stage, op.kind is Kind.F]:
            return
        running[stage], number = True, number + 1
        heapq.heappush(events, (now + cost.duration(stage, op.kind), number, stage, False, -1))

    for stage in range(stages):
        begin(stage, 0.0)
    while events:
        now, _, stage, forward, microbatch = heapq.heappop(events)
        if microbatch >= 0:
            there[stage, forward].add(microbatch)
            begin(stage, now)
            continue
        makespan = max(makespan, now)
        op = orders[stage][position[stage]]
        running[stage] = False
        position[stage] += 1
        forward = op.kind is Kind.F
        to = stage + 1 if forward else stage - 1
        if forward and to == stages:
            there[stage, False].add(op.microbatch)
        elif op.kind is not Kind.W and to >= 0:
            edge = min(stage, to)
            occupancy = cost.occupancy_forward if forward else cost.occupancy_backward
            latency = cost.latency_forward if forward else cost.latency_backward
            free[to, forward] = max(now, free[to, forward]) + occupancy[edge]
            number += 1
            heapq.heappush(events, (free[to, forward] + latency[edge], number, to, forward, op.microbatch))
        begin(stage, now)
    return makespan


def measure(runs: int) -> Iterator[Row]:
    """Our rows beside plain Python."""
    for stages, microbatches in SIZES:
        program = generate("zb_h1", stages, microbatches)
        cost = CostModel.uniform(stages, 10, 11, 5, latency=3, occupancy=1)
        ops = sum(map(len, program.orders))
        size = f"{stages} × {microbatches} ({ops:,} ops)"
        baseline = None
        if ops <= SLOWEST_BASELINE:
            if simulate_in_python(program, cost) != simulate(program, cost).makespan:
                raise AssertionError(f"{size}: the baseline finds another makespan")
            baseline = 1e3 * median_seconds(min(runs, 3), lambda p=program, c=cost: simulate_in_python(p, c))
        orders, problem = _C.to_orders(program.orders), pipeline_of(program, cost)
        whole = median_seconds(runs, lambda p=program, c=cost: simulate(p, c))
        converted = median_seconds(runs, lambda p=program: _C.to_orders(p.orders))
        simulated = median_seconds(runs, lambda p=problem, o=orders: _C.simulate(p, o, 1))
        yield Row(f"{size}: whole call", 1e3 * whole, baseline, "ms", runs)
        yield Row(f"{size}: converted", 1e3 * converted, None, "ms", runs)
        yield Row(f"{size}: simulated", 1e3 * simulated, None, "ms", runs)


def measure_torch() -> Iterator[Row]:
    """Our rows beside torch's simulator of a quarter of the microbatches."""
    from torch.distributed.pipelining import schedules as torch_schedules

    for stages, microbatches in TORCH_SIZES:
        program = generate("zb_h1", stages, microbatches)
        cost = CostModel.uniform(stages, 10, 11, 5)
        quarter = generate("zb_h1", stages, microbatches // 4)
        actions: Any = {
            rank: [torch_schedules._Action.from_str(str(op)) for op in order] for rank, order in enumerate(quarter.orders)
        }
        lowered = torch_schedules._add_send_recv(actions, lambda stage: stage, stages)
        theirs = median_seconds(
            1, lambda given=lowered, count=stages: torch_schedules._simulate_comms_compute(given, lambda stage: stage, count)
        )
        ours = median_seconds(5, lambda p=program, c=cost: simulate(p, c))
        name = f"{stages} × {microbatches}, torch: {stages} × {microbatches // 4}"
        yield Row(name, 1e3 * ours, 1e3 * theirs, "ms", 1)


def main() -> None:
    """Measure and print."""
    arguments = parser(__doc__ or "")
    arguments.add_argument("--runs", type=int, default=7, help="how often each of our rows is measured (the median counts)")
    arguments.add_argument("--no-torch", action="store_true", help="leave out the rows that need torch")
    given = arguments.parse_args()
    rows = list(measure(given.runs))
    if not given.no_torch:
        rows += measure_torch()
    print_rows("Simulating a ZB-H1 step", rows, baseline="plain Python, or torch", as_json=given.json)


if __name__ == "__main__":
    main()
