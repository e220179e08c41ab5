"""torch.compile(model, backend="adaptra") of a model that returns no loss: the criterion and its backward stay in the loop."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from as_backend import MADE, MICROBATCHES, ROWS, caught, compiled, fresh_compiler
from errors_table import check_documented
from models import EXAMPLES, Batch, Example, square_loss
from processes import run_processes
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from training import MIXED, adam, microbatches_of

import adaptra
from adaptra.graph.ops.random_state import RandomKey, reference_randomness
from adaptra.runtime.worker.step.two_pass import PendingBackward

LAYERS = EXAMPLES["skip_mlp"]
(X,), _, Y = LAYERS.rows(ROWS, 0)
State = dict[str, Tensor]


@pytest.fixture(autouse=True)
def fresh(one_thread: None) -> Iterator[None]:
    """Nothing that an earlier test has compiled, and kernels without threads of their own."""
    with fresh_compiler():
        yield


def copied(tensors: dict[str, Tensor]) -> State:
    return {name: one.detach().clone() for name, one in tensors.items()}


def gradients_of(model: nn.Module) -> State:
    return {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


def train(example: Example, run: Callable[..., Any], model: nn.Module, batches: Sequence[Batch]) -> list[tuple[Tensor, State]]:
    """A plain loop: of each step the loss, and the gradients with the state it ends with."""
    optimizer = adam(model.parameters())
    steps: list[tuple[Tensor, State]] = []
    for args, kwargs, targets in batches:
        loss: Any = example.loss
        found = loss(run(*args, **kwargs), targets)
        found.backward()
        gradients = gradients_of(model)
        optimizer.step()
        optimizer.zero_grad()
        steps.append((found.detach(), copied(model.state_dict()) | {f"gradient of {k}": one for k, one in gradients.items()}))
    return steps


class MicrobatchesAlone:
    """The model called on one microbatch after the other, with the criterion on what they return together.

    The backward passes run in the order of the microbatches, which decides the order of the gradients' sums.
    """

    def __init__(self, model: Callable[..., Any], microbatches: int = MICROBATCHES) -> None:
        self._model, self._microbatches, self._calls = model, microbatches, 0

    def __call__(self, *args: Any) -> Any:
        parts: list[Any] = []
        for number, (given, _, _) in enumerate(microbatches_of((args, {}, ()), self._microbatches)):
            with reference_randomness(RandomKey(0, self._calls, number)):
                parts.append(self._model(*given))
        self._calls += 1
        leaves = [pytree.tree_leaves(part) for part in parts]
        whole = _InOrder.apply(leaves, *(torch.cat(column).detach().requires_grad_() for column in zip(*leaves, strict=True)))
        return pytree.tree_unflatten(list(whole), pytree.tree_structure(parts[0]))


class _InOrder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, leaves: list[list[Tensor]], *whole: Tensor) -> tuple[Tensor, ...]:
        ctx.leaves = leaves
        return tuple(one.clone() for one in whole)

    @staticmethod
    def backward(ctx: Any, *tangents: Any) -> Any:
        for number, outputs in enumerate(ctx.leaves):
            torch.autograd.backward(outputs, [one.contiguous().chunk(len(ctx.leaves))[number] for one in tangents])
        return None, *(None for _ in tangents)


def unequal(steps: list[tuple[Tensor, State]], expected: list[tuple[Tensor, State]]) -> list[str]:
    """What is not bitwise the same in any step."""
    found: list[str] = []
    for index, ((loss, state), (wanted, right)) in enumerate(zip(steps, expected, strict=True)):
        found += [] if torch.equal(loss, wanted) else [f"step {index}: loss"]
        found += [f"step {index}: {name}" for name, one in state.items() if not torch.equal(one, right[name])]
    return found


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("name", ["gpt_tied", "skip_mlp", "frozen_upstream", "mixed"])
def test_a_plain_loop_trains_bitwise_on_the_same_microbatches(name: str, stages: int) -> None:
    """Also with a parameter of several stages, dropout, and the statistics of BatchNorm."""
    example = (EXAMPLES | {"mixed": MIXED})[name]
    batches = [example.rows(ROWS, seed) for seed in range(4)]
    model, plain = example.make(), example.make()
    steps = train(example, compiled(model, stages=stages), model, batches)
    expected = train(example, MicrobatchesAlone(plain), plain, batches)
    assert unequal(steps, expected) == [] and all(steps[0][1].keys() == one.keys() for _, one in expected)
    (pipe,) = MADE
    assert pipe.plan.program.name == "two_phases" and pipe.plan.program.stages == stages


class Branches(nn.Module):
    """Three layers; returns what ``choose`` makes of the input and what each layer returns."""

    def __init__(self, choose: Callable[..., Any] = lambda x, first, second, third: third) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(16, 16) for _ in range(3))
        self.choose = choose

    def forward(self, x: Tensor) -> Any:
        first = torch.tanh(self.first(x))
        second = torch.tanh(self.second(first))
        return self.choose(x, first, second, self.third(second))


def branches(choose: Callable[..., Any]) -> Example:
    return Example("branches", lambda: Branches(choose), LAYERS.batch, lambda outputs, _: squares(outputs))


def squares(outputs: Any) -> Tensor:
    return sum((one.square().mean() for one in pytree.tree_leaves(outputs)), torch.zeros(()))


OUTPUTS: dict[str, Callable[..., Any]] = {
    "tuple": lambda x, first, second, third: (third, second),
    "of an earlier stage": lambda x, first, second, third: {"first": first, "nest": [third, second]},
    "twice": lambda x, first, second, third: (third, third),
    "views": lambda x, first, second, third: (third, third.view(-1, 4, 4), third[:, 3:]),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_several_outputs_train_bitwise(name: str) -> None:
    example = branches(OUTPUTS[name])
    batches = [LAYERS.rows(ROWS, seed) for seed in range(2)]
    model, plain = example.make(), example.make()
    steps = train(example, compiled(model), model, batches)
    assert unequal(steps, train(example, MicrobatchesAlone(plain), plain, batches)) == []


def test_what_has_no_gradient_is_returned_as_it_is() -> None:
    model = Branches(lambda x, first, second, third: (third, third.argmax(-1), first.detach(), x.contiguous(), None, 3))
    outputs = compiled(model)(X)
    assert outputs[0].requires_grad and not any(one.requires_grad for one in outputs[1:4])
    torch.testing.assert_close(outputs, model(X))
    outputs[0].sum().backward()
    assert set(gradients_of(model)) == {name for name, _ in model.named_parameters()}


def test_an_output_that_nothing_uses_has_gradient_zero() -> None:
    model = Branches(lambda x, first, second, third: (first, third))
    compiled(model)(X)[0].sum().backward()
    gradients = gradients_of(model)
    assert gradients["first.weight"].any() and not gradients["third.weight"].any()


def test_calls_before_a_backward_keep_what_is_theirs() -> None:
    """Added up before one backward pass, or each with its own in another order."""
    first, second = X, LAYERS.rows(ROWS, 1)[0][0]
    model = Branches()
    run = compiled(model)
    each: list[State] = []
    for x in (first, second):
        run(x).square().sum().backward()
        each.append(gradients_of(model))
        model.zero_grad()
    (run(first).square().sum() + run(second).square().sum()).backward()
    together = gradients_of(model)
    model.zero_grad()
    one, other = run(first).square().sum(), run(second).square().sum()
    one.backward()
    other.backward()
    for name, gradient in gradients_of(model).items():
        assert torch.equal(gradient, each[0][name] + each[1][name]) and torch.equal(together[name], gradient), name


def test_what_a_call_keeps_is_freed_after_its_backward_or_with_its_outputs() -> None:
    """At once: no reference leads round in a circle."""

    def held() -> int:
        return sum(type(one) is PendingBackward and len(one.saved) > 0 for one in gc.get_objects())

    run = compiled(Branches())
    gc.disable()
    try:
        used, dropped = run(X), run(X)
        assert held() == 4
        used.sum().backward()
        assert held() == 2
        del dropped
        assert held() == 0
    finally:
        gc.enable()


@pytest.mark.parametrize("microbatches", [1, MICROBATCHES])
def test_inputs_have_gradients_too(microbatches: int) -> None:
    """Of each microbatch bitwise; here one that the outputs use in two places."""
    model = Branches(lambda x, first, second, third: (third + x, first * x))
    run = compiled(model, microbatches=microbatches)
    found: list[Tensor | None] = []
    for called in (run, MicrobatchesAlone(model, microbatches)):
        x = X.clone().requires_grad_()
        squares(called(x)).backward()
        found.append(x.grad)
    assert found[0] is not None and found[1] is not None and torch.equal(found[0], found[1])


def test_rounded_messages_leave_outputs_and_gradients_of_inputs_exact() -> None:
    x = X.clone().requires_grad_()
    output = compiled(Branches(), lossy_bf16=True)(x)
    output.square().sum().backward()
    assert x.grad is not None
    for exact in (output.detach(), x.grad):
        assert not torch.equal(exact, exact.bfloat16().float())


def test_autocast_around_the_call_and_its_backward_stays_bitwise() -> None:
    def under_autocast(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast(X.device.type, dtype=torch.bfloat16):
            return model(x)

    example = branches(OUTPUTS["tuple"])
    model, plain = example.make(), example.make()
    run = compiled(model)
    with torch.autocast(X.device.type, dtype=torch.bfloat16):
        found = run(X)
        sum((one.float().square().mean() for one in found), torch.zeros(())).backward()
    expected = MicrobatchesAlone(partial(under_autocast, plain))(X)
    sum((one.float().square().mean() for one in expected), torch.zeros(())).backward()
    assert found[0].dtype == torch.bfloat16 and torch.equal(found[0], expected[0])
    wanted = gradients_of(plain)
    assert {name: torch.equal(one, wanted[name]) for name, one in gradients_of(model).items()} == dict.fromkeys(wanted, True)


class Broken(Branches):
    """A model that torch.compile cuts in two."""

    def forward(self, x: Tensor) -> Any:
        first = torch.tanh(self.first(x))
        second = torch.tanh(self.second(first))
        torch._dynamo.graph_break()
        return self.third(torch.tanh(self.second(second)))


def test_each_part_of_a_function_with_a_graph_break_is_a_pipeline() -> None:
    example = Example("broken", Broken, LAYERS.batch, square_loss)
    batches = [LAYERS.rows(ROWS, seed) for seed in range(3)]
    model, plain = example.make(), example.make()
    steps = train(example, compiled(model), model, batches)
    assert len(MADE) == 2
    expected = train(example, plain, plain, batches)
    # Not bitwise: autograd adds the two uses of one layer per batch here, not per microbatch.
    for (loss, state), (wanted, right) in zip(steps, expected, strict=True):
        torch.testing.assert_close((loss, state), (wanted, right), rtol=1e-4, atol=1e-6)


def test_a_criterion_behind_a_graph_break_is_no_pipeline() -> None:
    def step(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        x = model(x)
        torch._dynamo.graph_break()
        return square_loss(x, y)

    model, plain = LAYERS.make(), LAYERS.make()
    run = compiled(step)
    run(model, X, Y).backward()
    square_loss(MicrobatchesAlone(plain)(X), Y).backward()
    assert len(MADE) == 1
    found, expected = gradients_of(model), gradients_of(plain)
    assert found.keys() == expected.keys() and all(torch.equal(found[name], one) for name, one in expected.items())


def test_the_report_says_what_it_costs_in_memory() -> None:
    compiled(Branches(), microbatches=8)(X)
    (pipe,) = MADE
    *_, head, second, first_rank, last_rank = pipe.report().splitlines()
    assert f"{head} {second}" == (
        "The function returns no loss, so forward and backward are each pipelined over all 8 microbatches, whose activations "
        "are all held in between. What a rank holds at most, and would hold if it returned its loss:"
    )
    assert re.fullmatch(r"  rank 0: 2.6 KiB; .*B as adapted to the estimated costs, 1.4 KiB under 1F1B", first_rank), first_rank
    assert re.fullmatch(r"  rank 1: 4.3 KiB; .*B as adapted to the estimated costs, 2.6 KiB under 1F1B", last_rank), last_rank


# Each mistake has its message.

NOT_ROWS = (
    "output … of the compiled function is …: expected the rows of the batch as the first dimension of every output, as each "
    "microbatch makes its part of it; or the loss as the only output"
)
CHANGED = (
    "a parameter or an input of this call has been changed in place since: expected its backward before optimizer.step() and "
    "before its inputs are overwritten"
)


def of_outputs(choose: Callable[..., Any], **options: Any) -> Callable[[], object]:
    return lambda: compiled(Branches(choose), **options)(X)


def backward_twice() -> None:
    loss = compiled(Branches())(X).sum()
    loss.backward(retain_graph=True)
    loss.backward()


def backward_after_a_step() -> None:
    model = Branches()
    run = compiled(model)
    first, second = run(X), run(X)
    second.sum().backward()
    adam(model.parameters()).step()
    first.sum().backward()


def input_overwritten() -> None:
    x = X.clone()
    output = compiled(Branches())(x)
    x.zero_()
    output.sum().backward()


def step_of_it() -> None:
    compiled(Branches())(X)
    MADE[0].step(X)


def just_third(x: Tensor, first: Tensor, second: Tensor, third: Tensor) -> Tensor:
    return third


MISTAKES: list[tuple[str, Callable[[], object]]] = [
    *(
        (NOT_ROWS, of_outputs(choose))
        for choose in (
            lambda x, first, second, third: (third, second.mean()),
            lambda x, first, second, third: third.t(),
            lambda x, first, second, third: torch.cat([third, second]),
            lambda x, first, second, third: (third, 2 * x.shape[0]),
        )
    ),
    (
        "the backward pass of this call has run, and what it needed is gone: expected one backward per call, also with "
        "retain_graph=True; call the compiled function again",
        backward_twice,
    ),
    (CHANGED, backward_after_a_step),
    (CHANGED, input_overwritten),
    (
        "schedule=…: the function returns no loss, so all forwards come before all backwards: expected None",
        of_outputs(just_third, schedule="1f1b"),
    ),
    (
        "synchrony=local=… with a function that returns no loss: expected a model whose loss adaptra.compile knows",
        of_outputs(just_third, synchrony=adaptra.Local()),
    ),
    *(
        (
            "a function without a loss, which keeps all microbatches from its call to their backward: rank … holds "
            "activations of …: expected at most …, as memory= allows",
            of_outputs(just_third, memory=memory),
        )
        for memory in (3, "3.5 KB")
    ),
    ("this pipeline is of a function without a loss: expected calls of that function and their backward", step_of_it),
]


@pytest.mark.parametrize(("row", "mistake"), MISTAKES)
def test_a_mistake_is_met_with_its_documented_message(row: str, mistake: Callable[[], object]) -> None:
    error = caught(mistake)
    check_documented(type(error).__name__, str(error), row)


def test_a_second_derivative_is_refused_by_torch() -> None:
    parameters = list((model := Branches()).parameters())
    (gradient, *_) = torch.autograd.grad(compiled(model)(X).square().sum(), parameters, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_after_a_refusal_the_next_call_follows() -> None:
    model = Branches()
    run = compiled(model)
    loss = run(X).sum()
    loss.backward(retain_graph=True)
    before = gradients_of(model)
    caught(loss.backward)
    model.zero_grad()
    run(X).sum().backward()
    found = gradients_of(model)
    assert found.keys() == before.keys() and all(torch.equal(found[name], one) for name, one in before.items())


# Under a launcher.


def train_over_processes(rank: int) -> tuple[list[str], set[str]]:
    torch.distributed.init_process_group("gloo")
    example = EXAMPLES["gpt_tied"]
    batches = [example.rows(ROWS, seed) for seed in range(3)]
    model, plain = example.make(), example.make()
    steps = train(example, compiled(model), model, batches)
    own = set(MADE[0].state_dict())
    held = [
        (loss, {name: one for name, one in state.items() if name.removeprefix("gradient of ") in own}) for loss, state in steps
    ]
    found = unequal(held, train(example, MicrobatchesAlone(plain), plain, batches))
    found += [name for name in gradients_of(model) if name not in own]
    MADE[0].close()
    return found, own


@pytest.mark.processes
def test_a_plain_loop_on_every_rank_trains_bitwise_each_rank_its_own_stage() -> None:
    results = run_processes(train_over_processes, 2)
    names = set(EXAMPLES["gpt_tied"].make().state_dict())
    assert set().union(*(own for _, own in results)) | {"head.weight"} == names
    for found, own in results:
        assert found == [] and 0 < len(own) < len(names)


def train_in_a_replica(rank: int) -> list[str]:
    torch.distributed.init_process_group("gloo")
    batches = [LAYERS.rows(ROWS, seed) for seed in range(2)]
    model = LAYERS.make()
    inputs, _, targets = batches[rank]
    square_loss(compiled(model, stages=1)(*inputs), targets).backward()
    found = gradients_of(model)
    expected: list[State] = []
    for inputs, _, targets in batches:
        plain = LAYERS.make()
        square_loss(MicrobatchesAlone(plain)(*inputs), targets).backward()
        expected.append(gradients_of(plain))
    MADE[0].close()
    return [name for name, one in expected[0].items() if not torch.equal(found[name], (one + expected[1][name]) / 2)]


@pytest.mark.processes
def test_replicas_take_the_mean_of_their_gradients() -> None:
    """One stage on two ranks: each gives its own batch."""
    assert run_processes(train_in_a_replica, 2) == [[], []]
