"""Shapes of batches that only steps have had: no evaluation graph is made for them until an evaluation comes."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name all of torch uses
from torch import Tensor, nn

import adaptra
from adaptra.runtime.control.plans.events import EventKind

MICROBATCHES = 4


class Lengths(nn.Module):
    """Training changes BatchNorm's buffers, evaluation alone reads a bias, and lengths above 5 ask for a flag."""

    scaled = False
    bias: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("bias", torch.linspace(0, 1, 6))
        self.last = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x).flatten(0, 1)).view_as(x)
        x = self.last(x if self.training else x + self.bias)
        return x * 3 if self.scaled and x.shape[1] > 5 else x


class ReturnsLoss(nn.Module):
    """The same model, which returns its loss beside its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.body = make()

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        outputs = self.body(x)
        return {"loss": F.mse_loss(outputs, y), "outputs": outputs}


def make() -> Lengths:
    torch.manual_seed(0)
    return Lengths()


def batch(rows: int, length: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * length + rows)
    return torch.randn(rows, length, 6, generator=generator), torch.randn(rows, length, 6, generator=generator)


def compiled(model: nn.Module, **how: Any) -> adaptra.Pipeline:
    how = {"loss": F.mse_loss, "example_inputs": batch(8, 4), **how}
    return adaptra.compile(model, stages=2, microbatches=MICROBATCHES, **how)


def in_parts(model: nn.Module, given: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return loss and outputs of one process, microbatch by microbatch; in training mode gradients are added up."""
    losses, outputs = list[Tensor](), list[Tensor]()
    for x, y in zip(*(one.tensor_split(MICROBATCHES) for one in given), strict=True):
        outputs.append(model(x))
        losses.append(F.mse_loss(outputs[-1], y) * (len(x) / len(given[0])))
        if model.training:
            losses[-1].backward()
    return torch.stack([one.detach() for one in losses]).sum(), torch.cat(outputs).detach()


def same_gradients(pipe: adaptra.Pipeline, plain: nn.Module) -> bool:
    expected = {name: one.grad for name, one in plain.named_parameters()}
    for name, one in pipe.named_parameters():
        here, there = one.grad, expected[name.removeprefix("body.")]
        if here is None or there is None or not torch.equal(here, there):
            return False
    return True


def told(pipe: adaptra.Pipeline) -> list[str]:
    return [one.text.rpartition("]")[2].rpartition(" in ")[0] for one in pipe.events if one.kind is EventKind.COMPILED]


def test_a_shape_gets_evaluation_graphs_with_its_first_evaluation_and_keeps_those_of_training() -> None:
    plain = make()
    with compiled(make()) as pipe:
        for given in (batch(8, 6), batch(10, 5), batch(12, 7)):
            assert torch.allclose(pipe.step(*given), in_parts(plain, given)[0], rtol=1e-6, atol=0)
        assert same_gradients(pipe, plain)
        before = pipe.session.batches.shapes.compiled()
        assert [(one.trains, one.evaluates) for one in before] == [(True, False)] * 4, "10 rows make two sizes"
        assert told(pipe) == [""] * 3

        for rows, length in ((8, 6), (10, 5)):
            given = batch(rows, length)
            loss, outputs = pipe.eval_step(*given, outputs=True)
            expected = in_parts(copy.deepcopy(plain).eval(), given)
            assert torch.equal(outputs, expected[1]), rows
            assert torch.allclose(loss, expected[0], rtol=1e-6, atol=0)
            assert torch.equal(pipe.eval_step(given[0]), expected[1]), "a call without targets"
        assert told(pipe)[3:] == [" for evaluation too", ""] * 2, "a call without targets has the stages of the one with them"

        after = pipe.session.batches.shapes.compiled()
        assert {id(one.train) for one in after} == {id(one.train) for one in before}, "nothing is differentiated again"
        assert sum(one.evaluates for one in after) == 3
        given = batch(10, 5)
        assert torch.allclose(pipe.step(*given), in_parts(plain, given)[0], rtol=1e-6, atol=0)
        assert same_gradients(pipe, plain)
        assert len(told(pipe)) == 7
        assert {one.name: one.steps for one in pipe.shapes}["x [10, 5, 6], targets [10, 5, 6]"] == 3


def test_a_model_that_returns_its_loss_is_evaluated_with_and_without_it_after_a_step() -> None:
    plain, given = make(), batch(8, 6)
    model = ReturnsLoss()
    model.body.load_state_dict(plain.state_dict())
    with compiled(model, loss=None) as pipe:
        pipe.step(*given)
        in_parts(plain, given)
        loss, outputs = in_parts(copy.deepcopy(plain).eval(), given)
        assert torch.equal(pipe.eval()(*given)["outputs"], outputs)
        assert torch.allclose(pipe.eval_step(*given), loss, rtol=1e-6, atol=0)
        assert told(pipe) == ["", " for evaluation too"], "graphs with the loss serve both"
        pipe.train().step(*given)
        in_parts(plain, given)
        assert same_gradients(pipe, plain)


def test_a_change_that_only_a_shape_of_steps_sees_is_followed() -> None:
    plain, model, given = make(), make(), batch(8, 6)
    with compiled(model) as pipe:
        for one in (batch(8, 4), given):
            pipe.step(*one)
            in_parts(plain, one)
        plain.scaled = model.scaled = True
        assert torch.allclose(pipe.step(*given), in_parts(plain, given)[0], rtol=1e-6, atol=0)
        assert same_gradients(pipe, plain)


def test_messages_of_a_shape_that_is_only_trained_are_rounded_as_the_options_say() -> None:
    given, options = batch(8, 6), adaptra.Options(lossy_bf16=True)
    with compiled(make(), options=options) as pipe, compiled(make(), options=options, example_inputs=given) as other:
        assert torch.equal(pipe.step(*given), other.step(*given))
        expected = {name: one.grad for name, one in other.named_parameters()}
        assert all(torch.equal(one.grad, expected[name]) for name, one in pipe.named_parameters())  # type: ignore[arg-type]  # all have one
