"""Replicas on cuda whose updates the clock decides on, to the bits of the same updates on the CPU."""

from __future__ import annotations

import time
from typing import Any

import pytest
from processes import run_processes

import adaptra

MODES: dict[str, Any] = {"local": adaptra.Local(2), "asynchronous": adaptra.XOrder(1), "deadline": adaptra.Deadline(0.7)}
STEPS = 5


def train(rank: int, device: str, mode: str, logs: list[Any] | None = None) -> tuple[list[bytes], list[Any]]:
    """The bits of this rank's parameters after each step, and its log. With logs the run makes the same exchanges."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)).to(device)
    inputs, targets = torch.randn(8, 8).to(device), torch.randn(8, 4).to(device)
    options = adaptra.Options(synchrony=MODES[mode])
    bits: list[bytes] = []
    with adaptra.compile(
        model, stages=1, microbatches=4, example_inputs=(inputs, targets), loss=nn.functional.mse_loss, options=options
    ) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.1)
        pipe.attach(optimizer)
        if logs is not None:
            pipe.replay(logs[rank])
        for step in range(STEPS):
            if logs is None:
                time.sleep(0.2 * rank)
            if mode == "deadline" and step == STEPS - 1:
                pipe.defer_nothing()
            pipe.step(inputs * (1 + pipe.replica + step), targets)
            optimizer.step()
            optimizer.zero_grad()
            bits.append(b"".join(one.detach().cpu().numpy().tobytes() for one in pipe.parameters()))
        if mode != "deadline":
            pipe.exchange()
        bits.append(b"".join(one.detach().cpu().numpy().tobytes() for one in pipe.parameters()))
        assert {one.device.type for one in pipe.parameters()} == {device}
        return bits, [*pipe.exchange_log]


@pytest.mark.parametrize("mode", MODES)
def test_devices_make_the_updates_of_a_log_with_the_bits_of_the_host(mode: str) -> None:
    on_host = run_processes(train, 2, "cpu", mode)
    assert mode != "deadline" or any(part["count"] < 4 for part in on_host[0][1][0]["parts"]), "some are deferred"
    assert run_processes(train, 2, "cuda", mode, [log for _, log in on_host]) == on_host
