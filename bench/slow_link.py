"""Iteration time against the delay of one link: the schedules of today, and adaptra's plan for that delay.

Four ranks over gloo, every op padded to a stated duration (emulated devices). Fault injection delays the link between stages
1 and 2, the same for all. 1F1B is run as torch runs it, with I and W in one op. All schedules run on adaptra's runtime, so
the table shows what the order of ops is worth and nothing else. The baseline of each row is 1F1B at the same delay.

Steps follow each other as in training, so what is simulated and bounded is the period.
"""

from __future__ import annotations

import sys
from statistics import median
from typing import Any

import torch.distributed as dist
from _ranks import run_on_ranks, small_problem, timed_in_a_row
from _table import Row, parser, print_rows

import adaptra
from adaptra.planning.routes.steady_steps import PERIOD
from adaptra.program import Program
from adaptra.program.schedules import one_f_one_b
from adaptra.simulation.case import Case
from adaptra.simulation.cost import CostModel
from adaptra.simulation.simulate import simulate


def delayed(ranks: int, seconds: float, delay: float) -> CostModel:
    """Ops of ``seconds`` each, and ``delay`` seconds one way between stages 1 and 2."""
    cost = CostModel.uniform(ranks, seconds, seconds, seconds)
    return cost.with_latency(1, 2, delay).with_latency(2, 1, delay)


def programs(ranks: int, microbatches: int, in_flight: int, cost: CostModel) -> dict[str, Program]:
    """What is compared, by name."""
    case = Case(cost, microbatches, tuple(range(ranks)))
    return {
        "1f1b": one_f_one_b(ranks, microbatches, split=False),
        "zb_h1": adaptra.generate("zb_h1", ranks, microbatches),
        "zb_h2": adaptra.generate("zb_h2", ranks, microbatches),
        "adapted": PERIOD.plan(case, in_flight=in_flight),
    }


def measure(_rank: int, table: list[tuple[float, Program]], seconds: float, runs: int) -> list[float]:
    """One rank: the median step of every program at its delay, in seconds."""
    found: list[float] = []
    for delay, program in table:
        problem = small_problem(program.ranks, program.microbatches)
        options = adaptra.Options(
            adapt=False,
            schedule=program,
            emulate=adaptra.EmulatedDevice(seconds, seconds, seconds),
            faults=[f"delay 1-2 {1e3 * delay:g}ms"] if delay else [],
        )
        with adaptra.compile(**problem, options=options) as pipe:
            batch: Any = problem["example_inputs"]
            found.append(median(timed_in_a_row(lambda pipe=pipe, batch=batch: pipe.step(*batch), runs)))
        dist.barrier()
    return found


def main() -> int:
    """Start the ranks and print the table."""
    arguments = parser(__doc__)
    arguments.add_argument("--ranks", type=int, default=4)
    arguments.add_argument("--microbatches", type=int, default=16)
    arguments.add_argument(
        "--in-flight", type=int, default=10, help="most microbatches in flight per stage of the adapted plan"
    )
    arguments.add_argument("--op-ms", type=float, default=20.0, help="duration of every op, milliseconds")
    arguments.add_argument("--delays", type=float, nargs="+", default=[0, 20, 40, 60], help="one way, milliseconds")
    arguments.add_argument("--runs", type=int, default=5)
    given = arguments.parse_args()
    seconds = given.op_ms / 1e3
    costs = {delay: delayed(given.ranks, seconds, delay / 1e3) for delay in given.delays}
    table = [
        (delay, name, program)
        for delay, cost in costs.items()
        for name, program in programs(given.ranks, given.microbatches, given.in_flight, cost).items()
    ]
    measured = run_on_ranks(measure, given.ranks, [(delay / 1e3, program) for delay, _, program in table], seconds, given.runs)
    baseline = {delay: found for (delay, name, _), found in zip(table, measured, strict=True) if name == "1f1b"}
    rows: list[Row] = []
    for (delay, name, program), found in zip(table, measured, strict=True):
        simulated = simulate(program, costs[delay])
        bound = PERIOD.bound(Case(costs[delay], given.microbatches, program.placement))
        in_flight = max(simulated.peak_in_flight)
        label = f"{delay:g} ms: {name} (simulated {1e3 * simulated.period:.0f}, bound {1e3 * bound:.0f}, {in_flight} in flight)"
        rows.append(Row(label, 1e3 * found, 1e3 * baseline[delay], "ms", given.runs))
    print_rows(f"iteration, {given.op_ms:g} ms ops, link 1-2 delayed one way", rows, baseline="1f1b", as_json=given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
