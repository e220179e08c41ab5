"""The inner compiler: stage graphs run by another backend of torch.compile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from errors_table import check_documented
from models import EXAMPLES, Example, square_loss, vectors
from torch import Tensor, fx, nn
from torch._dynamo import register_backend
from torch._dynamo.backends.registry import _BACKENDS, _COMPILER_FNS
from training import MIXED, call, compiled, differences, train, train_alone

import adaptra
from adaptra.errors import AdaptraError
from adaptra.graph.ops.random_state import run_seeded

DOCUMENTED = {
    "fails": "stage …: '…' can't compile its graphs: …: expected an inner backend that takes any graph of ATen ops, as "
    "'inductor' with a C++ compiler does, or 'eager'",
    "list": "inner=…: expected 'eager', as the model is a list of stages, which run as they are: compile one by its "
    "module.compile() before",
}

pytestmark = pytest.mark.usefixtures("one_thread")

Graph = Callable[..., Any]


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> Iterator[Callable[[Callable[[fx.GraphModule, list[Tensor]], Graph]], str]]:
    """Registers a backend of torch.compile for the length of a test; returns its name."""
    name = f"of_{request.node.name}"

    def register(function: Callable[[fx.GraphModule, list[Tensor]], Graph]) -> str:
        register_backend(function, name=name)
        return name

    yield register
    for registered in (_BACKENDS, _COMPILER_FNS):
        registered.pop(name, None)


@pytest.mark.parametrize(
    "name", ["gpt_dropout", "resnet", "options", "frozen_upstream", "views", "inplace", "tied_twice", "noise"]
)
def test_a_backend_that_changes_no_op_changes_no_number(name: str) -> None:
    """It is given graphs that autograd's own tracing makes functional: losses, gradients, state, evaluation stay bitwise."""
    example = EXAMPLES[name]
    batches = [example.rows(8, seed) for seed in range(3)]
    (args, kwargs) = call(batches[0])
    with compiled(example, batches[0], stages=2, microbatches=4) as plain:
        train(plain, batches)
        evaluated = plain.eval_step(*args, **kwargs)
    options = adaptra.Options(inner="aot_eager", adapt=False)
    with compiled(example, batches[0], stages=2, microbatches=4, options=options) as pipe:
        assert differences(train(pipe, batches), train_alone(example, batches, 4)) == []
        assert torch.equal(pipe.eval_step(*args, **kwargs), evaluated)


def test_it_compiles_what_lies_between_random_ops_before_the_first_step(backend: Any) -> None:
    """Every graph once, those of evaluation when it is asked for, none with a random op; and what it makes is what runs."""
    graphs: list[fx.GraphModule] = []
    runs: list[int] = []

    def recording(graph: fx.GraphModule, examples: list[Tensor]) -> Graph:
        assert len(examples) == len(graph.graph.find_nodes(op="placeholder"))
        index = len(graphs)
        graphs.append(graph)

        def run(*values: Tensor) -> Any:
            runs.append(index)
            return graph(*values)

        return run

    batches = [MIXED.rows(12, seed) for seed in range(2)]
    options = adaptra.Options(inner=backend(recording), adapt=False)
    with compiled(MIXED, batches[0], stages=2, microbatches=3, options=options) as pipe:
        for_training = len(graphs)
        assert for_training >= 6 and not runs, "F, I and W of two stages, F in parts"
        assert differences(train(pipe, batches), train_alone(MIXED, batches, 3)) == []
        assert len(graphs) == for_training
        assert sorted(runs) == sorted(list(range(for_training)) * 3 * 2), "each for each microbatch of each step"
        pipe.eval_step(*call(batches[0])[0])
        assert len(graphs) == for_training + 3, "the first stage's F, and the last one's with the loss and without"
    ops = [node.target for graph in graphs for node in graph.graph.nodes]
    assert run_seeded not in ops and torch.ops.aten.bernoulli_.float not in ops


def test_inductor_trains_close_to_one_process() -> None:
    example = Example("small", lambda: nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)), vectors(8), square_loss)
    batches = [example.rows(8, seed) for seed in range(3)]
    options = adaptra.Options(inner="inductor", adapt=False)
    with compiled(example, batches[0], stages=2, microbatches=2, options=options) as pipe:
        steps = train(pipe, batches)
    expected = train_alone(example, batches, 2)
    torch.testing.assert_close(torch.stack([one.losses for one in steps]), torch.stack([one.losses for one in expected]))
    torch.testing.assert_close(steps[-1].state, expected[-1].state)


def test_a_backend_that_fails_is_told_with_its_stage(backend: Any) -> None:
    def failing(graph: fx.GraphModule, examples: list[Tensor]) -> Graph:
        raise RuntimeError("no compiler here")

    batch = MIXED.rows(12, 0)
    with pytest.raises(AdaptraError, match="no compiler here") as caught:
        compiled(MIXED, batch, stages=2, microbatches=3, options=adaptra.Options(inner=backend(failing))).__enter__()
    check_documented(type(caught.value).__name__, str(caught.value), DOCUMENTED["fails"])


def test_a_list_of_stages_is_compiled_by_nobody() -> None:
    with pytest.raises(AdaptraError) as caught:
        adaptra.compile([nn.Linear(4, 4)], stages=1, microbatches=1, options=adaptra.Options(inner="inductor"))
    check_documented(type(caught.value).__name__, str(caught.value), DOCUMENTED["list"])
