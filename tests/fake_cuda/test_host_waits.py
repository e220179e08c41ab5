"""Where the host waits for the device in a step of training: all such places are listed in a golden file, with how often."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from processes import run_processes

from adaptra.planning.routes.job_planner import plan_job
from adaptra.program import Program
from adaptra.program.routing import Routing
from adaptra.simulation.case import Case
from adaptra.simulation.cost import CostModel

STAGES = DEVICES = 2
MICROBATCHES = 4
SOON = 200.0
STEADY = 12  # what is compared in a pipeline's first steps only is over by then


def waits_of_steady_steps(rank: int, transport: str, options: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Return where the host waited in each of two steps of steady training, a line per thread, place and count."""
    import threading

    import torch
    from fake_cuda.machine import the_machine
    from torch import nn

    import adaptra

    torch.manual_seed(0)
    torch.cuda.set_device(rank % DEVICES)
    model = nn.Sequential(nn.Linear(8, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 5)).cuda()
    inputs, targets = torch.randn(16, 8, device="cuda"), torch.randint(0, 5, (16,), device="cuda")
    loss = nn.functional.cross_entropy
    pipe = adaptra.compile(
        model,
        stages=STAGES,
        microbatches=MICROBATCHES,
        example_inputs=(inputs, targets),
        loss=loss,
        transport=transport,
        options=adaptra.Options(**options),
    )
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
    machine, own = the_machine(), threading.current_thread().name
    steps: list[list[str]] = []
    for _ in range(STEADY + 2):
        settle()
        machine.forget()
        optimizer.zero_grad()
        pipe.step(inputs, targets)
        pipe.clip_grad_norm_(1.0)
        optimizer.step()
        settle()
        steps.append(shown(machine.syncs, own))
    pipe.close()
    return steps[-2], steps[-1]


def settle() -> None:
    """Let threads do what is left of messages that are on their way to no step."""
    import torch.distributed

    torch.distributed.barrier()
    time.sleep(0.1)


def shown(waits: Counter[str], own: str) -> list[str]:
    """Return a line per thread and function, with the number of waits; those of the thread of the step come first."""
    counted: Counter[tuple[bool, str, str]] = Counter()
    for wait, count in waits.items():
        where, thread = re.sub(r"(\.py):\d+", r"\1", wait).rsplit(" on ", 1)
        counted[thread != own, "the step" if thread == own else thread, where] += count
    return [f"{thread}: {count} × {where}" for (_, thread, where), count in sorted(counted.items())]


def shared() -> Program:
    """What an adapting job may run: other replicas' workers compute a microbatch of each stage, and hand its gradients over."""
    case = Case(CostModel.uniform(STAGES, 1.0, 1.0, 1.0), MICROBATCHES, (0, 1)).of_replicas(2)
    paths = [[(0, 1), (2, 1), (0, 3), (0, 1)], [(2, 3)] * MICROBATCHES]
    return plan_job(case, routing=Routing.of_paths(((0, 1), (2, 3)), paths))


@pytest.mark.parametrize(
    ("transport", "replicas", "name"),
    [
        ("delegate", 1, "delegate"),
        ("c10d", 1, "c10d"),
        ("nccl", 1, "nccl"),
        ("delegate", 2, "replicas"),
        ("delegate", 2, "shared_microbatches"),
        ("c10d", 2, "shared_microbatches_c10d"),
    ],
)
def test_the_host_waits_for_the_device_where_it_is_allowed_to_alone(
    golden: Callable[[str, str], None], transport: str, replicas: int, name: str
) -> None:
    # Replicas that adapt may share microbatches from any step on, so each of their plans is run for itself.
    options = {} if replicas == 1 else {"adapt": False, "schedule": shared() if name.startswith("shared") else None}
    found = run_processes(waits_of_steady_steps, STAGES * replicas, transport, options, timeout=SOON)
    assert [one for one, _ in found] == [other for _, other in found]
    lines = [f"rank {rank}, {line}" for rank, (waits, _) in enumerate(found) for line in waits]
    golden(f"host_waits_{name}.txt", "\n".join(lines) + "\n")
