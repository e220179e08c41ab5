"""torch.compile(model, backend="adaptra"): a plain loop trains in a pipeline, and what can't is refused with the reason."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from as_backend import MADE, MICROBATCHES, ROWS, caught, compiled, fresh_compiler
from errors_table import check_documented
from models import EXAMPLES, Example, square_loss, vectors
from processes import run_processes
from torch import Tensor, nn
from training import MIXED, Step, train_alone

LAYERS = EXAMPLES["skip_mlp"]
(X,), _, Y = LAYERS.rows(ROWS, 0)


@pytest.fixture(autouse=True)
def fresh(one_thread: None) -> Iterator[None]:
    """Nothing that an earlier test has compiled, and kernels without threads of their own."""
    with fresh_compiler():
        yield


class WithLoss(nn.Module):
    """A model that returns its loss, as a plain loop may have it."""

    def __init__(self, example: Example, model: nn.Module | None = None) -> None:
        super().__init__()
        self.model = example.make() if model is None else model
        self.loss: Any = example.loss

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return self.loss(self.model(inputs), targets)


def loop(model: nn.Module, run: Callable[..., Tensor], batches: list[Any]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Plain training: losses, and the state it ends with."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses: list[Tensor] = []
    for (inputs,), _, targets in batches:
        loss = run(inputs, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses, {name: one.detach().clone() for name, one in model.model.state_dict().items()}  # type: ignore[union-attr]


def unequal(losses: list[Tensor], state: dict[str, Tensor], expected: list[Step]) -> list[str]:
    """What is not bitwise that of one process that trains the same microbatches."""
    found = [f"loss {i}" for i, (one, step) in enumerate(zip(losses, expected, strict=True)) if one != step.losses.mean()]
    return found + [name for name, one in state.items() if not torch.equal(one, expected[-1].state[name])]


def test_it_is_listed_without_being_imported() -> None:
    code = "import sys, torch; print('adaptra' in torch.compiler.list_backends(), 'adaptra' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=55, check=True)
    assert done.stdout.split() == ["True", "False"]


@pytest.mark.parametrize("name", ["gpt_tied", "skip_mlp", "frozen_upstream", "mixed"])
def test_a_plain_loop_trains_bitwise_on_the_same_microbatches(name: str) -> None:
    """Also with a parameter of two stages, whose copies follow the optimizer, dropout, and the statistics of BatchNorm."""
    example = (EXAMPLES | {"mixed": MIXED})[name]
    batches = [example.rows(ROWS, seed) for seed in range(4)]
    model = WithLoss(example)
    losses, state = loop(model, compiled(model), batches)
    assert unequal(losses, state, train_alone(example, batches, MICROBATCHES)) == []
    (pipe,) = MADE
    assert pipe.plan.program.stages == 2 and "2 stages" in pipe.report()


def test_the_losses_are_those_of_the_uncompiled_loop() -> None:
    """But for rounding: the mean of the microbatches' means is the mean of the batch."""
    batches = [LAYERS.rows(ROWS, seed) for seed in range(6)]
    model, plain = WithLoss(LAYERS), WithLoss(LAYERS)
    losses, _ = loop(model, compiled(model), batches)
    expected, _ = loop(plain, plain, batches)
    torch.testing.assert_close(losses, expected)


class HalfPrecision(nn.Module):
    """Runs under autocast in its own forward, or wherever it is called."""

    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.inside = inside
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Tanh()) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        if not self.inside:
            return self.layers(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.layers(x)


@pytest.mark.parametrize("inside", [True, False])
def test_autocast_in_the_model_and_around_the_call_are_cut_and_stay_bitwise(inside: bool) -> None:
    """The loss is under autocast where the whole call is."""
    example = Example("autocast", lambda: HalfPrecision(inside), vectors(16), square_loss)
    within = replace(example, build=lambda: HalfPrecision(True), loss=example.loss if inside else loss_under_autocast)
    batches = [example.rows(ROWS, seed) for seed in range(3)]
    model = WithLoss(example)
    run = compiled(model)

    def call(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not inside):
            return run(x, y)

    losses, state = loop(model, call, batches)
    assert unequal(losses, state, train_alone(within, batches, MICROBATCHES)) == []
    assert "bfloat16" in str(MADE[0]._built.compiled.train[0].outputs)  # pyright: ignore[reportOptionalMemberAccess]


def loss_under_autocast(outputs: Tensor, targets: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return square_loss(outputs, targets)


def test_gradients_are_scaled_and_added_as_autograd_does() -> None:
    model = WithLoss(LAYERS)
    run = compiled(model)
    run(X, Y).backward()
    once = {name: one.grad for name, one in model.named_parameters()}
    model.zero_grad()
    (2.0 * run(X, Y)).backward()
    run(X, Y).backward()
    for name, parameter in model.named_parameters():
        gradient = once[name]
        assert parameter.grad is not None and gradient is not None and torch.equal(parameter.grad, gradient * 3), name


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_one_stage_and_one_microbatch_are_a_faithful_compile(inner: str) -> None:
    batches = [MIXED.rows(ROWS, seed) for seed in range(3)]
    model, plain = WithLoss(MIXED), WithLoss(MIXED)
    torch.manual_seed(1)
    losses, state = loop(model, compiled(model, stages=1, microbatches=1, inner=inner), batches)
    torch.manual_seed(1)
    expected, wanted = loop(plain, plain, batches)
    assert losses == expected
    assert all(torch.equal(one, wanted[name]) for name, one in state.items())


def test_a_call_without_gradients_is_the_model_itself() -> None:
    model = WithLoss(LAYERS)
    run = compiled(model)
    before = run(X, Y)
    with torch.no_grad():
        assert torch.equal(run(X, Y), model(X, Y))
        assert not torch.isnan(before)


# Each mistake has its message.


class Scores(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def on(function: Callable[[nn.Module, Tensor, Tensor], Tensor], **options: Any) -> Callable[[], object]:
    """A call of a compiled function of a small model."""

    def mistake() -> object:
        model = Scores()
        return compiled(lambda x, y: function(model, x, y), **options)(X, Y)

    return mistake


def mean(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return square_loss(model(x), y)


def numbered() -> None:
    model = Scores()
    run = compiled(lambda x, y, times: square_loss(model(x) * times, y))
    for times in (2, 3, 4):
        run(X, Y, times)


def other_batch() -> None:
    model = WithLoss(LAYERS)
    run = compiled(model)
    run(X, Y)
    run(X[:4], Y[:4])


MISTAKES: list[tuple[str, Callable[[], object]]] = [
    ("options: unknown …: expected any of …", on(mean, stagse=4)),
    ("stages=…: expected a whole number of at least 1", on(mean, stages=0)),
    ("microbatches=…: expected a whole number of at least 1", on(mean, microbatches="4")),
    ("seed=…: expected a whole number of 0..2**63-1", on(mean, seed=-1)),
    *(
        ("inner=…: expected another backend of torch.compile, such as 'eager' or 'inductor'", on(mean, inner=given))
        for given in ("outer", "adaptra", 3)
    ),
    ("on_pipeline=…: expected a function that is called with each pipeline, or None", on(mean, on_pipeline=[])),
    (
        "mode=…: expected none: modes are inductor's; options={'inner': 'inductor'} compiles by it",
        lambda: torch._dynamo.optimize(lambda graph, inputs: backend()(graph, inputs, mode="max-autotune"))(Scores())(X),
    ),
    (
        "…: an input that requires a gradient, of a function that returns its loss: expected none, as a step is of parameters "
        "alone; compile what comes before together with it, or return no loss",
        lambda: compiled(mean)(Scores(), X.clone().requires_grad_(), Y),
    ),
    (
        "the loss of the whole batch is … and the mean of its microbatches' losses …: expected a mean over the rows, so that "
        "these are about equal; this one looks like a sum: divide it by the number of rows",
        on(lambda model, x, y: (model(x) - y).square().sum()),
    ),
    *(
        (
            "…: what was traced for … rows does not hold for the … of a microbatch: expected code for any batch size: don't "
            "compare or convert the size of the first dimension",
            on(given),
        )
        for given in (
            lambda model, x, y: mean(model, x, y) * (2 if x.shape[0] == ROWS else 3),
            lambda model, x, y: mean(model, x, y) * (2 if x.shape[0] > 3 else 3),
        )
    ),
    (
        "…: a number that changes from call to call: expected numbers that stay as they are, which become constants, or a "
        "tensor in its place",
        numbered,
    ),
    (
        "inputs: a batch of … rows: expected …, … microbatches of the … rows the pipeline was compiled for; drop or pad a "
        "smaller last batch, or compile another pipeline for it",
        other_batch,
    ),
    (
        "example_inputs: a batch of … rows does not divide into … microbatches: use a batch of … rows or another number of "
        "microbatches",
        on(mean, microbatches=3),
    ),
]


def backend() -> Any:
    from adaptra.dynamo import adaptra_backend

    return adaptra_backend


@pytest.mark.parametrize(("row", "mistake"), MISTAKES)
def test_a_mistake_is_met_with_its_documented_message(row: str, mistake: Callable[[], object]) -> None:
    error = caught(mistake)
    check_documented(type(error).__name__, str(error), row)


# Under a launcher.


WITHOUT_GRADIENTS = (
    "a call without gradients: under a launcher a rank trains the parameters of its own stage only, and this call needs all of "
    "them: load the ranks' states into a plain model, or use adaptra.compile and its eval_step"
)


def train_over_processes(rank: int) -> tuple[list[str], set[str], str, str]:
    torch.distributed.init_process_group("gloo")
    example = EXAMPLES["gpt_tied"]
    batches = [example.rows(ROWS, seed) for seed in range(3)]
    model = WithLoss(example)
    run = compiled(model)
    losses, state = loop(model, run, batches)
    own = {name.removeprefix("model.") for name in MADE[0].state_dict()}
    held = {name: one for name, one in state.items() if name in own}
    found = unequal(losses, held, train_alone(example, batches, MICROBATCHES))
    with torch.no_grad():
        error = caught(lambda: run(*batches[0][0], batches[0][2]))
    MADE[0].close()
    return found, own, type(error).__name__, str(error)


@pytest.mark.processes
@pytest.mark.timeout(240)
def test_a_plain_loop_on_every_rank_trains_bitwise_each_rank_its_own_stage() -> None:
    results = run_processes(train_over_processes, 2, timeout=220)
    names = set(EXAMPLES["gpt_tied"].make().state_dict())
    assert set().union(*(own for _, own, *_ in results)) | {"head.weight"} == names
    for found, own, kind, message in results:
        assert found == [] and 0 < len(own) < len(names)
        check_documented(kind, message, WITHOUT_GRADIENTS)
