"""Jobs that change their mode of synchronisation again and again: replicas that differ after a change, rows lost or doubled.

In each stretch some replicas are late. A stretch ends with a change, before which all exchange what they have learnt. Then all
have to be equal to the last bit, with their optimizers. What a replica has trained on in a stretch has to be in its exchanges,
or its updates, once.
"""

from __future__ import annotations

import random
import sys
import time
import zlib
from typing import Any

import torch
import torch.distributed as dist
from _ranks import run_on_ranks, small_problem
from _table import Row, parser, print_rows
from replayed_sites import lacks_some

import adaptra

REPLICAS, ROWS = 4, 4
MODES: tuple[Any, ...] = (
    "exact",
    adaptra.Local(2),
    adaptra.XOrder(2, staleness=2),
    adaptra.XOrder(1),
    adaptra.XOrder(groups="auto"),
    adaptra.Stealing(),
    adaptra.Deadline(0.8),
)
APART = adaptra.Local | adaptra.XOrder


def measure(rank: int, changes: int, stages: int) -> dict[str, int]:
    """Over all ranks: changes after which replicas differ, rows lost or doubled, updates without some replica, and seconds."""
    problem = small_problem(stages, ROWS, rows=1)
    counted = dict.fromkeys(("unlike", "lost", "missed", "exchanges"), 0)
    with adaptra.compile(**problem, options=adaptra.Options(adapt=False)) as pipe:
        drawn, delays = random.Random(0), random.Random(rank // stages)
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
        pipe.attach(optimizer)
        inputs, targets = problem["example_inputs"]
        for change in range(changes):
            mode = drawn.choice(MODES)
            pipe.take_synchrony(mode)
            steps = drawn.randint(1, 5)
            for step in range(steps):
                time.sleep(delays.choice((0.0, 0.0, 0.03)))
                if isinstance(mode, adaptra.Deadline) and step == steps - 1:
                    pipe.defer_nothing()
                pipe.step(inputs * (1 + pipe.replica + 0.1 * step), targets)
                optimizer.step()
                optimizer.zero_grad()
            if isinstance(mode, APART):
                pipe.exchange()
            log = pipe.exchange_log if isinstance(mode, APART | adaptra.Deadline) else []
            if log:
                weights = [
                    sum(_own(one, pipe.replica) for one in log if one.get("stage", stage) == stage) for stage in range(stages)
                ]
                counted["lost"] += int(sum(abs(one - ROWS * steps) for one in weights))
                counted["missed"] += sum(lacks_some(one, REPLICAS) for one in log)
                counted["exchanges"] += len(log)
            pipe.take_synchrony("exact")
            counted["unlike"] += _differ(pipe, optimizer, stages)
            if rank == 0:
                print(f"\rchange {change + 1} of {changes}", end="", file=sys.stderr)
    gathered: list[Any] = [None] * (REPLICAS * stages)
    dist.all_gather_object(gathered, counted)
    return {name: sum(one[name] for one in gathered) for name in counted}


def _own(exchange: dict[str, Any], replica: int) -> float:
    if "parts" in exchange:  # a step up to a deadline, whose microbatches have a row each
        return exchange["parts"][replica]["count"]
    return sum(vote["weight"] for vote in exchange["votes"] if vote["site"] == replica)


def _differ(pipe: adaptra.Pipeline, optimizer: torch.optim.Optimizer, stages: int) -> int:
    """Return 1 on the first rank if replicas have other parameters or another optimizer's state, 0 elsewhere."""
    moments = [value for state in optimizer.state.values() for value in state.values()]
    tensors = [one.detach().numpy().tobytes() for one in (*pipe.parameters(), *moments)]
    gathered: list[Any] = [None] * (REPLICAS * stages)
    dist.all_gather_object(gathered, zlib.crc32(b"".join(tensors)))
    return int(len(set(gathered)) > stages and dist.get_rank() == 0)


def main() -> int:
    """Start the ranks and print the table."""
    arguments = parser(__doc__)
    arguments.add_argument("--changes", type=int, default=100, help="stretches, each of a mode that is drawn")
    arguments.add_argument("--stages", type=int, default=1, help="of each replica")
    given = arguments.parse_args()
    found = run_on_ranks(measure, REPLICAS * given.stages, given.changes, given.stages)
    print(file=sys.stderr)
    rows = [
        Row("changes after which replicas differ", found["unlike"], 0, "changes", given.changes),
        Row("rows lost or doubled", found["lost"], 0, "rows", given.changes),
        Row(
            "exchanges that not all replicas were in alike, of all",
            found["missed"],
            found["exchanges"],
            "exchanges",
            given.changes,
        ),
    ]
    title = f"{given.changes} stretches of {REPLICAS} replicas of {given.stages}"
    print_rows(title, rows, baseline="bar, or all", as_json=given.json)
    return int(bool(found["unlike"] or found["lost"]))


if __name__ == "__main__":
    sys.exit(main())
