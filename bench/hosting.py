"""Training on fewer ranks than workers, and on as many: the time of a step, its bound, and the bits of all ranks.

Ops are emulated, so that all ranks fit this machine. The optimizer takes as long as three ops. With ``--clip`` ranks meet
between steps. Fewer ranks host the workers of those that lack; then other replicas compute their microbatches.
"""

from __future__ import annotations

import hashlib
import sys
import time
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from _ranks import run_on_ranks, small_problem, timed_in_a_row
from _table import Row, parser, print_rows

import adaptra
from adaptra.planning.routes.period_bound import period_bound
from adaptra.planning.routes.route import share_evenly
from adaptra.runtime.world.world import World
from adaptra.simulation.case import Case
from adaptra.simulation.cost import CostModel

UPDATE = 3
"""Ops that the optimizer's step takes as long as."""


def measure(
    rank: int, replicas: int, stages: int, microbatches: int, seconds: float, steps: int, clips: bool
) -> dict[str, Any]:
    """Rank 0: seconds of each step, losses and norms as one digest, and the number of microbatches that guests compute."""
    given = small_problem(stages, microbatches)
    options = adaptra.Options(emulate=adaptra.EmulatedDevice(seconds, seconds, seconds))
    digest = hashlib.sha256()
    with adaptra.compile(**given, replicas=replicas, options=options) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-3)
        inputs, targets = given["example_inputs"]

        def train() -> None:
            digest.update(pipe.step(inputs + pipe.replica, targets).numpy().tobytes())
            if clips:
                digest.update(pipe.clip_grad_norm_(1.0).numpy().tobytes())
            time.sleep(UPDATE * seconds)
            optimizer.step()
            optimizer.zero_grad()

        times = timed_in_a_row(train, steps, before=6)
        guests = pipe.session.launched.world.guests
        at_guests = sum(len(route.microbatches) for route in pipe.routes if guests.intersection(route.workers))
        return {"seconds": times, "digest": digest.hexdigest(), "at_guests": at_guests}


def bound_of(replicas: int, stages: int, microbatches: int, ranks: int, clips: bool) -> float:
    """The bound of a step's time in ops."""
    case = Case(CostModel.uniform(stages, 1.0, 1.0, 1.0), microbatches, tuple(range(stages))).of_replicas(replicas)
    lost: frozenset[int] = World.of_fewer(ranks, stages, replicas).guests
    case = replace(case, step=(float(UPDATE),) * stages, lost=lost, barrier=clips)
    return period_bound(case, share_evenly(case, in_turns=False)).value


def main() -> int:
    """Start the ranks and print the table."""
    arguments = parser(__doc__)
    arguments.add_argument("--replicas", type=int, default=3)
    arguments.add_argument("--stages", type=int, default=4)
    arguments.add_argument("--microbatches", type=int, default=6)
    arguments.add_argument("--ranks", type=int, nargs="+", default=[11, 10], help="the fewer ranks, one run for each")
    arguments.add_argument("--op-ms", type=float, default=40.0, help="duration of every emulated op, milliseconds")
    arguments.add_argument("--steps", type=int, default=12)
    arguments.add_argument("--clip", action="store_true", help="clip gradients in each step, so that all ranks meet")
    given = arguments.parse_args()
    seconds, workers = given.op_ms / 1e3, given.replicas * given.stages
    size = given.replicas, given.stages, given.microbatches
    found = {ranks: run_on_ranks(measure, ranks, *size, seconds, given.steps, given.clip) for ranks in (workers, *given.ranks)}
    rows: list[Row] = []
    for ranks, one in found.items():
        units = bound_of(*size, ranks, given.clip)
        rows.append(Row(f"step on {ranks} ranks ÷ op", median(one["seconds"]) / seconds, units, "ops", given.steps))
        if ranks < workers:
            differs = int(one["digest"] != found[workers]["digest"])
            rows.append(Row(f"other losses or norms on {ranks} ranks", differs, 0, "", given.steps))
            rows.append(Row(f"microbatches that guests compute on {ranks} ranks", one["at_guests"], 0, "", 1))
    title = f"{size[0]} replicas of {size[1]} stages, {size[2]} microbatches, {given.op_ms:g} ms ops, an update of {UPDATE} ops"
    print_rows(title, rows, baseline="bound", as_json=given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
