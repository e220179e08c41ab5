"""A parameter without optimizer state has none after loading either. A state that does not fit changes nothing."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as checkpoints
from errors_table import check_documented
from torch import Tensor, nn

import adaptra
from adaptra.errors import StateError

X = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """With a layer whose result nobody uses, as BERT's pooler, one that is frozen, and statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.pooler = nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.norm = nn.BatchNorm1d(4)
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.norm(self.first(x)))
        self.pooler(x)
        return self.last(torch.tanh(self.frozen(x)))


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


@pytest.fixture
def pipe(one_thread: None) -> Generator[adaptra.Pipeline]:
    with adaptra.compile(
        net(), stages=2, microbatches=2, example_inputs=(X, X), loss=nn.functional.mse_loss, split=["frozen"]
    ) as made:
        yield made


Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class Own(torch.optim.Optimizer):
    """A user's optimizer, which keeps something beside its state and groups."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})
        self.rates = {"first": 2.0}

    def step(self, closure: Any = None) -> Any:
        with torch.no_grad():
            for group in self.param_groups:
                for one in group["params"]:
                    if one.grad is not None:
                        state = self.state[one]
                        factor = 1.0 if state else self.rates["first"]
                        state["last"], state["count"] = one.grad.clone(), state.get("count", 0) + 1
                        one -= group["lr"] * factor * one.grad


OPTIMIZERS: dict[str, Make] = {
    "adam": lambda some: torch.optim.Adam(some, lr=0.05, amsgrad=True),
    "fused": lambda some: torch.optim.AdamW(some, lr=0.05, fused=True),
    "foreach": lambda some: torch.optim.AdamW(some, lr=torch.tensor(0.05), foreach=False),
    "momentum": lambda some: torch.optim.SGD(some, lr=0.1, momentum=0.9, dampening=0.5),
    "plain": lambda some: torch.optim.SGD(some, lr=0.1),
    "rprop": lambda some: torch.optim.Rprop(some, lr=0.05),
    "adagrad": lambda some: torch.optim.Adagrad(some, lr=0.1, initial_accumulator_value=0.5),
    "rmsprop": lambda some: torch.optim.RMSprop(some, lr=0.05, momentum=0.5, centered=True, foreach=True),
    "nadam": lambda some: torch.optim.NAdam(some, lr=0.05),
    "adafactor": lambda some: torch.optim.Adafactor(some, lr=0.05),
    "own": lambda some: Own(some, lr=0.1),
}


def save(training: adaptra.TrainingState, folder: Path, asynchronous: bool = False) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if asynchronous:
            saving: Any = checkpoints.async_save({"training": training}, checkpoint_id=folder, no_dist=True)
            saving.result()
            return
        checkpoints.save({"training": training}, checkpoint_id=folder, no_dist=True)


def load(training: adaptra.TrainingState, folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        checkpoints.load({"training": training}, checkpoint_id=folder, no_dist=True)


def train(pipe: adaptra.Pipeline, optimizer: torch.optim.Optimizer, steps: int = 3) -> list[float]:
    losses: list[float] = []
    for _ in range(steps):
        losses.append(pipe.step(X, X).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def alone(make: Make, steps: int) -> tuple[list[float], torch.optim.Optimizer, Net]:
    model = net()
    optimizer = make(model.parameters())
    losses: list[float] = []
    for _ in range(steps):
        parts = [nn.functional.mse_loss(model(part), part) for part in X.chunk(2)]
        for part in parts:
            (part / 2).backward()
        losses.append(torch.stack(parts).detach().mean().item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, optimizer, model


@pytest.mark.parametrize("at", [0, 2])
def test_a_run_goes_on_from_before_and_after_the_first_step(at: int, pipe: adaptra.Pipeline, tmp_path: Path) -> None:
    """In the process that goes back, whose optimizer has state, and in a new one, whose optimizer has none."""
    start = pipe.full_state_dict()
    for name, make in OPTIMIZERS.items():
        losses, plain, _ = alone(make, at + 3)
        pipe.load_state_dict(start)
        pipe.session.go_on_at(0)
        optimizer = make(pipe.parameters())
        training = adaptra.TrainingState(pipe, optimizer)
        assert train(pipe, optimizer, at) == losses[:at], name
        save(training, tmp_path / name)
        kept = copy.deepcopy(training.state_dict())
        assert train(pipe, optimizer) == losses[at:], name

        load(training, tmp_path / name)
        assert train(pipe, optimizer) == losses[at:], f"{name}: back in one process"
        training.load_state_dict(kept)
        assert train(pipe, optimizer) == losses[at:], f"{name}: back by a dict"
        fresh = make(pipe.parameters())
        load(adaptra.TrainingState(pipe, fresh), tmp_path / name)
        assert train(pipe, fresh) == losses[at:], f"{name}: in a new process"
        assert len(fresh.state) == len(plain.state), f"{name}: the unused layer has state as in plain torch"


def test_saving_is_no_step(pipe: adaptra.Pipeline) -> None:
    """No hook and no scheduler takes it for one, no random number is drawn and no value written."""
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: scheduler.step())
    with torch.no_grad():
        for parameter in pipe.parameters():
            parameter.flatten()[0] = -0.0
    before = [(one._version, one.signbit()) for one in pipe.parameters()]
    random = torch.get_rng_state()
    adaptra.TrainingState(pipe, optimizer).state_dict()
    assert calls == [] and scheduler.last_epoch == 0 and optimizer.param_groups[0]["lr"] == 0.05
    for parameter, (version, signs) in zip(pipe.parameters(), before, strict=True):
        assert parameter._version == version and torch.equal(parameter.signbit(), signs) and parameter.grad is None
    assert torch.equal(torch.get_rng_state(), random)


def test_a_closure_is_refused(pipe: adaptra.Pipeline) -> None:
    with pytest.raises(StateError) as error:
        adaptra.TrainingState(pipe, torch.optim.LBFGS(pipe.parameters())).state_dict()
    check_documented("StateError", str(error.value), CLOSURE)


CLOSURE = (
    "optimizer …: a step of one parameter alone, by which the form of its state is found, fails: …: expected one whose step "
    "takes no closure and each parameter for itself"
)
LACKS = "training state: it lacks …: expected all of TrainingState.state_dict()"
GROUPS = "training state: its groups are …: expected …, the groups of this optimizer"
SETTINGS = "training state: group … lacks …: expected the settings of a …, as saved"
PART = "training state: the optimizer's state of … lacks …: expected all that was saved of an optimizer of the same kind"
SHAPE = "training state: the optimizer's … of … has …: expected …, as for a parameter of shape …"
NAMES = "state_dict: missing …, unknown …: expected the names of the model that was compiled; strict=False takes what fits"
NONE = (
    "training state: … is in group … of this optimizer, and was in none when it was saved: expected an optimizer of the same "
    "parameters"
)
MOVED = (
    "training state: … was in group … of the optimizer, and is in group …: expected the same groups as when it was saved, in "
    "the same order"
)
DAMAGED: dict[str, tuple[str, Callable[[dict[str, Any]], Any]]] = {
    "no dict": ("training state: a …: expected a dict, as TrainingState.state_dict() returns", lambda state: [state]),
    **{f"no {key}": (LACKS, lambda state, key=key: state.pop(key)) for key in ("model", "optimizer", "groups", "optimized")},
    "no groups": (GROUPS, lambda state: state.update(groups=[])),
    "two groups": (GROUPS, lambda state: state.update(groups=state["groups"] * 2)),
    "groups of another kind": (GROUPS, lambda state: state.update(groups=None)),
    "other settings": (SETTINGS, lambda state: state["groups"][0].pop("betas")),
    "no settings": (SETTINGS, lambda state: state.update(groups=[3])),
    "half the state": (PART, lambda state: state["optimizer"].pop("last.bias")),
    "half of a state": (PART, lambda state: state["optimizer"]["last.bias"].pop("exp_avg")),
    "state is a tensor": (PART, lambda state: state["optimizer"].update({"last.bias": X})),
    "half the parameters": (NONE, lambda state: state["optimized"].pop("last.bias")),
    "half the model": (NAMES, lambda state: state["model"].pop("last.bias")),
    "half of all": (
        NAMES,
        lambda state: [state[key].pop("last.bias") for key in ("model", "optimizer", "optimized")],
    ),
    "foreign shape": (SHAPE, lambda state: state["optimizer"]["last.bias"].update(exp_avg=torch.zeros(5))),
    "a number": (SHAPE, lambda state: state["optimizer"]["last.bias"].update(exp_avg=1.0)),
    "another group": (MOVED, lambda state: state["optimized"]["last.bias"].__setitem__(0, 1)),
    "optimizer is a list": (
        "training state: its … is a …: expected a dict by parameters' names",
        lambda state: state.update(optimizer=[]),
    ),
    "a damaged mark": (
        "training state: … has … in 'optimized': expected a group and a bool",
        lambda state: state["optimized"].update({"last.bias": "yes"}),
    ),
}


def snapshot(pipe: adaptra.Pipeline, optimizer: torch.optim.Optimizer) -> Any:
    state = copy.deepcopy(adaptra.TrainingState(pipe, optimizer).state_dict())
    return {"buffers": [one.clone() for one in pipe.buffers()], **state}


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(value, other[key]) for key, value in one.items())
    if isinstance(one, list):
        return len(one) == len(other) and all(map(equal, one, other))
    return one == other


def test_a_state_that_does_not_fit_changes_nothing(pipe: adaptra.Pipeline) -> None:
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.05)
    training = adaptra.TrainingState(pipe, optimizer)
    train(pipe, optimizer)
    good = copy.deepcopy(training.state_dict())
    train(pipe, optimizer, 1)
    before = snapshot(pipe, optimizer)
    for case, (row, damage) in DAMAGED.items():
        bad: Any = copy.deepcopy(good)
        damaged = damage(bad)
        with pytest.raises(StateError) as error:
            training.load_state_dict(damaged if case == "no dict" else bad)
        check_documented("StateError", str(error.value), row)
        assert equal(snapshot(pipe, optimizer), before), case
    training.load_state_dict(good)
    assert not equal(snapshot(pipe, optimizer), before)


def test_another_optimizers_state_is_refused(pipe: adaptra.Pipeline) -> None:
    sgd = torch.optim.SGD(pipe.parameters(), lr=0.05, momentum=0.9)
    train(pipe, sgd, 1)
    saved = copy.deepcopy(adaptra.TrainingState(pipe, sgd).state_dict())
    optimizer = torch.optim.AdamW(pipe.parameters())
    for change in ({}, {"groups": adaptra.TrainingState(pipe, optimizer).state_dict()["groups"]}):
        with pytest.raises(StateError):
            adaptra.TrainingState(pipe, optimizer).load_state_dict(saved | change)
        assert not optimizer.state


@pytest.mark.parametrize("by", ["checkpoint", "asynchronous", "file"])
def test_what_is_unfrozen_later_has_no_state_until_it_is_stepped(by: str, pipe: adaptra.Pipeline, tmp_path: Path) -> None:
    """Whatever is frozen when a state is saved and when it is loaded. Placeholders take no room in a checkpoint."""

    def through(training: adaptra.TrainingState, path: Path) -> Callable[[adaptra.TrainingState], None]:
        if by == "file":
            file = io.BytesIO()
            torch.save(training.state_dict(), file)
            return lambda other: other.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
        save(training, path, asynchronous=by == "asynchronous")
        return lambda other: load(other, path)

    def entries(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return {name: dict(optimizer.state[one]) for name, one in named.items() if one in optimizer.state}

    named = dict(pipe.named_parameters())
    frozen = named["frozen.weight"]
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.05)
    training = adaptra.TrainingState(pipe, optimizer)
    train(pipe, optimizer, 1)
    load_frozen, had = through(training, tmp_path / "frozen"), copy.deepcopy(entries(optimizer))
    load_frozen(training)
    assert equal(entries(optimizer), had)

    frozen.grad = torch.ones_like(frozen)
    optimizer.step()
    load_stepped, has = through(training, tmp_path / "stepped"), copy.deepcopy(entries(optimizer))
    assert has.keys() - had.keys() == {"frozen.weight"}
    load_frozen(training)
    assert equal(entries(optimizer), had), "back to where it was frozen"
    fresh = torch.optim.AdamW(pipe.parameters(), lr=0.05)
    load_stepped(adaptra.TrainingState(pipe, fresh))
    assert equal(entries(fresh), has), "to where it was trained, while it is frozen"
    assert all(type(one) is Tensor for state in entries(fresh).values() for one in state.values())
    frozen.requires_grad_(True)
    fresh = torch.optim.AdamW(pipe.parameters(), lr=0.05)
    load_frozen(adaptra.TrainingState(pipe, fresh))
    assert equal(entries(fresh), had), "saved frozen, loaded trained"


def test_placeholders_take_no_room(one_thread: None, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(512, 512).requires_grad_(False), nn.Linear(512, 4))
    x, y = torch.randn(4, 512), torch.randn(4, 4)
    with adaptra.compile(model, stages=2, microbatches=2, example_inputs=(x, y), loss=nn.functional.mse_loss) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters())
        save(adaptra.TrainingState(pipe, optimizer), tmp_path / "saved")
    saved = sum(one.stat().st_size for one in (tmp_path / "saved").rglob("*"))
    assert saved < 512 * 512 * 4 * 1.1, "no more than the model"


def test_groups_go_on_with_their_settings(pipe: adaptra.Pipeline) -> None:
    named = dict(pipe.named_parameters())
    groups = [
        {"params": [one for name, one in named.items() if "bias" not in name], "weight_decay": 0.1},
        {"params": [one for name, one in named.items() if "bias" in name], "lr": 0.3},
        {"params": []},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.05)
    saved = copy.deepcopy(adaptra.TrainingState(pipe, optimizer).state_dict())
    other = torch.optim.AdamW([{**group, "lr": 1.0, "weight_decay": 0.0} for group in groups], lr=0.05)
    adaptra.TrainingState(pipe, other).load_state_dict(saved)
    assert [(one["lr"], one["weight_decay"]) for one in other.param_groups] == [(0.05, 0.1), (0.3, 0.01), (0.05, 0.01)]
    swapped = torch.optim.AdamW([groups[1], groups[0], groups[2]])
    with pytest.raises(StateError) as error:
        adaptra.TrainingState(pipe, swapped).load_state_dict(saved)
    check_documented("StateError", str(error.value), MOVED)
