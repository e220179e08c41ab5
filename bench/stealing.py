"""Stealing within a step, or a deadline, over real processes: pipelines whose steps take times of their own, beside `exact`.

Ops are padded, so that processes share the cores of one machine. Each step of each replica takes a time that is drawn as the
simulated clock draws it: lognormal, with Pareto pauses. Both modes take the same ones, step by step in turns.
`exact` here shares nothing, as passing slowness is over before it is known. With stealing the parameters of both are compared
at the end. With a deadline they are others.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from _ranks import run_on_ranks
from _table import Row, parser, print_rows
from torch import nn

import adaptra
from adaptra.planning.synchrony.case import SynchronyCase
from adaptra.planning.synchrony.clock import draw_times, pace_of
from adaptra.planning.synchrony.modes import Deadline, Synchronous

WIDTH, ROWS = 32, 2


def steps(
    rank: int, factors: list[list[float]], unit: float, microbatches: int, quorum: float | None
) -> tuple[list[float], list[float], int]:
    """The seconds of each step in both modes, and in how many parameters they differ at the end."""
    torch.set_num_threads(1)
    faults = [
        f"slow {replica}.0 {factor:.4f}x @{step}..{step + 1}"
        for step, row in enumerate(factors, 1)
        for replica, factor in enumerate(row)
        if factor > 1
    ]
    pipes: list[adaptra.Pipeline] = []
    example = torch.zeros(ROWS * microbatches, WIDTH), torch.zeros(ROWS * microbatches, WIDTH)
    other: Any = adaptra.Stealing(most=microbatches) if quorum is None else adaptra.Deadline(quorum)
    for synchrony in ("exact", other):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        options = adaptra.Options(
            adapt=False, synchrony=synchrony, faults=faults, emulate=adaptra.EmulatedDevice(unit, unit, unit)
        )
        shape: dict[str, Any] = {"stages": 1, "microbatches": microbatches}
        loss = nn.functional.mse_loss
        pipes.append(adaptra.compile(model, **shape, example_inputs=((example[0],), example[1]), loss=loss, options=options))
    optimizers = [torch.optim.SGD(pipe.parameters(), lr=0.1) for pipe in pipes]
    seconds: tuple[list[float], list[float]] = [], []
    for step in range(len(factors) + 1):
        drawn = torch.Generator().manual_seed(1000 * step + rank)
        inputs, targets = (torch.randn(ROWS * microbatches, WIDTH, generator=drawn) for _ in range(2))
        for one in (0, 1) if step % 2 else (1, 0):
            if one and quorum is not None and step == len(factors):
                pipes[one].defer_nothing()
            dist.barrier()
            began = time.perf_counter()
            pipes[one].step((inputs,), targets)
            optimizers[one].step()
            optimizers[one].zero_grad()
            dist.barrier()
            if step:  # the first one warms up
                seconds[one].append(time.perf_counter() - began)
    pairs = zip(*(pipe.parameters() for pipe in pipes), strict=True)
    different = sum(not torch.equal(one, other) for one, other in pairs)
    for pipe in pipes:
        pipe.close()
    return *seconds, different


def main() -> int:
    """Measure and print."""
    arguments = parser(__doc__)
    arguments.add_argument("--replicas", type=int, default=8, help="pipelines, of one stage each")
    arguments.add_argument("--microbatches", type=int, default=8, help="of each")
    arguments.add_argument("--steps", type=int, default=40, help="of each mode")
    arguments.add_argument("--unit", type=float, default=0.008, help="seconds of F, I and W where nothing is slow")
    arguments.add_argument("--deadline", type=float, metavar="QUORUM", help="a deadline in place of stealing, such as 0.9")
    given = arguments.parse_args()
    mode = Synchronous(stealing=True) if given.deadline is None else Deadline(given.deadline)
    rows: list[Row] = []
    for name, jitter, pauses in (("jitter and pauses", 0.3, 0.05), ("nothing wrong", 0.0, 0.0)):
        case = SynchronyCase(given.replicas, 1000, {}, microbatches=given.microbatches, jitter=jitter, pauses=pauses)
        times = draw_times(case)[: given.steps]
        least = min(map(min, times))
        factors = [[one / least for one in row] for row in times]
        how = factors, given.unit, given.microbatches, given.deadline
        exact, others, different = run_on_ranks(steps, given.replicas, *how)
        rows.append(Row(name, 1e3 * statistics.fmean(others), 1e3 * statistics.fmean(exact), "ms", given.steps))
        predicted = pace_of(mode, case, times).seconds / statistics.fmean(map(max, times))
        rows.append(Row(f"{name}: by the simulated clock", predicted, 1.0, "of exact", given.steps))
        if given.deadline is None:
            rows.append(Row(f"{name}: parameters that differ", float(different), None, "tensors", given.steps))
    print_rows(f"{mode}: {given.replicas} pipelines", rows, baseline="exact without shares", as_json=given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
