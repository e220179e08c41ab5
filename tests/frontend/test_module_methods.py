"""A pipeline reads like a module: modes, modules, buffers, gradients, inference, and averages of weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as checkpoints
from errors_table import check_documented
from models import Example, square_loss, vectors
from processes import run_processes
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from training import MIXED, call, compiled, microbatches_of, run_step

import adaptra
from adaptra.errors import AdaptraError
from adaptra.graph.ops.random_state import RandomKey, reference_randomness

ROWS, MICROBATCHES, STEPS, DECAY = 8, 4, 3, 0.75
DOCUMENTED = {
    "called": "a pipeline was called in training mode: expected pipe.eval() first, for outputs without gradients; in training "
    "call pipe.step(inputs, targets, outputs=True), which runs the backward pass too",
    "step": "a step in evaluation mode, set by pipe.eval(): expected pipe.train() first; freeze a part of the model by its own "
    "eval() before adaptra.compile",
    "mode": "train(…): expected True for training mode, or False for evaluation mode",
    "to": "to: … is … on …: expected …, as the model had before adaptra.compile: stages, messages and optimizers are made for "
    "its device and dtype; call model.to(...) there",
    "module": "a module of a pipeline was called: expected pipe(inputs), pipe.step or pipe.eval_step, as each rank runs the "
    "ops of its stages and no modules; load pipe.full_state_dict() into the plain model to call that",
    "hook": "a hook of a module of a pipeline was registered, which would never run: expected hooks of pipe.parameters(), or "
    "forward hooks of the model's modules before adaptra.compile",
}
BATCHES = [MIXED.rows(ROWS, seed) for seed in range(STEPS)]


def test_a_call_is_the_model_in_evaluation_mode() -> None:
    model = MIXED.make()
    with compiled(MIXED, BATCHES[0], stages=3, microbatches=MICROBATCHES, model=model) as pipe:
        (x,), _, targets = BATCHES[1]
        assert pipe.training and pipe.eval() is pipe and not pipe.training
        found = pipe(x)
        with torch.no_grad():
            expected = torch.cat([model.eval()(one) for one in x.chunk(MICROBATCHES)])
        model.train()
        assert torch.equal(found, expected) and not found.requires_grad
        assert pipe.train().training and pipe.step(x, targets).isfinite()


class Named(nn.Module):
    """A forward with arguments of the names that a step has."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, inputs: Tensor, scale: Tensor | None = None, targets: Tensor | None = None) -> Any:
        found = self.last(torch.tanh(self.first(inputs)))
        found = found if scale is None else found * scale
        return found if targets is None else square_loss(found, targets)


@pytest.mark.parametrize("case", ["loss", "model"])
def test_arguments_by_name(case: str) -> None:
    x, y = torch.randn(2, ROWS, 8)
    how: Any = {"stages": 2, "microbatches": MICROBATCHES, "loss": square_loss if case == "loss" else None}
    torch.manual_seed(0)
    with adaptra.compile(Named(), **how) as pipe:
        by_name = pipe.step(inputs=x, targets=y)
        evaluated = pipe.eval_step(inputs=x, targets=y)
    torch.manual_seed(0)
    model = Named()
    with torch.no_grad():
        expected = torch.stack([square_loss(model(a), b) for a, b in zip(x.chunk(4), y.chunk(4), strict=True)]).mean()
    assert torch.equal(by_name, expected) and torch.equal(evaluated, expected)
    with adaptra.compile(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), stages=2, microbatches=2, loss=square_loss) as pipe:
        assert torch.equal(pipe.step(inputs=x, targets=y), pipe.step(x, targets=y))


def test_names_modes_buffers_and_gradients() -> None:
    model = MIXED.make()
    wanted = {name: type(one) for name, one in model.named_modules()}
    with compiled(MIXED, BATCHES[0], stages=3, microbatches=MICROBATCHES, model=model) as pipe:
        assert {name: type(one) for name, one in pipe.named_modules()} == wanted
        assert len(list(pipe.modules())) == len(wanted)
        assert dict(pipe.named_modules())["middle.0"].in_features == 8
        held = dict(pipe.local_module.named_parameters(remove_duplicate=False))
        assert held["last.weight"] is held["first.weight"] and held.keys() == {
            name for name, _ in model.named_parameters(remove_duplicate=False)
        }
        copies = {id(one) for one in pipe.parameters()}
        assert all(id(one) in copies for one in held.values())
        assert [name for name, _ in pipe.named_buffers()] == [name for name, _ in model.named_buffers()]
        assert all(a is b for a, b in zip(pipe.buffers(), pipe.local_module.buffers(), strict=True))
        assert pipe.local_module.state_dict().keys() == model.state_dict().keys()
        (x, y), _ = call(BATCHES[0])
        pipe.step(x, y)
        pipe.zero_grad(set_to_none=False)
        assert all(one.grad is not None and not one.grad.any() for one in pipe.parameters())
        pipe.zero_grad()
        assert all(one.grad is None for one in pipe.parameters())
        assert pipe.to("cpu") is pipe is pipe.to(torch.float32) is pipe.to(device=torch.device("cpu"), dtype=torch.float32)
        assert pipe.to(torch.zeros(1), non_blocking=True) is pipe


class Parts(nn.Module):
    """Modules without tensors, one of them used twice, and attributes that keep the model's tensors alive."""

    def __init__(self) -> None:
        super().__init__()
        activation = nn.Tanh()
        self.first = nn.Sequential(nn.Linear(8, 8, bias=False), activation)
        self.last = nn.Sequential(nn.Linear(8, 8), activation)
        self.hidden = [self.first, {"weight": self.last[0].weight}]
        self.sizes = (8, [8])

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x))


PARTS = Example("parts", Parts, vectors(8), square_loss)


def test_attributes_that_are_no_plain_values_are_left_out() -> None:
    with compiled(PARTS, PARTS.rows(ROWS, 0), stages=2, microbatches=MICROBATCHES) as pipe:
        module: Any = pipe.local_module
        assert isinstance(module, Parts) and module.sizes == (8, [8]) and not hasattr(module, "hidden")
        assert module.first[0].bias is None and module.first[1] is module.last[1]


def refused(case: str) -> None:
    with compiled(MIXED, BATCHES[0], stages=2, microbatches=MICROBATCHES) as pipe:
        (x, y), _ = call(BATCHES[0])
        given: Any = "train"
        match case:
            case "called":
                pipe(*x)
            case "step":
                pipe.eval().step(x, y)
            case "mode":
                pipe.train(given)
            case "to":
                pipe.to(torch.bfloat16)
            case "module":
                pipe.local_module(x)
            case _:
                pipe.local_module.register_forward_hook(lambda *_: None)


@pytest.mark.parametrize("case", DOCUMENTED)
def test_what_stays_out_says_what_to_call(case: str) -> None:
    with pytest.raises(AdaptraError) as caught:
        refused(case)
    check_documented(type(caught.value).__name__, str(caught.value), DOCUMENTED[case])


def test_another_device_is_refused() -> None:
    with compiled(MIXED, BATCHES[0], stages=2, microbatches=MICROBATCHES) as pipe, pytest.raises(AdaptraError, match="on cpu"):
        pipe.to("meta")


def average(module: nn.Module, use_buffers: bool) -> AveragedModel:
    return AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(DECAY), use_buffers=use_buffers)


def averaged_alone(use_buffers: bool) -> dict[str, Tensor]:
    """Plain torch in one process: the state of the average after all steps, and the loss with it."""
    model = MIXED.make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    ema = average(model, use_buffers)
    for step, batch in enumerate(BATCHES):
        for k, ((x,), _, targets) in enumerate(microbatches_of(batch, MICROBATCHES)):
            with reference_randomness(RandomKey(0, step, k)):
                (square_loss(model(x), targets) / MICROBATCHES).backward()
        optimizer.step()
        optimizer.zero_grad()
        ema.update_parameters(model)
    return ema.module.state_dict()


def train_with_average(use_buffers: bool, folder: Path) -> tuple[dict[str, Tensor], float, dict[str, Tensor]]:
    """A pipeline: its part of the average after all steps, with a checkpoint on the way, and the loss with the average."""
    with compiled(MIXED, BATCHES[0], stages=2, microbatches=MICROBATCHES) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
        ema = average(pipe.local_module, use_buffers)
        for step, batch in enumerate(BATCHES):
            run_step(pipe, optimizer, batch)
            ema.update_parameters(pipe.local_module)
            if step == 0:
                checkpoints.save({"ema": ema.state_dict()}, checkpoint_id=folder)
                ema = average(pipe.local_module, use_buffers)  # as a new run begins
                saved = {"ema": ema.state_dict()}
                checkpoints.load(saved, checkpoint_id=folder)
                ema.load_state_dict(saved["ema"])
        trained = {name: one.clone() for name, one in pipe.state_dict().items()}
        pipe.load_state_dict(ema.module.state_dict())
        (x, y), _ = call(BATCHES[0])
        loss, whole = pipe.eval_step(x, y), pipe.full_state_dict()
        pipe.load_state_dict(trained)
        assert all(torch.equal(one, trained[name]) for name, one in pipe.state_dict().items())
        return ema.module.state_dict(), loss.item(), whole


def evaluated_alone(state: dict[str, Tensor]) -> float:
    model = MIXED.make()
    model.load_state_dict(state)
    model.eval()
    parts = microbatches_of(BATCHES[0], MICROBATCHES)
    with torch.no_grad():
        return torch.stack([square_loss(model(x), targets) for (x,), _, targets in parts]).mean().item()


@pytest.mark.parametrize("use_buffers", [False, True])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_an_average_of_weights_is_that_of_one_process(use_buffers: bool, tmp_path: Path) -> None:
    expected = averaged_alone(use_buffers)
    found, loss, whole = train_with_average(use_buffers, tmp_path)
    assert found.keys() == expected.keys() == whole.keys()
    assert [name for name, one in expected.items() if not torch.equal(found[name], one)] == []
    assert all(torch.equal(whole[name], one) for name, one in expected.items())
    assert loss == evaluated_alone(expected)


def average_on_rank(rank: int, folder: str) -> tuple[dict[str, list[float]], float, dict[str, list[float]], list[str]]:
    torch.distributed.init_process_group("gloo")
    found, loss, whole = train_with_average(True, Path(folder))
    with compiled(MIXED, BATCHES[0], stages=2, microbatches=MICROBATCHES) as pipe:
        names = [name for name, _ in pipe.named_modules()]
        (x,), _, _ = BATCHES[1]
        assert (pipe.eval()(x) is None) == (rank == 0)
    return {n: t.tolist() for n, t in found.items()}, loss, {n: t.tolist() for n, t in whole.items()}, names


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_each_rank_averages_its_own_stage(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the ranks have
    try:
        expected = averaged_alone(True)
        loss_with_average = evaluated_alone(expected)
    finally:
        torch.set_num_threads(threads)
    (first, loss, whole, names), (second, other, nothing, others) = run_processes(average_on_rank, 2, str(tmp_path))
    assert set(first) | set(second) == set(expected) and set(first) & set(second) == {"first.weight", "last.weight"}
    for part in (first, second):
        assert [name for name, one in part.items() if one != expected[name].tolist()] == []
    assert all(one == expected[name].tolist() for name, one in whole.items())
    assert whole.keys() == expected.keys() and nothing == {}
    assert loss == other == loss_with_average
    assert "middle.0" in names and "middle.0" not in others and "last" in others
