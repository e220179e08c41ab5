"""A table of kinds of state and randomness in a model's code: each is followed to the bit, or refused by module and line."""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import random
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from errors_table import check_documented
from torch import Tensor, nn

import adaptra
from adaptra.errors import CaptureError

Run = Callable[[Any, Tensor], Tensor]
"""What the middle of a model does: called with the model and its activation."""

DRAWS = (
    "… at …: it draws from …: expected torch's random ops (torch.rand, dropout), which a pipeline draws anew for each step and "
    "microbatch; in a choice between layers multiply by a mask, such as (torch.rand(()) > p), or give the model as a list of "
    "stages"
)
CHANGES = (
    "… at …: it changes … from call to call: what it draws or counts would stay as it was at adaptra.compile: expected a "
    "registered buffer that ops change (register_buffer, then add_), an argument of the model, or a list of stages"
)
ASKS = (
    "… at …: it depends on the time or on the system's random numbers: what it draws or counts would stay as it was at "
    "adaptra.compile: expected a registered buffer that ops change (register_buffer, then add_), an argument of the model, or "
    "a list of stages"
)
IN_PLACE = (
    "… at …: it changes in place …, which is no buffer: expected register_buffer for a tensor that the model's code changes, "
    "so that it is kept, saved and restored with the model"
)
TRAINED = (
    "…: it requires a gradient and is no parameter of the model, so nothing would train it: expected torch.nn.Parameter as an "
    "attribute of the model, or nn.ParameterList or ParameterDict; or its detach()"
)


compile_pipeline = adaptra.compile
"""Taken here, since the import behind it draws a number from Python's random."""


class Model(nn.Module):
    """Two layers, and in between any code."""

    calls = 0

    def __init__(self, run: Run, **held: Any) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)
        self.run = run
        for name, value in held.items():
            if isinstance(value, nn.Module | nn.Parameter) or name != "buffers":
                setattr(self, name, value)
        for name, value in held.get("buffers", {}).items():
            self.register_buffer(name, value)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.run(self, self.first(x)))


def square(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean()


class Held:
    def __init__(self) -> None:
        self.steps = 0


counted = {"steps": 0}
GENERATOR = np.random.default_rng(0)


def counts_globally(model: Any, x: Tensor) -> Tensor:
    counted["steps"] += 1
    return x * counted["steps"]


def starting_globally(model: Any, x: Tensor) -> Tensor:
    globals()["counted"] = {"steps": counted["steps"] + 1}
    return x * counted["steps"]


def counts_in_class(model: Any, x: Tensor) -> Tensor:
    Model.calls += 1
    return x / Model.calls


def counts_in_closure() -> Run:
    steps = 0

    def run(model: Any, x: Tensor) -> Tensor:
        nonlocal steps
        steps += 1
        return x * steps

    return run


def counts_in_dict(model: Any, x: Tensor) -> Tensor:
    model.held["n"] += 1
    return x


def counts_in_object(model: Any, x: Tensor) -> Tensor:
    model.held.n += 1
    return x


def counts_in(held: list[int], model: Any, x: Tensor) -> Tensor:
    held.append(0)
    return x * len(held)


def setting(name: str, made: Callable[[Any, Tensor], Any], used: Callable[[Any, Tensor], Tensor] = lambda model, x: x) -> Run:
    """Code that sets an attribute, and then computes."""

    def run(model: Any, x: Tensor) -> Tensor:
        setattr(model, name, made(model, x))
        return used(model, x)

    return run


def appending(model: Any, x: Tensor) -> Tensor:
    model.history.append(x.detach())
    return x + model.history[-2] if len(model.history) > 1 else x


def replacing(model: Any, x: Tensor) -> Tensor:
    before = x if model.cache is None else x + model.cache
    model.cache = x.detach()
    return before


def once(model: Any, x: Tensor) -> Tensor:
    if not hasattr(model, "offset"):
        model.offset = x.detach().mean()
    return x - model.offset


def at_first(model: Any, x: Tensor) -> Tensor:
    if model.is_new:
        model.is_new = False
        return 2 * x
    return x


def decayed(model: Any, x: Tensor) -> Tensor:
    model.scale = model.scale * 0.5
    return x * model.scale


def iterated(step: Callable[[Any], Any]) -> Run:
    return lambda model, x: x * (1 + step(model))


def in_place(change: Callable[[Tensor, Tensor], Any]) -> Run:
    def run(model: Any, x: Tensor) -> Tensor:
        change(model.count, x.detach())
        return x * model.count

    return run


def filled(make: Callable[[Any], Tensor]) -> Run:
    def run(model: Any, x: Tensor) -> Tensor:
        if getattr(model, "table", None) is None:
            model.table = make(model)
        return x * model.table

    return run


def registering(model: Any, x: Tensor) -> Tensor:
    if not hasattr(model, "table"):
        model.register_buffer("table", torch.arange(4.0).cos(), persistent=False)
    return x * model.table


def hooked() -> Model:
    model = Model(lambda model, x: x)
    seen: list[Any] = []

    def scale(module: nn.Module, given: Any, made: Tensor) -> Tensor:
        product: Tensor = made * len(seen)
        return product

    model.first.register_forward_hook(scale)
    model.first.register_forward_pre_hook(lambda module, given: seen.append(0))
    return model


def numbered(count: int) -> Iterator[int]:
    yield from range(count)


def written(model: Any, x: Tensor) -> Tensor:
    model.counts[0] += 1
    return x * float(model.counts[0])


def deep(model: Any, x: Tensor) -> Tensor:
    model.config["held"][0].steps += 1
    return x * model.config["held"][0].steps


def collected(model: Any, x: Tensor) -> Tensor:
    model.losses.clear()
    model.losses.append(x.square().mean())
    return x + model.losses[0]


def trained(**held: Any) -> Callable[[], Model]:
    def scale(model: Any, x: Tensor) -> Tensor:
        found = model.scale
        found = found() if callable(found) else found
        return x * (found["it"] if isinstance(found, dict) else found[0] if isinstance(found, list) else found)

    return lambda: Model(scale, **{name: make() for name, make in held.items()})


def ones() -> Tensor:
    return torch.ones(4, requires_grad=True)


REPLACED = (
    "…: the model's code replaces this buffer, of … and shape …, by one of …: expected the same shape and dtype, so that a "
    "stage can keep it"
)
REFUSED: dict[str, tuple[str, Callable[[], Model]]] = {
    "Python's random": (DRAWS, lambda: Model(lambda model, x: x * random.random())),
    "a choice between layers": (DRAWS, lambda: Model(lambda model, x: x if random.random() < 0.01 else model.first(x))),
    "random.shuffle": (DRAWS, lambda: Model(lambda model, x: x[:, random.sample(range(4), 4)])),
    "numpy's shared generator": (DRAWS, lambda: Model(lambda model, x: x * float(np.random.rand()))),
    "a mask of numpy": (DRAWS, lambda: Model(lambda model, x: x * torch.from_numpy(np.random.randint(0, 2, 4)))),
    "numpy's Generator held": (
        DRAWS,
        lambda: Model(iterated(lambda model: model.draw.random()), draw=np.random.default_rng(1)),
    ),
    "numpy's RandomState held": (
        DRAWS,
        lambda: Model(iterated(lambda model: model.draw.normal()), draw=np.random.RandomState(1)),
    ),
    "random.Random held in a list": (
        DRAWS,
        lambda: Model(iterated(lambda model: model.draw[0].random()), draw=[random.Random(1)]),
    ),
    "a global Generator": (DRAWS, lambda: Model(iterated(lambda model: GENERATOR.random()))),
    "torch.manual_seed": (DRAWS, lambda: Model(lambda model, x: x * torch.manual_seed(3).initial_seed())),
    "os.urandom": (ASKS, lambda: Model(iterated(lambda model: int.from_bytes(os.urandom(4), "big")))),
    "an unseeded generator": (ASKS, lambda: Model(iterated(lambda model: np.random.default_rng().random()))),
    "SystemRandom": (ASKS, lambda: Model(iterated(lambda model: random.SystemRandom().random()))),
    "the time": (ASKS, lambda: Model(iterated(lambda model: time.perf_counter()))),
    "a counter": (CHANGES, lambda: Model(setting("steps", lambda model, x: model.steps + 1), steps=0)),
    "a counter made by forward": (CHANGES, lambda: Model(setting("steps", lambda model, x: getattr(model, "steps", 0) + 1))),
    "a counter in a dict": (CHANGES, lambda: Model(counts_in_dict, held={"n": 0})),
    "a counter in an object": (
        CHANGES,
        lambda: Model(counts_in_object, held=argparse.Namespace(n=0)),
    ),
    "a counter deep in a config": (CHANGES, lambda: Model(deep, config={"held": (Held(),)})),
    "a counter that is an array": (CHANGES, lambda: Model(written, counts=np.zeros(2))),
    "a counter in a closure": (CHANGES, lambda: Model(counts_in_closure())),
    "a counter of the class": (CHANGES, lambda: Model(counts_in_class)),
    "a counter in a global dict": (CHANGES, lambda: Model(counts_globally)),
    "a global that is replaced": (CHANGES, lambda: Model(starting_globally)),
    "a counter of a partial": (
        CHANGES,
        lambda: Model(functools.partial(counts_in, [])),
    ),
    "itertools.count": (CHANGES, lambda: Model(iterated(lambda model: next(model.numbers)), numbers=itertools.count())),
    "a generator function": (CHANGES, lambda: Model(iterated(lambda model: next(model.numbers)), numbers=numbered(99))),
    "a list's iterator": (CHANGES, lambda: Model(iterated(lambda model: next(model.numbers)), numbers=iter([1] * 99))),
    "a counter in a hook": (CHANGES, hooked),
    "a tensor of the last call": (CHANGES, lambda: Model(replacing, cache=None)),
    "a list of all calls": (CHANGES, lambda: Model(appending, history=[])),
    "a value of the first call": (CHANGES, lambda: Model(once)),
    "a first call that differs": (CHANGES, lambda: Model(at_first, is_new=True)),
    "a constant that decays": (CHANGES, lambda: Model(decayed, scale=torch.ones(4))),
    "a tensor counted in place": (IN_PLACE, lambda: Model(in_place(lambda count, x: count.add_(1)), count=torch.zeros(()))),
    "a mean kept in place": (
        IN_PLACE,
        lambda: Model(in_place(lambda count, x: count.lerp_(x.mean(), 0.1)), count=torch.zeros(())),
    ),
    "a view changed in place": (IN_PLACE, lambda: Model(in_place(lambda count, x: count[1:].zero_()), count=torch.ones(4))),
    "a trained tensor": (TRAINED, trained(scale=ones)),
    "a trained tensor in a list": (TRAINED, trained(scale=lambda: [ones()])),
    "a trained tensor in a dict": (TRAINED, trained(scale=lambda: {"it": ones()})),
    "a trained tensor in a closure": (TRAINED, trained(scale=lambda: functools.partial(lambda held: held, ones()))),
    "a layer in a list": (TRAINED, lambda: Model(lambda model, x: model.layers[0](x), layers=[nn.Linear(4, 4)])),
}

FOLLOWED: dict[str, Callable[[], Model]] = {
    "the last output": lambda: Model(setting("output", lambda model, x: x.detach())),
    "the last output, declared": lambda: Model(setting("output", lambda model, x: x), output=None),
    "outputs in a new list": lambda: Model(
        setting("outputs", lambda model, x: [x, 2 * x], lambda model, x: x + model.outputs[1])
    ),
    "losses in a list that is cleared": lambda: Model(collected, losses=[]),
    "the last shape": lambda: Model(setting("rows", lambda model, x: x.shape[0])),
    "a flag": lambda: Model(setting("is_ready", lambda model, x: True), is_ready=False),
    "a table made once": lambda: Model(filled(lambda model: torch.arange(4.0).cos()), table=None),
    "a table made by forward": lambda: Model(filled(lambda model: torch.arange(4.0).cos())),
    "a buffer that is None": lambda: Model(filled(lambda model: torch.arange(4.0).cos()), buffers={"table": None}),
    "a buffer that forward registers": lambda: Model(registering),
    "a mask made anew": lambda: Model(
        setting("mask", lambda model, x: torch.eye(4).tril()[0], lambda model, x: x * model.mask)
    ),
    "the time, not used": lambda: Model(lambda model, x: x if time.time() > 0 else 2 * x),
    "a buffer that counts": lambda: Model(
        in_place(lambda count, x: count.add_(1)), buffers={"count": torch.zeros((), dtype=torch.int64)}
    ),
    "a buffer that counts without gradient": lambda: Model(
        in_place(torch.no_grad()(lambda count, x: count.lerp_(x.mean(), 0.1))), buffers={"count": torch.zeros(())}
    ),
    "a buffer that is replaced": lambda: Model(
        setting("mean", lambda model, x: 0.9 * model.mean + x.detach().mean(0), lambda model, x: x - model.mean),
        buffers={"mean": torch.zeros(4)},
    ),
    "a parameter list": lambda: Model(lambda model, x: x * model.scales[0], scales=nn.ParameterList([torch.ones(4)])),
    "a detached trained tensor": lambda: Model(lambda model, x: x * model.scale.detach(), scale=ones()),
}


def attributes(model: Model) -> dict[str, Any]:
    """What a test can compare before and after: copies of containers, and identities of the rest."""
    own = {name: value for name, value in vars(model).items() if name not in ("_modules", "_parameters")}
    return {name: list(value) if isinstance(value, list | dict) else id(value) for name, value in own.items()}


def compiled(model: nn.Module, batch: tuple[Tensor, Tensor], loss: Any = square, stages: int = 2) -> adaptra.Pipeline:
    return compile_pipeline(model, stages=stages, microbatches=2, example_inputs=batch, loss=loss)


def states() -> Any:
    """The states of Python's and of numpy's shared generators."""
    legacy: Any = np.random.get_state(legacy=False)
    return random.getstate(), legacy["state"]["key"].tolist(), legacy["state"]["pos"]


@pytest.fixture
def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(4, 4), torch.randn(4, 2)


@pytest.mark.parametrize("kind", REFUSED)
def test_what_no_capture_can_follow_is_refused_with_its_line(kind: str, batch: tuple[Tensor, Tensor]) -> None:
    row, make = REFUSED[kind]
    model = make()
    count = deepcopy(getattr(model, "count", None))
    before = states(), torch.get_rng_state(), vars(model).copy(), counted["steps"], Model.calls
    with pytest.raises(CaptureError) as caught:
        compiled(model, batch)
    check_documented("CaptureError", str(caught.value), row)
    if row is not TRAINED:
        assert f"{__file__}:" in str(caught.value)
    assert "module " in str(caught.value)
    assert before[0] == states()
    assert torch.equal(before[1], torch.get_rng_state())
    assert before[2:] == (vars(model), counted["steps"], Model.calls)
    if isinstance(count, Tensor):
        assert torch.equal(count, vars(model)["count"])


@pytest.mark.parametrize("kind", FOLLOWED)
def test_state_that_changes_no_result_is_taken(kind: str, batch: tuple[Tensor, Tensor]) -> None:
    model = FOLLOWED[kind]()
    plain = FOLLOWED[kind]()
    plain.load_state_dict(model.state_dict())
    before = attributes(model)
    with compiled(model, batch) as pipe:
        assert attributes(model) == before
        optimizers = [torch.optim.SGD(one.parameters(), 0.1) for one in (pipe, plain)]
        for _ in range(2):
            loss = pipe.step(*batch)
            losses: list[Tensor] = []
            for x, y in zip(*(one.chunk(2) for one in batch), strict=True):
                losses.append(square(plain(x), y))
                (losses[-1] / 2).backward()
            assert torch.equal(loss, torch.stack(losses).detach().sum() / 2)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()


def test_a_buffer_that_grows_is_refused_by_its_name(batch: tuple[Tensor, Tensor]) -> None:
    grows = setting("rows", lambda model, x: torch.cat([model.rows, x.detach()]))
    with pytest.raises(CaptureError) as caught:
        compiled(Model(grows, buffers={"rows": torch.zeros(2, 4)}), batch)
    check_documented("CaptureError", str(caught.value), REPLACED)


def counting_loss() -> Any:
    steps: list[int] = []

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        steps.append(1)
        return square(outputs, targets) * len(steps)

    return loss


def closing_over(value: Any, use: Callable[[Any, Tensor], Tensor]) -> Any:
    return lambda outputs, targets: square(use(value, outputs), targets)


LOSSES: dict[str, tuple[str, Callable[[], Any]]] = {
    "counts": (CHANGES, counting_loss),
    "draws": (DRAWS, lambda: lambda outputs, targets: square(outputs, targets) * random.random()),
    "draws from a Generator": (DRAWS, lambda: closing_over(np.random.default_rng(1), lambda held, out: out * held.random())),
    "trains a tensor": (TRAINED, lambda: closing_over([torch.ones(2, requires_grad=True)], lambda held, out: out * held[0])),
    "trains a layer": (TRAINED, lambda: closing_over(nn.Linear(2, 2), lambda held, out: held(out))),
    "changes a tensor": (IN_PLACE, lambda: closing_over(torch.zeros(()), lambda held, out: out * held.add_(1))),
}


@pytest.mark.parametrize("kind", LOSSES)
def test_a_loss_that_keeps_state_is_refused(kind: str, batch: tuple[Tensor, Tensor]) -> None:
    row, make = LOSSES[kind]
    with pytest.raises(CaptureError) as caught:
        compiled(Model(lambda model, x: x), batch, make())
    check_documented("CaptureError", str(caught.value), row)
    assert "the loss" in str(caught.value)
