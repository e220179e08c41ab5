from __future__ import annotations

from itertools import combinations, pairwise

import pytest
import torch
from chained import compile_example
from hypothesis import given
from hypothesis import strategies as st
from models import EXAMPLES, GPT, SkipMLP, square_loss
from torch import Tensor, fx, nn

from adaptra.errors import PartitionError
from adaptra.graph.compile import CompiledStages, compile_stages
from adaptra.graph.ops.specs import TensorSpec
from adaptra.graph.partition.balance import TOLERANCE, Cuts, balance


def cuts_of(costs: list[int], sizes: list[int], possible: list[bool]) -> Cuts:
    node = fx.Graph().placeholder("x")
    work = [float(sum(costs[:index])) for index in range(len(costs) + 1)]
    return Cuts(tuple((node,) if one else None for one in possible), tuple(sizes), tuple(work))


@given(st.data())
def test_balance_is_within_the_tolerance_of_the_best_and_sends_the_fewest_bytes(data: st.DataObject) -> None:
    count = data.draw(st.integers(2, 9))
    costs = data.draw(st.lists(st.integers(1, 50), min_size=count, max_size=count))
    sizes = data.draw(st.lists(st.integers(0, 9), min_size=count + 1, max_size=count + 1))
    possible = [True, *data.draw(st.lists(st.booleans(), min_size=count - 1, max_size=count - 1)), True]
    stages = data.draw(st.integers(1, count))
    places = [index for index in range(1, count) if possible[index]]
    cuts = cuts_of(costs, sizes, possible)
    if stages > len(places) + 1:
        with pytest.raises(PartitionError, match=rf"use stages={len(places) + 1} or fewer"):
            balance(cuts, stages)
        return

    def slowest(chosen: tuple[int, ...]) -> float:
        return max(cuts.work[end] - cuts.work[begin] for begin, end in pairwise([0, *chosen, count]))

    every = list(combinations(places, stages - 1))
    limit = min(map(slowest, every)) * (1 + TOLERANCE)
    chosen = balance(cuts, stages)
    assert chosen in every
    assert slowest(chosen) <= limit * (1 + 1e-9)
    # A choice exactly at the limit may fall to either side of it by rounding.
    inside = [one for one in every if slowest(one) <= limit * (1 - 1e-9)]
    assert sum(sizes[one] for one in chosen) <= min(sum(sizes[place] for place in one) for one in inside)


def compile_skip_mlp(stages: int, split: list[str] | None = None) -> CompiledStages:
    model, x = SkipMLP(), torch.randn(2, 16)
    return compile_stages(model, (x,), {}, stages=stages, loss=square_loss, targets=x, split=split)


def test_named_modules_begin_stages() -> None:
    compiled = compile_skip_mlp(3, ["layers.2", "layers.5"])
    assert [stage.parameters[0] for stage in compiled.train] == ["layers.0.weight", "layers.2.weight", "layers.5.weight"]
    gpt = EXAMPLES["gpt"]
    named = compile_example(gpt, gpt.make(), gpt.rows(2, 0), 3, split=["blocks.1", "blocks.3"])
    assert [stage.parameters[0] for stage in named.train] == ["tokens.weight", "blocks.1.norm1.weight", "blocks.3.norm1.weight"]
    assert [len(stage.outputs) for stage in named.train] == [1, 1, 1]


@pytest.mark.parametrize(
    ("stages", "split", "message"),
    [
        (3, ["layers.2"], r"split=\['layers.2'\]: 1 names for 3 stages: expected 2"),
        (2, ["layer.2"], r"no module 'layer.2' runs in this model: did you mean 'layers.2' or "),
        (2, ["zzz"], r"no module 'zzz' runs in this model: modules that run: layers.0, layers.1"),
        (
            3,
            ["layers.5", "layers.2"],
            r"'layers.2' leaves nothing to compute in the stage before it: expected names in the order",
        ),
        (2, ["layers.0"], r"'layers.0' leaves nothing to compute in the stage before it"),
        (0, None, r"stages=0: expected at least 1"),
        (60, None, r"stages=60: the model has only \d+ operations that can be told apart as stages: use stages=\d+ or fewer"),
    ],
)
def test_a_cut_that_is_not_possible_is_refused(stages: int, split: list[str] | None, message: str) -> None:
    with pytest.raises(PartitionError, match=message):
        compile_skip_mlp(stages, split)


def test_the_number_of_stages_that_the_error_names_is_possible() -> None:
    with pytest.raises(PartitionError) as caught:
        compile_skip_mlp(60)
    most = int(str(caught.value).split("use stages=")[1].split()[0])
    assert len(compile_skip_mlp(most).train) == most


def test_skip_connections_travel_through_the_stages_between() -> None:
    compiled = compile_skip_mlp(4, ["layers.1", "layers.3", "layers.5"])
    one = TensorSpec((2, 16), torch.float32, True)
    # The model's own input, which needs no gradient, goes along with the first layer's result as far as the sixth.
    assert compiled.train[0].outputs == (TensorSpec((2, 16), torch.float32, False), one)
    assert compiled.train[1].outputs == (TensorSpec((2, 16), torch.float32, False), one, one, one)
    assert [len(stage.grad_inputs) for stage in compiled.train] == [0, 1, 3, 3]
    for before, after in pairwise(compiled.train):
        assert before.outputs == after.inputs
        assert before.grad_outputs == after.grad_inputs


class ChangedBehind(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        y = self.layers[1](x + 1.0)
        x.mul_(2.0)
        return self.layers[3](torch.tanh(self.layers[2](x + y)))


def test_no_cut_separates_a_change_in_place_from_what_it_changes() -> None:
    model, x = ChangedBehind(), torch.randn(2, 4)
    with pytest.raises(
        PartitionError, match=r"no stage can begin at 'layers.1': a tensor made before it is changed in place behind it"
    ):
        compile_stages(model, (x,), {}, stages=2, loss=square_loss, targets=x, split=["layers.1"])
    compiled = compile_stages(model, (x,), {}, stages=3, loss=square_loss, targets=x)
    assert {"layers.0.weight", "layers.1.weight"} <= set(compiled.train[0].parameters)


class Masked(nn.Module):
    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.register_buffer("table", torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(4, 4, dtype=torch.bool).tril() & (self.table > 0)
        for layer in self.layers:
            x = layer(x).masked_fill(mask, 0.0)
        return x


def test_what_depends_on_no_input_is_made_where_it_is_needed_and_not_sent() -> None:
    model, x = Masked(), torch.randn(2, 4, 4)
    compiled = compile_stages(model, (x,), {}, stages=4, loss=square_loss, targets=x)
    assert [len(stage.outputs) for stage in compiled.train] == [1, 1, 1, 1]
    assert [stage.buffers for stage in compiled.train] == [("table",)] * 4
    assert compiled.tied == ()


def test_equal_blocks_make_equal_stages() -> None:
    gpt = EXAMPLES["gpt"]
    compiled = compile_example(gpt, GPT(blocks=8), gpt.rows(2, 0), 4)
    work = [stage.flops.forward + stage.flops.input_grad + stage.flops.weight_grad for stage in compiled.train]
    assert max(work) < 1.3 * min(work)


class ReadElsewhere(nn.Module):
    """Training changes a buffer in the first layer; evaluation reads it again behind the last."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        if self.training:
            self.mean.copy_(x.detach().mean(0))
            return self.layers[2](torch.tanh(self.layers[1](x)))
        return self.layers[2](torch.tanh(self.layers[1](x - self.mean))) + self.mean


def test_a_buffer_that_training_changes_has_one_copy() -> None:
    model, x = ReadElsewhere(), torch.randn(2, 4)
    with pytest.raises(
        PartitionError, match="mean: training changes this buffer on stage 0, and evaluation also reads it on stage 1"
    ):
        compile_stages(model, (x,), {}, stages=2, loss=square_loss, targets=x, split=["layers.2"])
    assert compile_stages(model, (x,), {}, stages=1, loss=square_loss, targets=x).names["mean"] == (0,)
