"""W that hands its gradients over one by one runs the ops of the whole W, in the same order, and hands them over early."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from chained import compile_example
from models import EXAMPLES, Example
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from adaptra.graph.compile import CompiledStages
from adaptra.graph.compile_modules import compile_modules
from adaptra.graph.inner_compiler import compiled_by
from adaptra.graph.ops.random_state import RandomKey
from adaptra.graph.stages.stage_graphs import Saved
from adaptra.graph.stages.stages import Take, TrainStage

ROWS = 3


class Ops(TorchDispatchMode):
    """Records each op with the shapes and strides of its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = pytree.tree_leaves((args, kwargs))
        tensors = [(one.shape, one.stride(), one.dtype) if isinstance(one, Tensor) else one for one in leaves]
        self.seen.append((func, tensors))
        return func(*args, **(kwargs or {}))


def saved_for_w(compiled: CompiledStages, example: Example, model: nn.Module) -> list[tuple[TrainStage, Any]]:
    """Each stage, and what I saves for its W."""
    args, kwargs, targets = example.rows(ROWS, 0)
    message: Any = compiled.inputs.flatten(args, kwargs)
    kept: list[Any] = []
    for stage in compiled.train:
        given = compiled.targets.flatten(targets) if stage is compiled.train[-1] else ()
        message, saved = stage.run_forward(stage.state(model), message, RandomKey(0, 0, 0), given)
        kept.append(saved)
    backward: Any = [torch.ones_like(message[0])]
    for stage in reversed(compiled.train):
        backward, kept[stage.index] = stage.run_input_grad(kept[stage.index], backward)
    return list(zip(compiled.train, kept, strict=True))


def copying_to(found: dict[int, Tensor]) -> Take:
    return lambda number, result: found.update({number: result.clone()})


@pytest.mark.parametrize("name", EXAMPLES)
def test_results_in_turn_are_those_of_the_whole_w(name: str) -> None:
    example = EXAMPLES[name]
    model = example.make()
    for stage, saved in saved_for_w(compile_example(example, model, example.rows(ROWS, 0), 2), example, model):
        again = Saved([*saved.values])
        with Ops() as whole:
            expected = stage.run_weight_grad(saved)
        run, found = stage.weight_grad_in_turn(), dict[int, Tensor]()
        with Ops() as in_turn:
            run(again, copying_to(found))
        copies = [one for one in in_turn.seen if one[0] is torch.ops.aten.clone.default]
        assert [one for one in in_turn.seen if one not in copies] == [one for one in whole.seen if one not in copies]
        assert sorted(found) == list(range(len(expected)))
        for number, result in enumerate(expected):
            assert result is not None and torch.equal(found[number], result) and found[number].dtype == result.dtype
        assert again.take() == [], "the saved values are released"


def test_gradients_of_the_last_layer_come_before_the_ops_of_the_first() -> None:
    example = EXAMPLES["gpt"]
    model = example.make()
    ((stage, saved),) = saved_for_w(compile_example(example, model, example.rows(ROWS, 0), 1), example, model)
    with Ops() as ops:
        places: dict[str, int] = {}
        stage.weight_grad_in_turn()(saved, lambda number, _: places.update({stage.contributions[number]: len(ops.seen)}))
    order = [name for name in sorted(places, key=places.__getitem__) if name.endswith("weight")]
    assert len(set(places.values())) > len(places) / 3
    assert places[order[0]] < len(ops.seen) / 2 and order[-1] == next(iter(dict(model.named_parameters())))


def test_stages_that_are_modules_hand_over_what_they_have() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    x, y = torch.ones(ROWS, 4), torch.zeros(ROWS, 4)
    compiled = compile_modules(nn.ModuleList(model), (x,), {}, loss=nn.functional.mse_loss, targets=y)
    example = Example("modules", lambda: model, lambda *_: ((x,), {}, y), nn.functional.mse_loss)
    for (stage, saved), (_, again) in zip(*(saved_for_w(compiled, example, model) for _ in range(2)), strict=True):
        found: dict[int, Tensor] = {}
        stage.weight_grad_in_turn()(again, copying_to(found))
        for number, expected in enumerate(stage.run_weight_grad(saved)):
            assert expected is not None and torch.equal(found[number], expected)


def test_graphs_of_an_inner_compiler_hand_over_the_same_bits() -> None:
    example = EXAMPLES["gpt_dropout"]
    model = example.make()
    compiled = compiled_by("aot_eager", compile_example(example, model, example.rows(ROWS, 0), 2))
    for stage, saved in saved_for_w(compiled, example, model):
        again, found = Saved([*saved.values]), dict[int, Tensor]()
        stage.weight_grad_in_turn()(again, copying_to(found))
        for number, result in enumerate(stage.run_weight_grad(saved)):
            assert result is not None and torch.equal(found[number], result)
