"""Training in float16 with a scaled loss: the same scales, skipped steps and numbers as torch's GradScaler in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from errors_table import check_documented
from models import Example, square_loss, vectors
from processes import run_processes
from torch import Tensor, nn
from training import Step, compiled, differences, loss_of, microbatches_of

import adaptra
from adaptra.errors import AdaptraError

DOCUMENTED = {
    "scale": "scaler.scale: the pipeline's step scales the loss and runs the backward passes itself: expected pipe.step, then "
    "scaler.step(optimizer) and scaler.update()",
    "second": "this pipeline has a grad_scaler already: expected one, which all optimizers share",
}

MICROBATCHES, STEPS = 4, 12
SPLIT = ("last.0",)
SETTINGS: dict[str, Any] = {"init_scale": 2.0**20, "growth_interval": 3}


class Steep(nn.Module):
    """Under float16 the gradients of the first layers overflow long before those of the last ones."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))
        self.last = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, dtype=torch.float16):
            return self.last(self.first(x) * 8.0).float()


STEEP = Example("steep", Steep, vectors(8), square_loss)
BATCHES = [STEEP.rows(4 * MICROBATCHES, step) for step in range(STEPS)]
Made = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def fused_adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, fused=True)


class Trained:
    """What training has left: the steps, and after each the scale and which parameters had gradients that are not finite."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.scales: list[float] = []
        self.overflowed: list[set[str]] = []

    def take(self, losses: Tensor, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        gradients = [(name, None if one.grad is None else one.grad.clone()) for name, one in named]
        self.overflowed.append({name for name, one in gradients if one is not None and not one.isfinite().all()})
        # No number equals itself where it is none.
        gradients = [(name, None if one is None else one.nan_to_num(123.0)) for name, one in gradients]
        self.steps.append(Step(losses, gradients, {}))

    def finish(
        self,
        scaler: torch.amp.GradScaler,
        optimizer: torch.optim.Optimizer,
        clip: Callable[[], Tensor],
        state: dict[str, Tensor],
    ) -> None:
        scaler.unscale_(optimizer)
        clip()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        self.scales.append(scaler.get_scale())
        self.steps[-1].state.update({name: one.detach().clone() for name, one in state.items()})


def train_alone(make: Made = adamw) -> Trained:
    """Plain torch in one process."""
    model, found = STEEP.make(), Trained()
    optimizer, scaler = make(model.parameters()), torch.amp.GradScaler("cpu", **SETTINGS)
    for batch in BATCHES:
        losses: list[Tensor] = []
        for part in microbatches_of(batch, MICROBATCHES):
            loss = loss_of(STEEP, model, part)
            scaler.scale(loss / MICROBATCHES).backward()
            losses.append(loss.detach())
        found.take(torch.stack(losses), model.named_parameters())
        found.finish(scaler, optimizer, lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0), model.state_dict())
    return found


def train(pipe: adaptra.Pipeline, make: Made = adamw) -> Trained:
    """The same in a pipeline."""
    found = Trained()
    optimizer, scaler = make(pipe.parameters()), pipe.grad_scaler(**SETTINGS)
    for args, _, targets in BATCHES:
        loss = pipe.step(args, targets)
        assert torch.equal(loss, pipe.microbatch_losses.mean())
        found.take(pipe.microbatch_losses, pipe.named_parameters())
        found.finish(scaler, optimizer, lambda: pipe.clip_grad_norm_(1.0), pipe.state_dict())
    return found


def compiled_steep(split: Sequence[str] = SPLIT) -> Any:
    return compiled(STEEP, BATCHES[0], stages=len(split) + 1, microbatches=MICROBATCHES, split=split)


@pytest.mark.parametrize("make", [adamw, fused_adamw])
@pytest.mark.parametrize("split", [(), SPLIT, ("first.2", "last.0", "last.2")])
def test_scaled_training_is_bitwise_that_of_one_process(split: Sequence[str], make: Made, one_thread: None) -> None:
    expected = train_alone(make)
    with compiled_steep(split) as pipe:
        found = train(pipe, make)
    assert differences(found.steps, expected.steps) == []
    assert (found.scales, found.overflowed) == (expected.scales, expected.overflowed)
    assert {bool(names) for names in found.overflowed} == {True, False}, "steps were skipped and steps were taken"
    changes = {after / before for before, after in zip(found.scales, found.scales[1:], strict=False)}
    assert changes == {0.5, 1.0, 2.0}


def train_on_a_rank(_rank: int) -> tuple[list[str], list[float], list[set[str]], list[float]]:
    torch.distributed.init_process_group("gloo")
    torch.set_num_threads(1)
    expected = train_alone()
    with compiled_steep() as pipe:
        found = train(pipe)
        different = differences(found.steps, expected.steps, whole=False)
    return different, found.scales, found.overflowed, expected.scales


@pytest.mark.processes
def test_all_ranks_skip_a_step_that_overflowed_on_one() -> None:
    """Numbers are those of one process, so what was skipped was skipped on both ranks, though only one had overflowed."""
    results = run_processes(train_on_a_rank, 2)
    assert [found for found, *_ in results] == [[], []]
    (_, scales, first, expected), (_, others, last, _) = results
    assert scales == others == expected
    overflowed = {(bool(one), bool(other)) for one, other in zip(first, last, strict=True)}
    assert (False, False) in overflowed
    assert {(True, False), (False, True)} & overflowed
    assert max(expected[expected.index(min(expected)) :]) > min(expected), "the scale has come up again"


def test_the_state_of_a_scaler_comes_back() -> None:
    with compiled_steep() as pipe:
        saved = (first := pipe.grad_scaler(**SETTINGS)).state_dict()
        first.update(2.0**7)
        assert first.state_dict() == saved | {"scale": 2.0**7}
    with compiled_steep() as pipe:
        scaler = pipe.grad_scaler()
        scaler.load_state_dict(first.state_dict())
        assert scaler.state_dict() == first.state_dict()
        args, _, targets = BATCHES[0]
        pipe.step(args, targets)
        scaled = {name: one.grad for name, one in pipe.named_parameters()}
    with compiled_steep() as pipe:
        assert pipe.grad_scaler(enabled=False).get_scale() == 1.0
        pipe.step(args, targets)
        for name, one in pipe.named_parameters():
            torch.testing.assert_close(scaled[name], one.grad * 2.0**7, rtol=1e-2, atol=1e-2)


def refusal(call: Callable[[], object]) -> tuple[str, str]:
    with pytest.raises(AdaptraError) as caught:
        call()
    return type(caught.value).__name__, str(caught.value)


def test_what_a_pipeline_does_itself_and_a_second_scaler_are_refused() -> None:
    with compiled_steep() as pipe:
        scaler = pipe.grad_scaler()
        check_documented(*refusal(lambda: scaler.scale(torch.ones(()))), DOCUMENTED["scale"])
        check_documented(*refusal(pipe.grad_scaler), DOCUMENTED["second"])
