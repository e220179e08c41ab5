"""Steps of a job whose hosts have one limited port each, where one replica is late: sums that the job chooses, beside direct.

Each replica is one host and one stage. Ops take what ``--op-ms`` says, those of the late replica longer in between. With
``--narrow`` its port is slower in between instead. Both kinds of sums train in turn, in the same processes. Compared are the
medians of healthy steps, of late ones once the job can have chosen, and of those after that. The hosts need root, see
``tests/links/``.
"""

from __future__ import annotations

import sys
from functools import partial
from statistics import median
from typing import Any

import torch
from _ranks import change_links, run_on_hosts, small_problem, timed_in_a_row
from _table import Row, parser, print_rows
from torch import nn

import adaptra
from adaptra.collectives.late_ranks import LEAST_REMEMBERED, STEPS_IN_A_ROW
from adaptra.runtime.control.plans.events import EventKind

HEALTHY = LEAST_REMEMBERED + 4
"""Steps before a replica is late."""


def linear(width: int) -> nn.Module:
    """The model: one layer, so one gradient."""
    return nn.Linear(width, width, bias=False)


def measure(
    rank: int, width: int, op_seconds: float, delay: float, late: int, steps: list[int], ports: list[str]
) -> dict[str, Any]:
    """Seconds of all steps and the events of other ways, by algorithm; and sums of gradients.

    ``ports`` are the changes of a link before the unhealthy steps, and behind them.
    """
    unhealthy, after = steps
    problem = small_problem(1, 1, width, make=linear)
    batch: Any = problem["example_inputs"]
    found: dict[str, Any] = {}
    for algorithm in ("direct", "auto"):
        events: list[adaptra.ControlEvent] = []
        options = adaptra.Options(
            adapt=False,
            emulate=adaptra.EmulatedDevice(op_seconds, op_seconds, op_seconds),
            # F, I and W each take a third of the delay longer.
            faults=[f"slow {late}.0 {1e3 * delay / 3:.3f}ms @{HEALTHY}..{HEALTHY + unhealthy}"] if not ports else (),
            reduce=adaptra.Reduce(algorithm=algorithm),
            on_event=events.append,
        )
        with adaptra.compile(**problem, options=options) as pipe:
            for one in pipe.parameters():
                one.grad = None  # of the other kind of sums, which had the same parameters
            seconds: list[float] = []
            for index, count in enumerate((HEALTHY, unhealthy, after)):
                if ports and index:
                    change_links(ports[index - 1])
                seconds += timed_in_a_row(partial(pipe.step, *batch), count, 0)
            gradients = [one.grad for one in pipe.parameters() if one.grad is not None]
        ways = [(one.step, one.text) for one in events if one.kind is EventKind.LATE]
        # Nothing has emptied ``grad`` between the steps, so it is the sum of all of them.
        sums = [one.flatten()[:1000].tolist() for one in gradients]
        found[algorithm] = {"seconds": seconds, "sums": sums, "ways": ways}
    return found


def main() -> int:
    """Start the hosts and print the table."""
    arguments = parser(__doc__)
    arguments.add_argument("--replicas", type=int, default=4)
    arguments.add_argument("--late", type=int, default=1, help="the replica that is late")
    arguments.add_argument("--megabytes", type=float, default=4.0, help="of gradients")
    arguments.add_argument("--rate", type=float, default=25.0, help="of each port each way, MB/s")
    arguments.add_argument("--op-ms", type=float, default=20.0, help="duration of F, of I and of W, milliseconds")
    arguments.add_argument("--steps", type=int, default=15, help="with a late replica, and as many behind")
    arguments.add_argument("--narrow", type=float, metavar="PART", help="that replica's port has a part of --rate instead")
    given = arguments.parse_args()
    if given.replicas < 3 or given.steps <= STEPS_IN_A_ROW + 2 or not 0 <= given.late < given.replicas:
        arguments.error(f"expected three replicas or more, one of them late, and more than {STEPS_IN_A_ROW + 2} steps")
    torch.manual_seed(0)
    width = round((given.megabytes * 1e6 / 4) ** 0.5)
    shortest = 4 * width**2 / (given.rate * 1e6)
    ports = [f"{host} rate={given.rate:g}MB" for host in range(given.replicas)]
    changes = [] if given.narrow is None else [f"{given.late} rate={given.rate * part:g}MB" for part in (given.narrow, 1)]
    # Sums round a narrow port don't tell that it is wide again: many of them go before links are measured.
    after = given.steps if given.narrow is None else 3 * given.steps
    how = width, given.op_ms / 1e3, 2 * shortest, given.late, [given.steps, after], changes
    found = run_on_hosts(measure, given.replicas, ports, *how, steady=True)
    direct, auto = (found[name]["seconds"] for name in ("direct", "auto"))
    chosen, back = HEALTHY + STEPS_IN_A_ROW, len(direct) - given.steps + STEPS_IN_A_ROW + 2
    rows = [
        Row(name, median(auto[begin:end]), median(direct[begin:end]), "s", end - begin)
        for name, begin, end in (
            ("healthy step", 2, HEALTHY),
            ("step with a late replica", chosen, HEALTHY + given.steps),
            ("step after that", back, len(direct)),
        )
    ]
    steps = [step + 1 for step, _ in found["auto"]["ways"]]
    onset, left = (steps + [len(auto)] * 2)[:2]
    rows += [
        Row("late steps before another way", onset - HEALTHY, STEPS_IN_A_ROW, "steps", 1),
        Row("well steps before direct", left - HEALTHY - given.steps, 5, "steps", 1),
        Row("changes of the way", len(steps), 2, "changes", 1),
        Row("sums of gradients that differ", int(found["direct"]["sums"] != found["auto"]["sums"]), 0, "jobs", 1),
    ]
    for _, text in found["auto"]["ways"]:
        print(text, file=sys.stderr)
    what = "late" if given.narrow is None else f"with {given.narrow:g} of it"
    title = f"{given.replicas} replicas, {given.megabytes:g} MB, ports of {given.rate:g} MB/s, replica {given.late} {what}"
    print_rows(title, rows, baseline="direct, or bar", as_json=given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
