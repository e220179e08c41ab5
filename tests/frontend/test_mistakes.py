"""Mistakes that strangers made: each is right, or one line that says what to do."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from contextlib import AbstractContextManager
from io import BytesIO
from typing import Any

import pytest
import torch
from errors_table import check_documented
from torch import Tensor, nn

import adaptra
from adaptra.errors import AdaptraError

LOSS = nn.functional.mse_loss
SIX = (slice(0, 3), slice(3, 6))
X, Y = (torch.randn(8, 4, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))


def compiled(given: nn.Module | None = None, **other: Any) -> adaptra.Pipeline:
    arguments: Any = {"stages": 2, "microbatches": 2, "example_inputs": (X, Y), "loss": LOSS}
    return adaptra.compile(model() if given is None else given, **arguments | other)


class Drawing(nn.Module):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.draw = torch.Generator()

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rand(4, generator=self.draw)


def made_for_inference() -> nn.Module:
    with torch.inference_mode():
        return model()


NO_ARGUMENT = "…(…=…): there is no such argument: expected …"
MISTAKES: dict[str, tuple[Callable[[], Any], str, str]] = {
    "another argument of compile": (lambda: compiled(stage=2), NO_ARGUMENT, "compile(stage=…)"),
    "another option": (lambda: adaptra.Options(timout=3), NO_ARGUMENT, "expected timeout"),  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    "another field of Telemetry": (lambda: adaptra.Telemetry(foldr="x"), NO_ARGUMENT, "expected folder"),  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    "targets without a loss": (
        lambda: compiled(loss=None),
        "targets: without loss= they are the last positional argument of forward…: expected one for them; is loss= missing?",
        "forward(input)",
    ),
    "a lazy module": (
        lambda: compiled(nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 4))),
        "model: … is lazy, and has no shape yet: expected one with values; call the model with a batch before adaptra.compile",
        "0.weight",
    ),
    "a model made for inference": (
        lambda: compiled(made_for_inference()),
        "model: … was made within torch.inference_mode(), and can't be trained: expected a model that is made outside of it",
        "0.weight",
    ),
    "a generator of the model's own": (
        lambda: compiled(nn.Sequential(nn.Linear(4, 4), Drawing())),
        "…: the model keeps a …: expected tensors only; random ops draw by the seed, step and microbatch without a generator",
        "a Generator, as of generator=",
    ),
}
NOT_COPIED = (
    "a … can't be pickled or copied, as it has threads and connections: expected pipe.full_state_dict() to be saved, or "
    "adaptra.TrainingState with the optimizer"
)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_answered_in_one_line(name: str) -> None:
    make, row, part = MISTAKES[name]
    with pytest.raises(AdaptraError) as caught:
        make()
    check_documented(type(caught.value).__name__, str(caught.value), row)
    assert part in str(caught.value) and "\n" not in str(caught.value)


def test_a_pipeline_is_not_copied() -> None:
    with compiled() as pipe:
        for copied in (copy.copy, copy.deepcopy, pickle.dumps, lambda one: torch.save(one, BytesIO())):
            with pytest.raises(AdaptraError) as caught:
                copied(pipe)
            check_documented(type(caught.value).__name__, str(caught.value), NOT_COPIED)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, lambda: torch.autograd.set_detect_anomaly(True)])
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_the_callers_mode_changes_nothing(mode: Callable[[], AbstractContextManager[None]]) -> None:
    """At compile, where a new shape is evaluated, and for a batch made within the mode."""
    plain, given = model(), model()
    with mode():
        x, y = X.clone(), Y.clone()
        pipe = compiled(given)
    with pipe:
        loss = pipe.step(x, y)
        parts = [LOSS(plain(a), b) for a, b in zip(X.chunk(2), Y.chunk(2), strict=True)]
        for one in parts:
            (one / 2).backward()
        assert torch.equal(loss, torch.stack(parts).mean())
        found = dict(pipe.named_parameters())
        assert all(torch.equal(one.grad, found[name].grad) for name, one in plain.named_parameters())  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        with mode():
            assert torch.equal(pipe.eval_step(X[:6], Y[:6]), torch.stack([LOSS(plain(X[a]), Y[a]) for a in SIX]).mean())
