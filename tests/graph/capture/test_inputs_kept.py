"""What a model's code writes into its inputs never reaches the user's tensors, and the numbers are those of eager torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import adaptra

Loss = Callable[[Tensor, Tensor], Tensor]


class Writes(nn.Module):
    def __init__(self, write: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)
        self.write = write

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.last(self.first(self.write(x)) * mask.mul_(2))


def square(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean()


def scaling(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets.mul_(0.5).clamp_(-1, 1)).square().mean()


def first_column(x: Tensor) -> Tensor:
    x[:, 0] = 1
    return x


def twice(x: Tensor) -> Tensor:
    before = 2 * x
    return before + x.view(-1).sub_(1).view_as(x)


def without_gradient(x: Tensor) -> Tensor:
    with torch.no_grad():
        x.add_(1)
    return x


WRITES: dict[str, tuple[Callable[[Tensor], Tensor], Loss]] = {
    "the input": (lambda x: x.sub_(1), square),
    "a column": (first_column, square),
    "a view after a read": (twice, square),
    "a part of a split": (lambda x: x.split(2, 1)[0].zero_().repeat(1, 2) + x, square),
    "without gradient": (without_gradient, square),
    "the targets": (lambda x: x, scaling),
}


@pytest.mark.parametrize("stages", [1, 2, "a list"])
@pytest.mark.parametrize("kind", WRITES)
def test_what_is_written_into_a_batch_stays_out_of_it(kind: str, stages: Any) -> None:
    torch.manual_seed(0)
    write, loss = WRITES[kind]
    model = Writes(write)
    plain = Writes(write)
    plain.load_state_dict(model.state_dict())
    batch = torch.randn(4, 4), torch.rand(4, 4), torch.randn(4, 2)
    before = [one.clone() for one in batch]
    given: Any = [model] if stages == "a list" else model
    with adaptra.compile(
        given, stages=1 if stages == "a list" else stages, microbatches=2, example_inputs=(batch[:2], batch[2]), loss=loss
    ) as pipe:
        assert all(map(torch.equal, batch, before)), "at compile"
        found = pipe.step(batch[:2], batch[2])
        pipe.eval_step(batch[:2], batch[2])
        assert all(map(torch.equal, batch, before)), "in a step"
        losses: list[Tensor] = []
        for x, mask, targets in zip(*(one.clone().chunk(2) for one in batch), strict=True):
            losses.append(loss(plain(x, mask), targets))
            (losses[-1] / 2).backward()
        assert torch.equal(found, torch.stack(losses).detach().sum() / 2)
        pairs = [(one.grad, other.grad) for one, other in zip(pipe.parameters(), plain.parameters(), strict=True)]
        assert all(one is not None and other is not None and torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize("as_list", [False, True])
def test_a_tensor_that_the_loss_closes_over_is_not_written_at_compile(as_list: bool) -> None:
    total = torch.zeros(())

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        total.add_(1)
        return square(outputs, targets)

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    example = torch.randn(4, 4), torch.randn(4, 2)
    try:
        adaptra.compile([model] if as_list else model, stages=1, microbatches=2, example_inputs=example, loss=loss).close()
    except adaptra.errors.CaptureError as error:
        assert "changes in place" in str(error) and not as_list
    assert total == 0
