"""A rank that trains nothing has an optimizer like all others, also when a change of cuts or roles brings it parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as checkpoints
from processes import run_processes
from torch import nn

import adaptra

X = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
STEPS = 4


def net(frozen: bool) -> nn.Module:
    """Its first module has no parameters, or none that are trained."""
    torch.manual_seed(0)
    first = nn.Linear(4, 4).requires_grad_(False) if frozen else nn.Tanh()
    return nn.Sequential(first, nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.05)


def alone(frozen: bool) -> list[float]:
    model = net(frozen)
    optimizer = adam(one for one in model.parameters() if one.requires_grad)
    losses: list[float] = []
    for _ in range(STEPS):
        parts = [nn.functional.mse_loss(model(part), part) for part in X.chunk(2)]
        for part in parts:
            (part / 2).backward()
        losses.append(torch.stack(parts).detach().mean().item())
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def compiled(frozen: bool) -> adaptra.Pipeline:
    return adaptra.compile(
        net(frozen), stages=2, microbatches=2, example_inputs=(X, X), loss=nn.functional.mse_loss, split=["1"]
    )


def step(pipe: adaptra.Pipeline, optimizer: torch.optim.Optimizer) -> float:
    loss = pipe.step(X, X).item()
    pipe.clip_grad_norm_(0.5)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def train(rank: int, folder: str) -> dict[str, Any]:
    """Two replicas of the same rows, whose mean is either's gradient."""
    torch.distributed.init_process_group("gloo")
    found: dict[str, Any] = {}
    with compiled(frozen=False) as pipe:
        found["parameters"] = [list(one.shape) for one in pipe.parameters()]
        optimizer = adam(pipe.parameters())
        pipe.attach(optimizer)
        training = adaptra.TrainingState(pipe, optimizer)
        losses = [step(pipe, optimizer)]
        checkpoints.save({"training": training}, checkpoint_id=folder)
        found["named"] = sorted(training.state_dict()["optimizer"])
        pipe.take_split(["3"])
        losses.append(step(pipe, optimizer))
        pipe.attach(optimizer)  # which still has what the rank without parameters had
        found["after"] = sorted(adaptra.TrainingState(pipe, optimizer).state_dict()["optimizer"])
        assert pipe.roles is not None
        pipe.take_roles(pipe.roles.swapped(0, 3))
        losses.append(step(pipe, optimizer))
        pipe.take_split(["1"])
        losses.append(step(pipe, optimizer))
        found["losses"] = losses
        checkpoints.load({"training": training}, checkpoint_id=folder)
        found["again"] = [step(pipe, optimizer) for _ in range(STEPS - 1)]
        full = pipe.full_state_dict()
        found["state"] = sorted(full)
    with compiled(frozen=True) as pipe:
        optimizer = adam([one for one in pipe.parameters() if one.requires_grad])
        scaler = pipe.grad_scaler(init_scale=4.0)
        scaled: list[float] = []
        for _ in range(STEPS):
            scaled.append(pipe.step(X, X).item())
            scaler.unscale_(optimizer)
            pipe.clip_grad_norm_(0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        found["frozen"] = scaled
    return found


@pytest.mark.processes
def test_a_rank_without_parameters_trains_with_the_others(tmp_path: Path, one_thread: None) -> None:
    expected = alone(frozen=False)
    results = run_processes(train, 4, str(tmp_path / "saved"))
    for rank, found in enumerate(results):
        assert found["losses"] == expected and found["again"] == expected[1:], rank
        assert found["frozen"] == alone(frozen=True), rank
        is_last = rank % 2
        assert found["parameters"] == ([[4, 4], [4]] * 2 if is_last else [[0]])
        assert found["named"] == (["1.bias", "1.weight", "3.bias", "3.weight"] if is_last else [])
        assert found["after"] == (["3.bias", "3.weight"] if is_last else ["1.bias", "1.weight"])
    assert results[0]["state"] == ["1.bias", "1.weight", "3.bias", "3.weight"]


def test_without_a_launcher_nothing_is_added(one_thread: None) -> None:
    with compiled(frozen=True) as pipe:
        assert [list(one.shape) for one in pipe.parameters()] == [[4, 4], [4]] * 3
