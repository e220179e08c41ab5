"""A detour round a narrow link, and home again once the link is wide: real links, and bits that nothing of it changes."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from typing import Any, TypedDict

import pytest
from linked_hosts import CONTROL, LinkedHosts, change_links

REPLICAS, STAGES, MICROBATCHES, ROWS, WIDTH, SECONDS = 2, 2, 6, 4096, 16, 0.04
RATE = ROWS * WIDTH * 4 / (6 * SECONDS) / 1e6
"""MB/s at which a message takes as long as six forwards."""
WIDE, NARROW = f"0-1 rate={100 * RATE:.3f}MB", f"0-1 rate={RATE:.3f}MB"
SETTLING, MOST = 10, 60
"""Steps before the link turns narrow, and the most steps until microbatches take another way, or are back."""


class Trained(TypedDict):
    """One rank: its losses, a digest of its parameters, and the steps after which microbatches left home and were back."""

    losses: list[float]
    digest: str
    left: int
    back: int


def train(steps: int | None) -> Trained:
    """Train while the link turns narrow and then wide again, or for some steps in which nothing happens."""
    import torch
    import torch.distributed as dist
    from torch import nn

    import adaptra

    torch.manual_seed(0)
    inputs = torch.randn(ROWS * MICROBATCHES, WIDTH)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(STAGES)))
    # Ops that take no longer than they have to give the same numbers sooner.
    device = adaptra.EmulatedDevice(SECONDS, SECONDS, SECONDS) if steps is None else None
    losses: list[float] = []

    def change(links: str) -> None:
        dist.barrier()
        if dist.get_rank() == 0:
            change_links(os.environ[CONTROL], links)
        dist.barrier()

    with adaptra.compile(
        model,
        stages=STAGES,
        microbatches=MICROBATCHES,
        split=["1"],
        example_inputs=(inputs, torch.zeros_like(inputs)),
        loss=nn.functional.mse_loss,
        options=adaptra.Options(schedule="1f1b", emulate=device),
    ) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-3)

        def step() -> bool:
            losses.append(pipe.step(inputs + pipe.replica, torch.zeros_like(inputs)).item())
            optimizer.step()
            optimizer.zero_grad()
            return all(len(set(route.workers) & {0, 1}) != 1 for route in pipe.routes)

        def until(is_reached: Callable[[bool], bool]) -> int:
            """Run steps until all microbatches are at home, or some are not; all ranks find the same."""
            begun = len(losses)
            while len(losses) < begun + MOST and not is_reached(step()):
                pass
            return len(losses)

        left = back = 0
        if steps is None:
            for _ in range(SETTLING):
                step()
            change(NARROW)
            left = until(lambda is_home: not is_home)
            change(WIDE)
            back = until(lambda is_home: is_home)
            step()
        else:
            for _ in range(steps):
                step()
        digest = hashlib.sha256()
        for parameter in pipe.parameters():
            digest.update(parameter.detach().numpy().tobytes())
        dist.barrier()
    return Trained(losses=losses, digest=digest.hexdigest(), left=left, back=back)


def train_with_and_without(_rank: int) -> list[Trained]:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    disturbed = train(None)
    return [disturbed, train(len(disturbed["losses"]))]


@pytest.mark.root
def test_microbatches_are_home_again_once_a_narrow_link_is_wide(linked_hosts: type[LinkedHosts]) -> None:
    """How soon depends on how steady this machine is: ``bench/shares.py --narrow`` measures it."""
    with linked_hosts(REPLICAS * STAGES, WIDE) as hosts:
        results: Any = hosts.call(train_with_and_without)
    for disturbed, undisturbed in results:
        assert (disturbed["losses"], disturbed["digest"]) == (undisturbed["losses"], undisturbed["digest"])
    (first, _), *others = results
    assert all((one["left"], one["back"]) == (first["left"], first["back"]) for one, _ in others)
    assert first["left"] < SETTLING + MOST, "no detour"
    assert first["back"] < first["left"] + MOST, "never home again"
