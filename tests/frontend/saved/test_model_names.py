"""Names follow the model's own state_dict: a pipeline and the plain model load what the other saves."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as checkpoints
from errors_table import check_documented
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import adaptra
from adaptra.errors import StateError

X = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
pytestmark = pytest.mark.usefixtures("one_thread")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.linear(x)))

    def reset_parameters(self) -> None:
        """Those of its parts are enough."""


class WithExtra(Block):
    """With state that is no tensor of the model: a dict, as a tokenizer's version or a scaling recipe."""

    def __init__(self) -> None:
        super().__init__()
        self.extra: Any = {"version": 1, "scale": torch.ones(2)}

    def get_extra_state(self) -> Any:
        return copy.deepcopy(self.extra)

    def set_extra_state(self, state: Any) -> None:
        self.extra = copy.deepcopy(state)


def plain() -> nn.Module:
    return nn.Sequential(*(Block() for _ in range(3)))


def wrapped() -> nn.Module:
    return nn.Sequential(*(checkpoint_wrapper(Block()) for _ in range(3)))


def extra() -> nn.Module:
    return nn.Sequential(WithExtra(), Block(), WithExtra())


def extra_wrapped() -> nn.Module:
    return nn.Sequential(checkpoint_wrapper(WithExtra()), Block(), checkpoint_wrapper(WithExtra()))


def renamed() -> nn.Module:
    """Saved under other names, without a scratch buffer, and with a version; loaded under either name."""
    model: Any = plain()
    model[0].register_buffer("scratch", torch.zeros(2))

    def out(_: nn.Module, state: dict[str, Any], prefix: str, __: Any) -> None:
        for name in [one for one in state if ".linear." in one]:
            state[name.replace(".linear.", ".dense.")] = state.pop(name)
        state.pop(f"{prefix}0.scratch")
        state[f"{prefix}version"] = 3

    def back(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for name in [one for one in state if ".dense." in one]:
            state[name.replace(".dense.", ".linear.")] = state.pop(name)
        state.pop(f"{prefix}version", None)
        state.setdefault(f"{prefix}0.scratch", module[0].scratch)

    model.register_state_dict_post_hook(out)
    model.register_load_state_dict_pre_hook(back)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": plain,
    "wrapped": wrapped,
    "extra": extra,
    "extra wrapped": extra_wrapped,
    "renamed": renamed,
}


def made(kind: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = MODELS[kind]()
    for index, module in enumerate(model.modules()):
        if isinstance(module, WithExtra):
            module.extra["version"] = 10 * seed + index
    return model


def compiled(model: nn.Module, **options: Any) -> adaptra.Pipeline:
    return adaptra.compile(model, stages=2, microbatches=2, example_inputs=(X, X), loss=nn.functional.mse_loss, **options)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one.cpu(), other.cpu())
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(value, other[name]) for name, value in one.items())
    return one == other


@pytest.mark.parametrize("kind", MODELS)
def test_plain_models_and_pipelines_load_each_others_state(kind: str, tmp_path: Path) -> None:
    first, second = made(kind, 1), made(kind, 2)
    wanted = copy.deepcopy(dict(first.state_dict()))
    with compiled(first) as pipe:
        assert pipe.state_dict().keys() == wanted.keys()
        full: dict[str, Any] = pipe.full_state_dict()
        assert same(dict(sorted(full.items())), dict(sorted(wanted.items())))
        other = made(kind, 3)
        other.load_state_dict(full, strict=True)
        assert same(dict(other.state_dict()), wanted)

        pipe.load_state_dict(second.state_dict())
        assert same(dict(sorted(pipe.full_state_dict().items())), dict(sorted(second.state_dict().items())))
        assert same(dict(first.state_dict()), dict(second.state_dict())), "the modules' extra state too"
        with pytest.raises(StateError, match="missing"):
            pipe.load_state_dict({name: one for name, one in wanted.items() if name != next(iter(wanted))})
        with pytest.raises(StateError, match="unknown"):
            pipe.load_state_dict({**wanted, "foreign.weight": X})
        pipe.load_state_dict(pipe.state_dict())

        optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.05)
        pipe.step(X, X)
        optimizer.step()
        trained = copy.deepcopy(pipe.full_state_dict())
        training = adaptra.TrainingState(pipe, optimizer)
        moments = copy.deepcopy(training.state_dict()["optimizer"])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            checkpoints.save({"training": training}, checkpoint_id=tmp_path / "saved", no_dist=True)
    del first
    model = made(kind, 4)
    with compiled(model) as pipe, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        training = adaptra.TrainingState(pipe, torch.optim.AdamW(pipe.parameters()))
        checkpoints.load({"training": training}, checkpoint_id=tmp_path / "saved", no_dist=True)
        assert same(pipe.full_state_dict(), trained)
        assert same(dict(sorted(model.state_dict().items())), dict(sorted(trained.items())))
        assert same(training.state_dict()["optimizer"], moments)
    assert all(name in trained for name in moments), "a parameter's optimizer state has its name in the model's state"


def version(pipe: adaptra.Pipeline) -> int:
    state: dict[str, Any] = pipe.full_state_dict()
    return state["0._extra_state"]["version"]


def test_extra_state_is_asked_for_when_it_is_saved_and_outlives_the_model() -> None:
    model: Any = made("extra", 1)
    with compiled(model) as pipe:
        model[0].extra["version"] = 77
        assert version(pipe) == 77
        del model
        assert version(pipe) == 77
        pipe.load_state_dict(made("extra", 2).state_dict())
        assert version(pipe) == 21


def test_hooks_outlive_the_model() -> None:
    for kind in ("wrapped", "renamed"):
        model = made(kind, 1)
        pipe = compiled(model)
        del model
        with pipe:
            pipe.load_state_dict(made(kind, 2).state_dict())
            assert same(dict(sorted(pipe.full_state_dict().items())), dict(sorted(made(kind, 2).state_dict().items())))


@pytest.mark.parametrize("kind", ["plain", "wrapped"])
def test_weights_take_the_models_own_file(kind: str, tmp_path: Path) -> None:
    """And that of the model without wrappers, as it is on the hub."""
    model = made(kind, 1)
    save_file({name: one.clone() for name, one in model.state_dict().items()}, tmp_path / "model.safetensors")
    with torch.device("meta"):
        empty = MODELS[kind]()
    with compiled(empty, weights=tmp_path) as pipe:
        assert same(dict(sorted(pipe.full_state_dict().items())), dict(sorted(model.state_dict().items())))


COMPUTED = (
    "state_dict: …: a hook of the model's state_dict makes it: expected hooks that rename tensors, or leave some out, as each "
    "rank has its own stages; load pipe.named_parameters() into the plain model"
)


def test_tensors_that_a_hook_computes_are_refused() -> None:
    model = made("plain", 1)

    def merge(_: nn.Module, state: dict[str, Any], prefix: str, __: Any) -> None:
        state["merged"] = state["0.linear.weight"] @ state["1.linear.weight"]

    model.register_state_dict_post_hook(merge)
    with compiled(model) as pipe:
        pipe.step(X, X)
        for call in (pipe.full_state_dict, pipe.state_dict, lambda: pipe.load_state_dict({})):
            with pytest.raises(StateError) as error:
                call()
            check_documented("StateError", str(error.value), COMPUTED)
