"""Shapes of batches that only evaluations have had: no training graph is made for them until a step comes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name all of torch uses
from torch import Tensor, nn

import adaptra
from adaptra.errors import BatchError
from adaptra.program.schedules import generate
from adaptra.runtime.control.plans.events import EventKind

MICROBATCHES = 4


class Normed(nn.Module):
    """A BatchNorm in each of two stages. It needs two rows in training, and one in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class ReturnsLoss(nn.Module):
    """The same model, which returns its loss beside its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Normed()

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        outputs = self.body(x)
        return {"outputs": outputs, "loss": F.mse_loss(outputs, y)}


def make() -> Normed:
    torch.manual_seed(0)
    return Normed()


def batch(rows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * seed + rows)
    return torch.randn(rows, 6, generator=generator), torch.randn(rows, 6, generator=generator)


def compiled(model: nn.Module, **how: Any) -> adaptra.Pipeline:
    return adaptra.compile(
        model,
        stages=2,
        microbatches=MICROBATCHES,
        example_inputs=batch(8),
        loss=F.mse_loss,
        options=adaptra.Options(**how),
    )


def train(plain: nn.Module, given: tuple[Tensor, Tensor]) -> Tensor:
    """One step of one process, microbatch by microbatch; returns the loss. Gradients are added up."""
    parts = min(len(given[0]), MICROBATCHES)
    losses: list[Tensor] = []
    for x, y in zip(*(one.tensor_split(parts) for one in given), strict=True):
        losses.append(F.mse_loss(plain(x), y))
        (losses[-1] / parts if len(given[0]) % parts == 0 else losses[-1] * (len(x) / len(given[0]))).backward()
    return of_batch([one.detach() for one in losses], len(given[0]))


def evaluated(plain: nn.Module, given: tuple[Tensor, Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Return the outputs of one process in evaluation mode, and the losses of the microbatches."""
    parts = min(len(given[0]), MICROBATCHES)
    plain.eval()
    with torch.no_grad():
        outputs = [plain(one) for one in given[0].tensor_split(parts)]
        losses = [F.mse_loss(one, y) for one, y in zip(outputs, given[1].tensor_split(parts), strict=True)]
    plain.train()
    return torch.cat(outputs), losses


def of_batch(losses: list[Tensor], rows: int) -> Tensor:
    """The mean of microbatches, by their rows if these differ."""
    if rows % len(losses) == 0:
        return torch.stack(losses).mean()
    sizes = [len(one) for one in torch.empty(rows).tensor_split(len(losses))]
    return torch.stack([one * (size / rows) for one, size in zip(losses, sizes, strict=True)]).sum()


def same_gradients(pipe: adaptra.Pipeline, plain: nn.Module) -> bool:
    expected = dict(plain.named_parameters())
    return all(torch.equal(gradient(one), gradient(expected[name])) for name, one in pipe.named_parameters())


def gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def test_a_validation_sets_last_batch_leaves_one_row_per_microbatch() -> None:
    plain = make()
    with compiled(make()) as pipe:
        assert torch.equal(pipe.step(*batch(8)), train(plain, batch(8))), "the statistics of BatchNorm have changed"
        for rows in (4, 5, 3, 1):
            last = batch(rows)
            outputs, losses = evaluated(plain, last)
            loss, beside = pipe.eval_step(*last, outputs=True)
            assert torch.equal(loss, of_batch(losses, rows)), rows
            assert torch.equal(beside, outputs), rows
            assert torch.equal(pipe.eval_step(last[0]), outputs), rows
            assert torch.equal(pipe.eval()(last[0]), outputs), rows
            pipe.train()
        assert torch.equal(pipe.step(*batch(8, 1)), train(plain, batch(8, 1))), "training goes on"
        assert same_gradients(pipe, plain)


def test_a_step_of_a_shape_that_was_only_evaluated_is_compiled_and_trains() -> None:
    plain, given = make(), batch(10)
    with compiled(make(), shapes=1) as pipe:
        loss = pipe.eval_step(*given)
        assert torch.equal(pipe.step(*given), train(plain, given))
        assert same_gradients(pipe, plain)
        after = pipe.eval_step(*given)
        assert torch.equal(after, of_batch(evaluated(plain, given)[1], 10))
        assert not torch.equal(after, loss), "the statistics have changed"
        (_, shape) = pipe.shapes
        assert (shape.rows, shape.steps) == ((3, 3, 2, 2), 3), "one entry, under the cap of one"
        told = [one.text for one in pipe.events if one.kind is EventKind.COMPILED]
        assert [("for evaluation only" in one) for one in told] == [True, False], told
        assert not [one for one in pipe.events if one.kind is EventKind.FORGOTTEN]


def test_a_new_plan_does_not_train_what_is_only_evaluated() -> None:
    plain = make()
    with compiled(make()) as pipe:
        for number in range(12):
            pipe.step(*batch(8, number))
            train(plain, batch(8, number))
            if number == 2:
                pipe.eval_step(*batch(5))
                for worker in pipe.session.workers:
                    worker.controller.suggest(generate("gpipe", 2, MICROBATCHES), "a test")
        assert pipe.plan.version > 0
        assert torch.equal(pipe.eval_step(*batch(5)), of_batch(evaluated(plain, batch(5))[1], 5))


def test_a_step_of_one_row_per_microbatch_says_what_torch_says_and_training_goes_on() -> None:
    plain = make()
    with compiled(make()) as pipe:
        for given in (batch(4), batch(5)):
            pipe.eval_step(*given)
            with pytest.raises(BatchError, match=r"can't be compiled .*Expected more than 1 value per channel when training"):
                pipe.step(*given)
            assert torch.equal(pipe.eval_step(*given), of_batch(evaluated(plain, given)[1], len(given[0])))
        assert torch.equal(pipe.step(*batch(8)), train(plain, batch(8)))


def test_a_model_that_returns_its_loss_evaluates_one_row_whatever_was_called_first() -> None:
    """Calls, evaluations and steps all have the same tensors. A call needs no loss, and what follows does."""
    plain, model = make(), ReturnsLoss()
    model.body.load_state_dict(plain.state_dict())
    with adaptra.compile(model, stages=2, microbatches=MICROBATCHES, example_inputs=batch(8)) as pipe:
        assert torch.equal(pipe.step(*batch(8)), train(plain, batch(8)))
        for rows in (4, 5, 9):
            given = batch(rows)
            outputs, losses = evaluated(plain, given)
            called = pipe.eval()(*given)
            assert torch.equal(called["outputs"], outputs), rows
            assert torch.equal(called["loss"], of_batch(losses, rows)), rows
            assert torch.allclose(called["loss"], F.mse_loss(outputs, given[1]), atol=1e-7), "that of the whole batch"
            loss, beside = pipe.eval_step(*given, outputs=True)
            assert torch.equal(loss, called["loss"]) and torch.equal(beside["loss"], loss), rows
            assert torch.equal(pipe.eval_step(*given), loss), rows
            assert torch.equal(pipe(*given)["outputs"], outputs), rows
            pipe.train()
        pipe.eval()(*batch(12))
        assert torch.equal(pipe.train().step(*batch(12)), train(plain, batch(12)))
        assert [one.steps for one in pipe.shapes] == [1, 4, 4, 4, 2]


@pytest.mark.parametrize("how", [{"lossy_bf16": True}, {"inner": "aot_eager"}])
def test_evaluation_runs_as_the_options_have_stages_run(how: dict[str, Any]) -> None:
    """Four rows in a pipeline of eight are as those of a pipeline whose example has four."""
    model, given = make().eval(), batch(12)
    with compiled(model, **how) as pipe:
        found = pipe.eval_step(*given)
    with adaptra.compile(
        model, stages=2, microbatches=4, example_inputs=given, loss=F.mse_loss, options=adaptra.Options(**how)
    ) as other:
        assert torch.equal(found, other.eval_step(*given))
