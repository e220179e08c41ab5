"""torch.compile(model, backend="adaptra"): a plain loop trains in a pipeline, and what can't is refused with the reason."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from as_backend import MADE, MICROBATCHES, ROWS, caught, compiled, fresh_compiler
from errors_table import check_documented
from models import EXAMPLES, Example, square_loss, vectors
from processes import run_processes
from torch import Tensor, nn
from training import MIXED, Step, microbatches_of, train_alone

from adaptra.frontend.dynamo import BackendOptions
from adaptra.graph.ops.random_state import RandomKey, reference_randomness

LAYERS = EXAMPLES["skip_mlp"]


def rows() -> tuple[Tensor, Tensor]:
    """Inputs and targets; processes ask for them where their test runs, which tells their device."""
    (inputs,), _, targets = LAYERS.rows(ROWS, 0)
    return inputs, targets


X, Y = rows()


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
    return losses, {name: one.detach().clone() for name, one in model.get_submodule("model").state_dict().items()}


def unequal(losses: list[Tensor], state: dict[str, Tensor], expected: list[Step]) -> list[str]:
    """What is not bitwise that of one process that trains the same microbatches."""
    found = [f"loss {i}" for i, (one, step) in enumerate(zip(losses, expected, strict=True)) if one != step.losses.mean()]
    return found + [name for name, one in state.items() if not torch.equal(one, expected[-1].state[name])]


def test_it_is_listed_without_being_imported() -> None:
    code = "import sys, torch; print('adaptra' in torch.compiler.list_backends(), 'adaptra' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
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
        self.layers = nn.Sequential(*(nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.Tanh()) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        if not self.inside:
            return self.layers(x)
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
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
        with torch.autocast(x.device.type, dtype=torch.bfloat16, enabled=not inside):
            return run(x, y)

    losses, state = loop(model, call, batches)
    assert unequal(losses, state, train_alone(within, batches, MICROBATCHES)) == []
    built = MADE[0]._session
    assert built is not None and "bfloat16" in str(built.compiled.train[0].outputs)


def loss_under_autocast(outputs: Tensor, targets: Tensor) -> Tensor:
    with torch.autocast(outputs.device.type, dtype=torch.bfloat16):
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


MISTAKES: list[tuple[str, Callable[[], object]]] = [
    ("options: unknown …: expected any of …", on(mean, stagse=4)),
    ("stages=…: expected a whole number of at least 1", on(mean, stages=0)),
    ("microbatches=…: expected a whole number of at least 1", on(mean, microbatches="4")),
    ("gradients=…: expected 'everywhere' or 'stage'", on(mean, gradients="all")),
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
        "example_inputs: a batch of … rows does not divide into … microbatches: use a batch of … rows or another number of "
        "microbatches",
        on(mean, microbatches=3),
    ),
]


def backend() -> Any:
    from adaptra.frontend.dynamo import adaptra_backend

    return adaptra_backend


@pytest.mark.parametrize(("row", "mistake"), MISTAKES)
def test_a_mistake_is_met_with_its_documented_message(row: str, mistake: Callable[[], object]) -> None:
    error = caught(mistake)
    check_documented(type(error).__name__, str(error), row)


# Under a launcher.


WITHOUT_GRADIENTS = (
    "a call without gradients: with gradients='stage' a rank trains the parameters of its own stage only, and this call needs "
    "all of them: expected gradients='everywhere', or adaptra.compile and its eval_step"
)


def plain_loop(model: nn.Module, run: Callable[..., Tensor], batches: list[Any], parts: int | None) -> list[Any]:
    """Clipped steps, the norm before, and an evaluation after each; given ``parts``, in plain torch with microbatches."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    found: list[Any] = []
    for index, (inputs, _, targets) in enumerate(batches):
        if parts is None:
            loss = run(*inputs, targets)
            loss.backward()
        else:
            rows = len(targets)
            count = max(number for number in range(1, parts + 1) if rows % number == 0)
            losses: list[Tensor] = []
            for k, part in enumerate(microbatches_of((inputs, {}, targets), count)):
                with reference_randomness(RandomKey(0, index, k)):
                    losses.append(model(*part[0], part[2]))
                (losses[-1] / count).backward()
            loss = torch.stack([one.detach() for one in losses]).mean()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            found += [loss.detach(), norm, run(*inputs, targets)]
        model.train()
    return [*found, *(one.clone() for one in model.state_dict().values())]


def batches_of(example: Example, *rows: int) -> list[Any]:
    return [example.rows(count, seed) for seed, count in enumerate(rows)]


@pytest.mark.parametrize(("name", "rows"), [("gpt_tied", (8, 3, 8, 5)), ("mixed", (8, 6, 8, 6))])
def test_batches_of_other_sizes_have_pipelines_of_their_own(name: str, rows: tuple[int, ...]) -> None:
    """Five rows are one microbatch, as they have no other divisor up to four."""
    example = (EXAMPLES | {"mixed": MIXED})[name]
    batches = batches_of(example, *rows)
    model, plain = WithLoss(example), WithLoss(example)
    found = plain_loop(model, compiled(model), batches, None)
    expected = plain_loop(plain, plain, batches, MICROBATCHES)
    assert len(MADE) == len(set(rows)) and all(map(torch.equal, found, expected))


def train_over_processes(rank: int) -> tuple[list[int], list[tuple[int, int]], list[str], Lean]:
    torch.distributed.init_process_group("gloo")
    model, plain = WithLoss(MIXED), WithLoss(MIXED)
    batches = batches_of(MIXED, 16, 12, 16)  # into eight microbatches and six, four for each of two stages at most
    run = torch.compile(model, backend="adaptra", options={"adapt": False, "on_pipeline": MADE.append})
    left = plain_loop(model, run, batches, None)
    expected = plain_loop(plain, plain, batches, 8)
    unequal = [index for index, (one, other) in enumerate(zip(left, expected, strict=True)) if not torch.equal(one, other)]
    programs = [pipe.plan.program for pipe in MADE]
    while MADE:
        MADE.pop().close()
    made = [(len(one.placement), one.microbatches) for one in programs]
    return unequal, made, outputs_over_processes(), lean_over_processes()


def outputs_over_processes() -> list[str]:
    """The parameters without the right gradient on this rank, of a function that returns no loss."""
    model, plain = LAYERS.make(), LAYERS.make()
    run, (inputs, targets) = compiled(model), rows()
    square_loss(run(inputs), targets).backward()
    square_loss(plain(inputs), targets).backward()
    MADE.pop().close()
    expected = {name: one.grad for name, one in plain.named_parameters() if one.grad is not None}
    found = {name: one.grad for name, one in model.named_parameters()}
    assert found.keys() == expected.keys()
    return [name for name, one in found.items() if one is None or not torch.allclose(one, expected[name], atol=1e-6)]


Lean = tuple[int, int, str, str]


def lean_over_processes() -> Lean:
    """How many parameters have gradients and how many there are, and the error of a call without gradients."""
    model = WithLoss(LAYERS)
    run, batch = compiled(model, gradients="stage"), rows()
    run(*batch).backward()
    parameters = list(model.parameters())
    with torch.no_grad():
        error = caught(lambda: run(*batch))
    MADE.pop().close()
    return sum(one.grad is not None for one in parameters), len(parameters), type(error).__name__, str(error)


@pytest.mark.processes
def test_a_plain_loop_on_every_rank_leaves_the_whole_model_on_every_rank() -> None:
    """Clipping, evaluation, the state and short batches are bitwise those of one process."""
    for unequal, made, outputs, lean in run_processes(train_over_processes, 2):
        assert (unequal, outputs) == ([], []) and made == [(2, 8), (2, 6)]
        own, number, kind, message = lean
        assert 0 < own < number
        check_documented(kind, message, WITHOUT_GRADIENTS)


def train_over_replicas(rank: int) -> list[tuple[list[Any], bool]]:
    """Of a function that returns its loss and of one that returns outputs: gradients, and if they are the mean of replicas."""
    torch.distributed.init_process_group("gloo")
    found: list[tuple[list[Any], bool]] = []
    drawn, wanted = rows()
    batches = [(drawn + replica, wanted) for replica in range(2)]
    for has_loss in (True, False):
        model, plain = LAYERS.make(), LAYERS.make()
        run = compiled(WithLoss(LAYERS, model)) if has_loss else compiled(model)
        inputs, targets = batches[rank // 2]
        (run(inputs, targets) if has_loss else square_loss(run(inputs), targets)).backward()
        for inputs, targets in batches:
            (square_loss(plain(inputs), targets) / 2).backward()
        MADE.pop().close()
        pairs = [(one.grad, other.grad) for one, other in zip(model.parameters(), plain.parameters(), strict=True)]
        are_close = all(one is not None and other is not None and torch.allclose(one, other, atol=1e-6) for one, other in pairs)
        found.append(([None if one is None else one.tolist() for one, _ in pairs], are_close))
    return found


@pytest.mark.processes
def test_the_mean_over_replicas_reaches_every_rank() -> None:
    results = run_processes(train_over_replicas, 4)
    assert all(are_close for _, are_close in results[0])
    assert all(result == results[0] for result in results[1:])


class Branching(nn.Module):
    """Its way depends on values, where torch.compile cuts it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Scores(), Scores()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.first(x)
        if x.sum() > 0:
            x = x * 2
        return square_loss(self.second(x), y)


def test_a_part_that_can_not_be_pipelined_names_where_the_function_is_cut() -> None:
    error = caught(lambda: compiled(Branching())(X, Y))
    line = next(number for number, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "if x.sum() > 0:" in text)
    assert f"torch.compile has cut at {__file__}:{line}" in str(error)


def test_one_stage_under_several_ranks_is_said() -> None:
    with pytest.warns(UserWarning, match="stages=1 under 4 ranks: each has the whole model, and nothing joins them"):
        BackendOptions(stages=1).settled(4, ROWS)
    settled = BackendOptions().settled(4, 24)
    assert (settled.stages, settled.microbatches) == (4, 12)
