"""What users bring that no pipeline can train is refused at the door: by module and line, or by argument."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from errors_table import check_documented
from torch import Tensor, nn

import adaptra
from adaptra.errors import AdaptraError

SHAPES = (
    "module … at …test_refused_models.py:…: …: what it returns has a shape, or is a number, that depends on the values of "
    "tensors: expected shapes that every microbatch has alike; use a mask, such as torch.where, in place of a choice"
)
BACKWARD = (
    "module … (…) at …: the model calls … while it runs, whose backward pass a graph of its forward pass can't hold: expected "
    "ops alone; give the model as a list of stages, which runs any code"
)
TRANSFORM = (
    "module … (…) at …: the model calls … while it runs, on tensors that depend on inputs or parameters: expected ops on whole "
    "batches, such as torch.einsum or broadcasting; or give the model as a list of stages, which runs any code"
)
DOCUMENTED = {
    "autograd.grad": BACKWARD,
    "backward": BACKWARD,
    "func.grad": BACKWARD,
    "vmap": TRANSFORM,
    "unique": "module … (…) at …: the model can't become one graph: …",
    "nonzero": SHAPES,
    "masked_select": SHAPES,
    "sparse": "module …: …embedding… with sparse=True: expected sparse=False, as stages add and send dense gradients",
    "cumulative average": "module …: momentum=None weights each batch by the number of batches so far, which a graph can't "
    "read: expected a number, such as momentum=0.1; or give the model as a list of stages, which runs any code",
    "no rows": "example_inputs: a batch of 0 rows: expected at least one row for each of … microbatches",
    "frozen": "the loss depends on no trainable parameter: expected one at least; requires_grad_(True) makes a parameter one",
    "input's gradient": "inputs: … requires a gradient, which a step gives to parameters alone: expected an input without; "
    "give its detach(), or make it a parameter of the model",
    "target's gradient": "targets: … requires a gradient, which a step gives to parameters alone: expected an input without; "
    "give its detach(), or make it a parameter of the model",
    "meta state": "state_dict: … is on the meta device, which holds no values: expected a model with memory, by "
    "model.to_empty(device=...) before adaptra.compile",
    "structure": "inputs: given …: expected the structure the pipeline was compiled for, …",
}


class Chooses(nn.Module):
    def __init__(self, choose: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.choose = choose

    def forward(self, x: Tensor) -> Tensor:
        return self.choose(self.layer(x))


def linear() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def compiled(model: nn.Module, inputs: Tensor | None = None, targets: Tensor | None = None) -> adaptra.Pipeline:
    inputs = torch.randn(4, 4) if inputs is None else inputs
    targets = torch.randn(4, 4) if targets is None else targets
    loss = nn.functional.mse_loss
    return adaptra.compile(model, stages=1, microbatches=2, example_inputs=(inputs, targets), loss=loss)


def try_it(case: str) -> None:  # noqa: PLR0912 - one branch for each case
    x = torch.randn(4, 4)
    match case:
        case "nonzero":
            compiled(Chooses(lambda x: x + torch.nonzero(x > 0).sum()))
        case "autograd.grad":
            compiled(Chooses(lambda x: x + torch.autograd.grad(x.square().sum(), x, create_graph=True)[0]))
        case "backward":
            compiled(Chooses(lambda x: x + (x.sum().backward() or 1)))
        case "func.grad":
            compiled(Chooses(lambda x: x + torch.func.grad(lambda x: x.square().sum())(x)))
        case "vmap":
            compiled(Chooses(torch.func.vmap(lambda row: row * row.sum())))
        case "masked_select":
            compiled(Chooses(lambda x: x + torch.masked_select(x, x > 0).mean()))
        case "unique":
            compiled(Chooses(lambda x: x if torch.unique(x).shape[0] > 3 else 2 * x))
        case "sparse":
            compiled(nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 4)), torch.randint(9, (4,)))
        case "cumulative average":
            compiled(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=None)))
        case "no rows":
            compiled(linear(), torch.randn(0, 4), torch.randn(0, 4))
        case "frozen":
            compiled(linear().requires_grad_(False))
        case "input's gradient":
            with compiled(linear()) as pipe:
                pipe.step(x.clone().requires_grad_(), x)
        case "target's gradient":
            with compiled(linear()) as pipe:
                pipe.step(x, x.clone().requires_grad_())
        case "meta state":
            with compiled(linear().to("meta"), x.to("meta"), x.to("meta")) as pipe:
                pipe.load_state_dict(linear().state_dict())
        case "structure":
            with compiled(linear()) as pipe:
                pipe.step([x], x)
        case _:
            raise AssertionError(case)


@pytest.mark.parametrize("case", DOCUMENTED)
def test_it_is_refused(case: str) -> None:
    with pytest.raises(AdaptraError) as caught:
        try_it(case)
    check_documented(type(caught.value).__name__, str(caught.value), DOCUMENTED[case])


def test_a_structure_is_shown() -> None:
    with compiled(linear()) as pipe, pytest.raises(AdaptraError, match=r"given input=\[tensor\]: expected .*, input=tensor$"):
        pipe.step([torch.randn(4, 4)], torch.randn(4, 4))


def test_what_is_refused_in_a_step_leaves_the_pipeline_running() -> None:
    x: Any = torch.randn(4, 4)
    with compiled(linear()) as pipe:
        with pytest.raises(AdaptraError):
            pipe.step(x.clone().requires_grad_(), x)
        assert pipe.eval_step(x.clone().requires_grad_(), x) == pipe.step(x, x)


def test_nothing_is_printed_before_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    """Torch prints the graph so far, twice, where a model chooses by a shape that depends on values."""
    with pytest.raises(AdaptraError) as caught:
        try_it("unique")
    assert "def forward" not in "".join(capfd.readouterr())
    assert "a choice by a shape, or a number, that depends on the values" in str(caught.value)
