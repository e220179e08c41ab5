"""Norms that keep statistics, trained as plain torch trains them with the same microbatches."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name all of torch uses
from torch import Tensor, nn

import adaptra

NORMS: dict[str, Callable[[], nn.Module]] = {
    "BatchNorm without statistics": lambda: nn.BatchNorm1d(4, track_running_stats=False),
    "InstanceNorm with statistics": lambda: nn.InstanceNorm1d(4, track_running_stats=True),
    "a cumulative average in evaluation mode": lambda: nn.BatchNorm1d(4, momentum=None).eval(),
}


def train_and_compare(given: Any, plain: nn.Sequential) -> None:
    x, y = torch.randn(4, 4, 3), torch.randn(4, 4, 3)
    with adaptra.compile(given, stages=2, microbatches=2, example_inputs=(x, y), loss=F.mse_loss) as pipe:
        for number in range(2):
            loss = pipe.step(x + number, y)
            losses = [F.mse_loss(plain(one), other) for one, other in zip((x + number).chunk(2), y.chunk(2), strict=True)]
            for one in losses:
                (one / 2).backward()
            assert torch.equal(loss, torch.stack(losses).mean())
        state = pipe.state_dict()
        assert not [name for name, one in plain.state_dict().items() if not torch.equal(state[name], one)]
        grads: dict[str, Tensor | None] = {name: one.grad for name, one in pipe.named_parameters()}
        for name, one in plain.named_parameters():
            assert torch.equal(*map(_there, (grads[name], one.grad))), name
        modes = [one.training for one in plain.modules()]
        evaluated = pipe.eval_step(x)
        with torch.no_grad():
            assert torch.equal(evaluated, torch.cat([plain.eval()(one) for one in x.chunk(2)]))
        for one, mode in zip(plain.modules(), modes, strict=True):
            one.training = mode


def _there(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    return gradient


@pytest.mark.parametrize("kind", NORMS)
def test_statistics_are_those_of_plain_torch(kind: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(4, 4, 1), NORMS[kind](), nn.Tanh(), nn.Conv1d(4, 4, 1))
    train_and_compare(model, copy.deepcopy(model))


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(4), nn.InstanceNorm1d(4, track_running_stats=True)])
def test_statistics_change_only_where_they_are_taken(norm: nn.Module) -> None:
    x = torch.randn(4, 4, 3)
    changing: list[list[str]] = []
    for trains in (True, False):
        model = nn.Sequential(nn.Conv1d(4, 4, 1), copy.deepcopy(norm).train(trains))
        with adaptra.compile(model, stages=1, microbatches=2, example_inputs=(x, x), loss=F.mse_loss) as pipe:
            changing.append(pipe.session.compiled.changing_in(0))
    assert "1.running_mean" in changing[0] and not changing[1]


def test_a_list_of_stages_keeps_a_cumulative_average() -> None:
    torch.manual_seed(0)
    first, last = nn.Sequential(nn.Conv1d(4, 4, 1), nn.BatchNorm1d(4, momentum=None)), nn.Conv1d(4, 4, 1)
    train_and_compare([copy.deepcopy(first), copy.deepcopy(last)], nn.Sequential(first, last))


def test_a_cumulative_average_that_begins_later_is_refused_by_its_name() -> None:
    model: Any = nn.Sequential(nn.Conv1d(4, 4, 1), nn.BatchNorm1d(4, momentum=None).eval(), nn.Conv1d(4, 4, 1))
    x = torch.randn(4, 4, 3)
    with adaptra.compile(model, stages=2, microbatches=2, example_inputs=(x, x), loss=F.mse_loss) as pipe:
        pipe.step(x, x)
        model[1].train()
        with pytest.raises(adaptra.errors.CaptureError, match=r"has changed .*module 1 \(BatchNorm1d\): momentum=None"):
            pipe.step(x, x)
        model[1].momentum = 0.1
        pipe.step(x, x)
