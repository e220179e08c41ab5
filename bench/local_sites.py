"""Steps of two sites with a slow link between them: gradients in each step, beside local steps, and beside the clock's seconds.

Each site is one host and one stage. Ops take what ``--op-ms`` says, and the link is such that a sum of gradients takes
``--exchange`` times a step's computation. The clock is that of ``adaptra modes``. The hosts need root, see ``tests/links/``.
"""

from __future__ import annotations

import sys
from statistics import fmean
from typing import Any

import torch
from _ranks import run_on_hosts, small_problem, timed_in_a_row
from _table import Row, parser, print_rows
from torch import nn

import adaptra
from adaptra.planning.synchrony.case import SynchronyCase
from adaptra.planning.synchrony.choice import ModeChoice
from adaptra.planning.synchrony.modes import parse_mode

WARM, EXACT = 2, 10
"""Steps before those that are measured, and measured steps with gradients in each."""


def linear(width: int) -> nn.Module:
    """The model: one layer, so one gradient."""
    return nn.Linear(width, width, bias=False)


def measure(_rank: int, width: int, op_seconds: float, every: int) -> dict[str, list[float]]:
    """Seconds of steps, by mode."""
    problem = small_problem(1, 1, width, make=linear)
    batch: Any = problem["example_inputs"]
    seconds: dict[str, list[float]] = {}
    modes: list[tuple[str, Any, int]] = [("exact", "exact", EXACT), ("local", adaptra.Local(every), 2 * every)]
    for name, synchrony, steps in modes:
        options = adaptra.Options(
            adapt=False, synchrony=synchrony, emulate=adaptra.EmulatedDevice(op_seconds, op_seconds, op_seconds)
        )
        with adaptra.compile(**problem, options=options) as pipe:
            optimizer = torch.optim.SGD(pipe.parameters(), lr=1e-3)

            def step(pipe: adaptra.Pipeline = pipe, optimizer: torch.optim.Optimizer = optimizer) -> None:
                pipe.step(*batch)
                optimizer.step()
                optimizer.zero_grad()

            seconds[name] = timed_in_a_row(step, steps, WARM)
    return seconds


def main() -> int:
    """Start the hosts and print the table."""
    arguments = parser(__doc__)
    arguments.add_argument("--every", type=int, default=32, help="steps between two exchanges")
    arguments.add_argument("--exchange", type=float, default=10.0, help="of a step's computation")
    arguments.add_argument("--rate", type=float, default=25.0, help="of each port each way, MB/s")
    arguments.add_argument("--op-ms", type=float, default=20.0, help="duration of F, of I and of W, milliseconds")
    given = arguments.parse_args()
    computation = 3 * given.op_ms / 1e3
    wanted = given.exchange * computation
    width = round((wanted * given.rate * 1e6 / 4) ** 0.5)
    ports = [f"{host} rate={given.rate:g}MB" for host in range(2)]
    found = run_on_hosts(measure, 2, ports, width, given.op_ms / 1e3, given.every, steady=True)
    exact, local = (fmean(found[name]) for name in ("exact", "local"))
    modes = "exact", f"local={given.every}"
    case = SynchronyCase(2, 1.0, {}, seconds=computation, exchange=4 * width**2 / (given.rate * 1e6), modes=modes)
    choice = ModeChoice(case)
    rows = [
        Row(f"step of local={given.every}", local, exact, "s", len(found["local"])),
        *(
            Row(f"{name} step by the clock", choice.price(parse_mode(name)).pace.seconds, measured, "s", len(found[key]))
            for name, key, measured in zip(modes, ("exact", "local"), (exact, local), strict=True)
        ),
    ]
    title = f"two sites, {4 * width**2 / 1e6:.1f} MB of gradients, ports of {given.rate:g} MB/s, computation {computation:g} s"
    print_rows(title, rows, baseline="exact, or measured", as_json=given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
