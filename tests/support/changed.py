"""A model that a loop changes between steps, its loss, and one process that trains it as plain torch does."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name all of torch uses
from torch import Tensor, nn

MICROBATCHES = 4
OFFSET = 0.0


class Part(nn.Module):
    """Reads what a loop may change: plain values, nested ones, plain tensors, buffers, its class, a global."""

    shift = 0.0
    gain: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.0)
        self.scale = 1.0
        self.numbers: list[Any] = [1.0, {"inner": 1.0}]
        self.config = SimpleNamespace(temperature=1.0, deeper=SimpleNamespace(power=1.0))
        self.mask = torch.ones(8)
        self.activation = torch.tanh
        self.register_buffer("gain", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.activation(self.drop(self.norm(self.linear(x)))) * self.scale * self.numbers[0] * self.mask
        hidden = hidden * self.gain * self.numbers[1]["inner"] / self.config.temperature + self.shift + OFFSET
        return x + hidden * self.config.deeper.power


class Loss:
    """A loss with weights of its own, plain and as a tensor."""

    def __init__(self) -> None:
        self.beta = 1.0
        self.weights = torch.ones(8)

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.beta * ((outputs - targets) ** 2 * self.weights).mean() + outputs.abs().mean()


def smooth(outputs: Tensor, targets: Tensor, beta: float = 1.0) -> Tensor:
    return F.smooth_l1_loss(outputs, targets, beta=beta)


def enclosed() -> tuple[Any, Any]:
    """A loss that reads a variable around it, and the function that sets that."""
    factor = 1.0

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.mse_loss(outputs, targets) * factor

    def set_factor(value: float) -> None:
        nonlocal factor
        factor = value

    return loss, set_factor


def partly() -> Any:
    return partial(smooth, beta=1.0)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Part() for _ in range(4)))


def batch(seed: int = 0, rows: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 8, generator=generator), torch.randn(rows, 8, generator=generator)


def losses_alone(plain: nn.Module, loss: Any, inputs: Tensor, targets: Tensor) -> Tensor:
    """Add the gradients of a batch, microbatch by microbatch, and return the loss of each."""
    found: list[Tensor] = []
    for x, y in zip(inputs.chunk(MICROBATCHES), targets.chunk(MICROBATCHES), strict=True):
        one = loss(plain(x), y)
        (one / MICROBATCHES).backward()
        found.append(one.detach())
    return torch.stack(found)


def train_alone(plain: nn.Module, loss: Any, inputs: Tensor, targets: Tensor) -> Tensor:
    """Add the gradients of a batch, microbatch by microbatch, and return its loss."""
    return losses_alone(plain, loss, inputs, targets).sum() / MICROBATCHES


def train_replicas(plain: nn.Module, loss: Any, halves: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Set the mean of the gradients of several replicas' batches, and return the mean of their losses."""
    losses: list[Tensor] = []
    sums: list[dict[str, Tensor]] = []
    for half in halves:
        losses.append(losses_alone(plain, loss, *half))
        sums.append({name: one.grad.clone() for name, one in plain.named_parameters() if one.grad is not None})
        plain.zero_grad()
    for name, one in plain.named_parameters():
        if name in sums[0]:
            one.grad = torch.stack([each[name] for each in sums]).sum(0) / len(halves)
    return (torch.stack(losses).sum(0) / len(halves)).sum() / MICROBATCHES


def different(ours: Any, plain: nn.Module) -> list[str]:
    """Name the parameters of a pipeline whose values or gradients are not those of the plain model."""
    expected = dict(plain.named_parameters())
    found: list[str] = []
    for name, one in ours.named_parameters():
        grad, other = one.grad, expected[name].grad
        if (grad is None) != (other is None) or not (grad is None or other is None or torch.equal(grad, other)):
            found.append(f"{name}.grad")
        if not torch.equal(one, expected[name]):
            found.append(name)
    return found


def state_of(plain: nn.Module) -> dict[str, Tensor]:
    """Values and gradients of a model, whose names tell both."""
    found = {name: one.detach().clone() for name, one in plain.state_dict().items()}
    return found | {f"{name}.grad": one.grad.clone() for name, one in plain.named_parameters() if one.grad is not None}
