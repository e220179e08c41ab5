"""Where the host waits for the device in a step of training: all such places are listed in a golden file, with how often."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable

import pytest
from processes import run_processes

STAGES = DEVICES = 2
SOON = 200.0
STEADY = 12  # what is compared in a pipeline's first steps only is over by then


def waits_of_steady_steps(rank: int, transport: str, may_adapt: bool) -> tuple[list[str], list[str]]:
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
        microbatches=4,
        example_inputs=(inputs, targets),
        loss=loss,
        transport=transport,
        options=adaptra.Options(adapt=may_adapt),
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


@pytest.mark.parametrize(
    ("transport", "replicas", "name"),
    [("delegate", 1, "delegate"), ("c10d", 1, "c10d"), ("nccl", 1, "nccl"), ("delegate", 2, "replicas")],
)
def test_the_host_waits_for_the_device_where_it_is_allowed_to_alone(
    golden: Callable[[str, str], None], transport: str, replicas: int, name: str
) -> None:
    # Replicas that adapt may give each other microbatches, and each of those waits.
    found = run_processes(waits_of_steady_steps, STAGES * replicas, transport, replicas == 1, timeout=SOON, is_fresh=True)
    assert [one for one, _ in found] == [other for _, other in found]
    lines = [f"rank {rank}, {line}" for rank, (waits, _) in enumerate(found) for line in waits]
    golden(f"host_waits_{name}.txt", "\n".join(lines) + "\n")
