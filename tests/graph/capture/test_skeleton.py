"""A skeleton gives the stages of its model, and holds none of its state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from chained import compile_example
from models import EXAMPLES
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from adaptra.graph.capture.skeleton import skeleton
from adaptra.graph.compile import CompiledStages

CPU = torch.device("cpu")


def text_of(compiled: CompiledStages) -> list[str]:
    """All that depends on the model: graphs, state, messages and costs of every stage, and where they begin."""
    found = [str(compiled.cut_points), str(compiled.tied), str(compiled.names), str(compiled.difference)]
    for stage in compiled.train:
        found += [str(graph.graph) for graph in stage.graphs]
        found += [str((stage.parameters, stage.buffers, stage.inputs, stage.outputs, stage.contributions))]
    return found


@pytest.mark.parametrize("name", EXAMPLES)
def test_stages_of_a_skeleton_are_those_of_its_model(name: str) -> None:
    example = EXAMPLES[name]
    model, batch = example.make(), example.rows(4, 0)
    expected = text_of(compile_example(example, model, batch, 2, compare=True))
    assert text_of(compile_example(example, skeleton(model), batch, 2, compare=True)) == expected
    with torch.device("meta"):
        empty = example.build()
    if any(not one.is_meta for one in (*empty.parameters(), *empty.buffers())):
        return  # made of another model's tensors
    assert text_of(compile_example(example, skeleton(empty, CPU), batch, 2, compare=True)) == expected


def test_skeleton_holds_nothing_of_its_model() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4, bias=False))
    model[2].weight = model[0].weight
    model[0].bias.requires_grad_(False)
    model[1].eval()
    made = skeleton(model)
    assert isinstance(made, nn.Sequential)
    assert all(isinstance(one, FakeTensor) for one in (*made.parameters(), *made.buffers()))
    assert all(isinstance(one, nn.Parameter) for one in made.parameters())
    assert made[2].weight is made[0].weight
    assert not made[0].bias.requires_grad
    assert [one.training for one in made.modules()] == [one.training for one in model.modules()]
    assert not any(isinstance(one, FakeTensor) for one in model.parameters())


def test_plain_tensors_are_the_models_own_memory() -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4))
    mask, frozen = torch.ones(4), nn.Parameter(torch.ones(4), requires_grad=False)
    model[0].mask, model[0].held = mask, [frozen, {"rows": mask[1:]}]
    made: Any = skeleton(model).get_submodule("0")
    mask.fill_(2.0)
    frozen.data.fill_(3.0)
    (first, inner), shared = made.held, made.mask
    assert shared is not mask and [one.tolist() for one in (shared, first, inner["rows"])] == [[2.0] * 4, [3.0] * 4, [2.0] * 3]
