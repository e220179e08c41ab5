"""Gradient hooks of parameters run once per step with the whole gradient; hooks that can't run are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from as_backend import caught, compiled, fresh_compiler
from errors_table import check_documented
from models import EXAMPLES
from processes import run_processes
from torch import Tensor, nn
from torch.nn.modules.module import register_module_full_backward_hook
from training import compiled as pipeline_of
from training import loss_of, microbatches_of

import adaptra

ROWS, MICROBATCHES = 8, 4
MLP, TIED = EXAMPLES["skip_mlp"], EXAMPLES["gpt_tied"]
STEPS = 3
BATCHES = [MLP.rows(ROWS, seed) for seed in range(2 * STEPS)]
HOOKED = {name for number, (name, _) in enumerate(MLP.make().named_parameters()) if number % 3 < 2}
(X,), _, Y = BATCHES[0]

pytestmark = pytest.mark.usefixtures("one_thread")

BACKWARD = (
    "model: a backward hook of …: expected none, as a pipeline runs the backward pass of its own graphs, not of modules; hooks "
    "of parameters (register_hook) run once per step"
)
WHILE_IT_RUNS = (
    "…: the model calls … of a tensor while it runs, which a graph can't hold: expected hooks of parameters alone, registered "
    "before or after adaptra.compile; they run once per step"
)
COPIES = (
    "…: a gradient hook of a parameter that stages of several ranks use, each with a copy of its own: expected none, as the "
    "copies would become different; change its gradient between the step and optimizer.step()"
)
SOME = (
    "replica … has gradient hooks of …: expected hooks of the same parameters in all replicas, as their copies would become "
    "different; register them on every rank, and let the hook look at pipe.replica"
)
MOVES = (
    "…: … has a gradient hook, which stays with this process: expected parameters without hooks where they move between ranks; "
    "remove it by its handle, and register it of pipe.parameters() afterwards"
)


class Hooks:
    """A hook on each of a model's parameters but every third; they write down what they were given."""

    def __init__(self) -> None:
        self.seen: dict[str, list[Tensor]] = {}

    def register(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        for number, (name, parameter) in enumerate(named):
            if number % 3 == 0:
                parameter.register_hook(lambda gradient, name=name: self.note(name, gradient) * 0.5)
            elif number % 3 == 1:
                parameter.register_post_accumulate_grad_hook(partial(self.change, name))

    def change(self, name: str, parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad = self.note(name, parameter.grad).abs()

    def note(self, name: str, gradient: Tensor) -> Tensor:
        self.seen.setdefault(name, []).append(gradient.clone())
        return gradient


Gradients = list[dict[str, Tensor]]


def by_hand(replicas: int = 1) -> tuple[Gradients, dict[str, list[Tensor]]]:
    """What plain torch has in ``grad`` after each step, and what each hook is to be given.

    The second step adds to the first one's gradients.
    """
    model, seen = MLP.make(), {}
    kept: dict[str, Tensor] = {}
    found: Gradients = []
    for index in range(STEPS):
        halves = [BATCHES[index + STEPS * replica] for replica in range(replicas)]
        total: dict[str, Tensor] = {}
        for batch in halves:
            model.zero_grad()
            for name, one in model.named_parameters():
                one.grad = kept[name].clone() if name in kept and name not in HOOKED else None
            for part in microbatches_of(batch, MICROBATCHES):
                (loss_of(MLP, model, part) / MICROBATCHES).backward()
            own = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
            total = {name: total[name] + one if total else one.clone() for name, one in own.items()}
        for number, name in enumerate(total):
            gradient = total[name] / replicas
            earlier = kept.get(name, torch.zeros(()))
            if number % 3 == 0:
                seen.setdefault(name, []).append(gradient)
                gradient = earlier + gradient * 0.5
            elif number % 3 == 1:
                seen.setdefault(name, []).append(earlier + gradient)
                gradient = (earlier + gradient).abs()
            total[name] = gradient
        found.append(total)
        kept = total if index == 0 else {}
    return found, seen


def trained(pipe: adaptra.Pipeline, replica: int = 0) -> Gradients:
    found: Gradients = []
    for index in range(STEPS):
        args, _, targets = BATCHES[index + STEPS * replica]
        pipe.step(args, targets)
        found.append({name: one.grad.clone() for name, one in pipe.named_parameters() if one.grad is not None})
        if index:
            for one in pipe.parameters():
                one.grad = None
    return found


def unequal(found: Gradients, hooks: Hooks, replicas: int = 1) -> list[str]:
    """What is not bitwise as by hand."""
    expected, given = by_hand(replicas)
    wrong = [f"step {i}: {k}" for i, one in enumerate(expected) for k, v in one.items() if not torch.equal(found[i][k], v)]
    return wrong + [k for k, v in given.items() if len(v) != len(hooks.seen[k]) or not all(map(torch.equal, v, hooks.seen[k]))]


@pytest.mark.parametrize("before", [True, False])
def test_hooks_run_once_per_step_with_the_whole_gradient(before: bool) -> None:
    """Registered of the model before compile, or of the pipeline's parameters afterwards."""
    model, hooks = MLP.make(), Hooks()
    if before:
        hooks.register(model.named_parameters())
    with pipeline_of(MLP, BATCHES[0], stages=2, microbatches=MICROBATCHES, model=model) as pipe:
        if not before:
            hooks.register(dict(pipe.named_parameters()).items())
        assert unequal(trained(pipe), hooks) == []


def test_stages_given_as_modules_have_the_same_hooks() -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4), nn.Linear(4, 4)]
    seen: list[Tensor] = []
    layers[0].weight.register_hook(lambda gradient: seen.append(gradient) or gradient * 2)
    x, y = torch.ones(8, 4), torch.zeros(8, 4)
    loss = nn.functional.mse_loss
    with adaptra.compile(layers, stages=2, microbatches=4, example_inputs=(x, y), loss=loss) as pipe:
        pipe.step(x, y)
    assert len(seen) == 1 and layers[0].weight.grad is not None and torch.equal(layers[0].weight.grad, seen[0] * 2)


def test_an_optimizer_in_the_backward_pass_trains_as_one_after_it() -> None:
    """Each parameter's hook steps it and drops its gradient; without one nothing else would."""
    states = []
    for in_hooks in (True, False):
        with pipeline_of(MLP, BATCHES[0], stages=2, microbatches=MICROBATCHES) as pipe:
            optimizers = {one: torch.optim.SGD([one], lr=0.1) for one in pipe.parameters()}

            def step(parameter: Tensor, optimizers: Any = optimizers) -> None:
                optimizers[parameter].step()
                parameter.grad = None

            for one in optimizers if in_hooks else ():
                one.register_post_accumulate_grad_hook(step)
            for args, _, targets in BATCHES:
                pipe.step(args, targets)
                for one in () if in_hooks else optimizers:
                    step(one)
            states.append(pipe.state_dict())
    assert all(torch.equal(one, states[1][name]) for name, one in states[0].items())


def replicated(rank: int) -> list[str]:
    torch.distributed.init_process_group("gloo")
    model, hooks = MLP.make(), Hooks()
    hooks.register(model.named_parameters())
    with pipeline_of(MLP, BATCHES[0], stages=1, microbatches=MICROBATCHES, model=model) as pipe:
        return unequal(trained(pipe, pipe.replica), hooks, replicas=2)


@pytest.mark.processes
def test_hooks_are_given_the_mean_over_all_replicas() -> None:
    assert run_processes(replicated, 2) == [[], []]


def hooked_on_some(rank: int, other: bool) -> list[tuple[str, str]]:
    """The errors of steps that add up gradients, where a hook changes nothing but not every replica has it."""
    torch.distributed.init_process_group("gloo")
    found: list[tuple[str, str]] = []
    for reduction in ("mean", "sum"):
        with pipeline_of(MLP, BATCHES[0], stages=1, microbatches=MICROBATCHES, reduction=reduction) as pipe:
            first, second, *_ = pipe.parameters()
            args, _, targets = BATCHES[rank]
            pipe.step(args, targets)
            for one in ([first] if rank == 0 else [second]) if other else [first] * (1 - rank):
                one.register_hook(torch.clone)
            try:
                pipe.step(args, targets)
            except Exception as error:
                found.append((type(error).__name__, str(error)))
        torch.distributed.barrier()
    return found


@pytest.mark.processes
@pytest.mark.parametrize("other", [False, True], ids=["none", "of another parameter"])
def test_a_hook_that_not_every_replica_has_is_refused(other: bool) -> None:
    """Gradients of the first step would count half in one replica and one and a half times in the other.

    The error of the first rank that found it is raised on the others too, behind the number of that rank.
    """
    for errors in zip(*run_processes(hooked_on_some, 2, other), strict=True):
        assert any(kind == "OptionError" for kind, _ in errors)
        for _, message in errors:
            check_documented("OptionError", message.rpartition("OptionError: ")[2], SOME)


# What can't run is refused.


class Hooking(nn.Module):
    """Hooks a tensor while it runs."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.layers = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        getattr(x, self.name)(*([print] if self.name == "register_hook" else []))
        return self.layers[1](x)


def compile_hooked(change: Callable[[nn.Module], object]) -> None:
    model = MLP.make()
    change(model)
    with pipeline_of(MLP, BATCHES[0], stages=2, microbatches=MICROBATCHES, model=model):
        pass


def hook_all_modules() -> None:
    handle = register_module_full_backward_hook(print)
    try:
        compile_hooked(lambda model: None)
    finally:
        handle.remove()


def torch_compile_hooked() -> None:
    with fresh_compiler():
        model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
        model[1].register_full_backward_hook(print)
        compiled(Wrapper(model))(X, Y)


class Wrapper(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.inner(x) - y).square().mean()


def compile_hooking(name: str) -> None:
    with pipeline_of(MLP, BATCHES[0], stages=2, microbatches=MICROBATCHES, model=Hooking(name)):
        pass


def hook_copies(before: bool) -> None:
    model, batch = TIED.make(), TIED.rows(ROWS, 0)
    name, parameter = next(iter(model.named_parameters()))
    if before:
        parameter.register_hook(print)
    with pipeline_of(TIED, batch, stages=2, microbatches=MICROBATCHES, model=model) as pipe:
        next(one for given, one in pipe.named_parameters() if given == name).register_hook(print)
        pipe.step(batch[0], batch[2])


def move_hooked() -> None:
    with pipeline_of(MLP, BATCHES[0], stages=2, microbatches=MICROBATCHES) as pipe:
        next(pipe.parameters()).register_hook(print)
        pipe.take_split(["layers.1"], torch.optim.SGD(pipe.parameters()))


MISTAKES: list[tuple[str, Callable[[], object]]] = [
    (BACKWARD, lambda: compile_hooked(lambda model: next(model.children()).register_full_backward_hook(print))),
    (BACKWARD, lambda: compile_hooked(lambda model: model.register_full_backward_pre_hook(print))),
    (BACKWARD, lambda: compile_hooked(lambda model: model.register_backward_hook(print))),
    (BACKWARD, hook_all_modules),
    (BACKWARD, torch_compile_hooked),
    (WHILE_IT_RUNS, lambda: compile_hooking("register_hook")),
    (WHILE_IT_RUNS, lambda: compile_hooking("retain_grad")),
    (COPIES, lambda: hook_copies(before=True)),
    (COPIES, lambda: hook_copies(before=False)),
    (MOVES, move_hooked),
]


@pytest.mark.parametrize(("row", "mistake"), MISTAKES)
def test_hooks_that_cannot_run_are_refused(row: str, mistake: Callable[[], object]) -> None:
    error = caught(mistake)
    check_documented(type(error).__name__, str(error), row)
    assert row != WHILE_IT_RUNS or __file__ in str(error)
