"""Identical stages share their graphs, nearly identical ones do not, and what is trained is bitwise the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from chained import compile_example, train_eagerly, train_in_stages
from models import Example, begin_blocks, square_loss, vectors
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from adaptra.graph.compile import CompiledStages

LAYERS, WIDTH, ROWS, CHANGED = 7, 8, 3, 3
INNER = range(1, LAYERS - 1)
"""The first and the last stage are special: one takes the model's inputs, the other ends in the loss."""


class Layer(nn.Module):
    """A layer with a parameter, a buffer that it changes, a constant, and ways to be a bit different."""

    seen: Tensor

    def __init__(
        self,
        *,
        dropout: float = 0.0,
        eps: float = 1e-5,
        scale: Sequence[float] = (0.5,),
        frozen: bool = False,
        checkpointed: bool = False,
        count: int = 1,
        detours: bool = False,
        autocast: bool = False,
    ) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, eps)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("seen", torch.zeros(()))
        self.scale, self.checkpointed, self.count, self.detours = list(scale), checkpointed, count, detours
        self.autocast = autocast
        self.linear.bias.requires_grad_(not frozen)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen.add_(self.count)
        if self.detours:
            with torch.no_grad():
                turned = torch.sin(x)
            x = x + turned
        made: Any = checkpoint(self.inner, x, use_reentrant=False) if self.checkpointed else self.inner(x)
        return self.dropout(made) * torch.tensor(self.scale) + x

    def inner(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            return torch.tanh(self.linear(self.norm(x))).to(x.dtype)


class Layers(nn.Module):
    def __init__(self, *options: dict[str, Any]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Layer(**one) for one in options)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def layers(same: dict[str, Any], changed: dict[str, Any] | None = None) -> Example:
    """Layers that are the same, but one if there is something to change about it."""
    options = [same if changed is None or index != CHANGED else same | changed for index in range(LAYERS)]
    return Example("layers", lambda: Layers(*options), vectors(WIDTH), square_loss)


def compiled_layers(example: Example) -> CompiledStages:
    """One stage for each layer, having checked that a step over the stages is bitwise that of one process."""
    model, batches = example.make(), [example.rows(ROWS, seed) for seed in range(3)]
    compiled = compile_example(example, model, batches[0], LAYERS, split=begin_blocks(LAYERS))
    assert train_in_stages(compiled, model, batches).differences(train_eagerly(example, model, batches)) == []
    return compiled


def training_graphs(compiled: CompiledStages, index: int) -> list[fx.GraphModule]:
    stage: Any = compiled.train[index]
    return [stage._forward.module, stage._input_grad, stage._weight_grad]


def eval_graph(compiled: CompiledStages, index: int) -> fx.GraphModule:
    stage: Any = compiled.eval[index]
    return stage._forward.module


def sharing(of: Callable[[int], object]) -> list[int]:
    """For each inner stage the first one that has the same."""
    found = [of(index) for index in INNER]
    return [INNER[next(i for i, other in enumerate(found) if other is one)] for one in found]


SHARED, CHANGED_APART = [1, 1, 1, 1, 1], [1, 1, 3, 1, 1]


def test_identical_stages_share_their_graphs_and_each_has_its_own_state() -> None:
    compiled = compiled_layers(layers({}))
    for graph in range(3):
        assert sharing(lambda index, graph=graph: training_graphs(compiled, index)[graph]) == SHARED
    assert sharing(lambda index: eval_graph(compiled, index)) == SHARED
    for index, stage in enumerate(compiled.train):
        prefix = f"blocks.{index}."
        assert stage.parameters == tuple(prefix + name for name in ("norm.weight", "norm.bias", "linear.weight", "linear.bias"))
        assert stage.trainable == stage.contributions == stage.parameters
        assert stage.buffers == (prefix + "seen",)


def test_evaluation_over_stages_that_share_a_graph_is_bitwise_that_of_one_process() -> None:
    example = layers({})
    compiled, model = compiled_layers(example), example.make().eval()
    (x,), _, _ = example.rows(ROWS, 9)
    message: tuple[Tensor, ...] = (x,)
    state = dict(model.state_dict())
    for stage in compiled.eval:
        message = stage.run_forward(state, message, with_loss=False)
    assert torch.equal(message[0], model(x))


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param({"dropout": 0.3}, id="dropout"),
        pytest.param({"eps": 1e-6}, id="eps"),
        pytest.param({"frozen": True}, id="frozen parameter"),
        pytest.param({"scale": [0.5] * WIDTH}, id="constant of another shape"),
        pytest.param({"checkpointed": True}, id="checkpointed"),
        pytest.param({"count": 2}, id="argument"),
        pytest.param({"detours": True}, id="other ops"),
        pytest.param({"autocast": True}, id="autocast"),
    ],
)
def test_a_stage_that_differs_a_bit_has_a_graph_of_its_own(changed: dict[str, Any]) -> None:
    compiled = compiled_layers(layers({}, changed))
    for graph in range(3):
        assert sharing(lambda index, graph=graph: training_graphs(compiled, index)[graph]) == CHANGED_APART


def test_a_constant_of_another_value_is_the_stages_own_and_the_graph_is_shared() -> None:
    compiled = compiled_layers(layers({}, {"scale": (0.25,)}))
    assert sharing(lambda index: training_graphs(compiled, index)[0]) == SHARED
    stages: list[Any] = [*compiled.train, *compiled.eval]
    assert [constant.item() for stage in stages for constant in stage._forward.constants] == [
        0.25 if index == CHANGED else 0.5 for index in range(LAYERS)
    ] * 2


def test_random_ops_keep_their_numbers_where_stages_are_differentiated_once() -> None:
    compiled = compiled_layers(layers({"dropout": 0.3}))
    assert sharing(lambda index: training_graphs(compiled, index)[0]) == list(INNER)
    for graph in (1, 2):
        assert sharing(lambda index, graph=graph: training_graphs(compiled, index)[graph]) == SHARED


def test_checkpointed_stages_share_their_graphs() -> None:
    compiled = compiled_layers(layers({"checkpointed": True}))
    assert sharing(lambda index: training_graphs(compiled, index)[1]) == SHARED


def test_what_cannot_be_compared_is_not_shared() -> None:
    # Ops without gradients are captured as a graph of their own in each layer, which is not looked into.
    compiled = compiled_layers(layers({"detours": True}))
    assert sharing(lambda index: training_graphs(compiled, index)[1]) == list(INNER)
