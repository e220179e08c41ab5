"""A captured model is what eager torch runs, also where the model asks whether it is captured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from architectures import LLAMA, language_model
from chained import compile_example, train_eagerly, train_in_stages
from models import Example, square_loss, tokens, vectors
from torch import Tensor, fx, nn
from torch.fx._symbolic_trace import is_fx_tracing

from adaptra.errors import CaptureError
from adaptra.graph.compile import CompiledStages, compile_stages


def attentions(compiled: CompiledStages) -> list[fx.Node]:
    assert compiled.captured is not None
    return [node for node in compiled.captured.flat.module.graph.nodes if "scaled_dot_product" in str(node.target)]


@pytest.mark.parametrize(
    ("model", "config", "settings"),
    [
        (transformers.LlamaForCausalLM, transformers.LlamaConfig, LLAMA),
        (transformers.Qwen2ForCausalLM, transformers.Qwen2Config, LLAMA),
        (transformers.MixtralForCausalLM, transformers.MixtralConfig, {**LLAMA, "num_local_experts": 2}),
    ],
)
def test_grouped_heads_attend_without_a_mask_as_in_eager(model: Any, config: Any, settings: Any) -> None:
    """Exported, these models build a mask and repeat their key-value heads; eager torch does neither."""
    example = Example("grouped", language_model(model, config, **settings), tokens, token_loss_of)
    compiled = compile_example(example, example.make(), example.rows(2, 0), 1)
    assert attentions(compiled)
    for node in attentions(compiled):
        assert (node.args[3:], node.kwargs.get("enable_gqa")) == ((None, 0.0, True), True)


def token_loss_of(outputs: Any, targets: Tensor) -> Tensor:
    logits = outputs.logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten() % logits.shape[-1])


class Asking(nn.Module):
    """Takes another way if anything tells it that it is not run by eager torch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.other = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        from torch._subclasses.fake_tensor import FakeTensor
        from torch.compiler import is_compiling, is_exporting

        positions = torch.arange(x.shape[1]).expand(x.shape[0], -1)
        steps = positions.diff(dim=-1, prepend=positions[:, :1] - 1)
        mask = torch.ones(x.shape)
        mask[:, 1:] *= 2
        traced = is_compiling() or is_exporting() or torch.jit.is_tracing() or is_fx_tracing()
        traced = traced or any(isinstance(one, FakeTensor | fx.Proxy) for one in (positions, steps, mask))
        packed = bool((steps != 1).any()) or mask.sum().item() != x.shape[0] * 7 or mask[0].tolist() != [1, 2, 2, 2]
        return self.other(x) if traced or packed else self.layer(x) * mask


def test_what_depends_on_constants_and_shapes_alone_may_be_read() -> None:
    example = Example("asking", Asking, vectors(4), square_loss)
    model, batch = example.make(), example.rows(3, 0)
    compiled = compile_example(example, model, batch, 1)
    assert train_in_stages(compiled, model, [batch]).differences(train_eagerly(example, example.make(), [batch])) == []
    assert compiled.captured is not None
    graph = compiled.captured.flat.module.graph
    names = [str(node.target) for node in graph.nodes]
    assert not [one for one in names if "item" in one or "local_scalar" in one or "diff" in one], names
    # A real tensor beside a graph would be held as long as the pipeline.
    assert all(type(node.meta["val"]) is not Tensor for node in graph.nodes if "val" in node.meta)


class Reading(nn.Module):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.what = what

    def forward(self, x: Tensor) -> Tensor:
        noted = torch.zeros(4, 4)
        row = noted[1]
        if self.what == "constant":
            noted[0] = x[0].detach()
            value = noted.sum()
        elif self.what == "view":
            noted[1] = x[0].detach()
            value = row.sum()
        elif self.what == "parameter":
            value = self.layer.weight.sum()
        else:
            value = torch.rand(3).sum()
        return self.layer(x) * (2 if value > 0 else 1)  # what must be named


@pytest.mark.parametrize("what", ["constant", "view", "parameter", "random"])
def test_a_read_of_any_other_value_is_refused_with_module_and_line(what: str) -> None:
    with pytest.raises(CaptureError) as caught:
        compile_stages(Reading(what), (torch.randn(2, 4),), {}, stages=1, loss=square_loss, targets=torch.randn(2, 4))
    lines = open(__file__).read().splitlines()  # noqa: SIM115, PTH123 - closed at once, read only
    number = next(index for index, line in enumerate(lines, 1) if "# what must be named" in line)
    assert f"module (the model itself) (Reading) at {__file__}:{number}: " in str(caught.value)
    assert "reads a value that depends on the model's inputs" in str(caught.value)


class Noting(nn.Module):
    """Writes what depends on its input into a constant, and goes on from the constant and from a view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        noted = torch.zeros(x.shape[0], 2, 4)
        first = noted[:, 0]
        noted[:, 0] = self.layer(x)
        noted[:, 1].copy_(torch.tanh(x))
        noted *= 2
        return first + noted.sum(1) + torch.tensor([1.0, 2.0, 3.0, 4.0])


@pytest.mark.parametrize("stages", [1, 2])
def test_a_constant_that_is_written_into_keeps_what_is_written(stages: int) -> None:
    example = Example("noting", lambda: nn.Sequential(nn.Linear(4, 4), Noting(), nn.Linear(4, 4)), vectors(4), square_loss)
    model, batch = example.make(), example.rows(3, 0)
    compiled = compile_example(example, model, batch, stages)
    assert train_in_stages(compiled, model, [batch]).differences(train_eagerly(example, example.make(), [batch])) == []


def test_torch_is_told_the_truth_again_afterwards() -> None:
    before = torch.compiler.is_compiling(), torch.compiler.is_exporting()
    with pytest.raises(CaptureError):
        compile_stages(Reading("view"), (torch.randn(2, 4),), {}, stages=1, loss=square_loss, targets=torch.randn(2, 4))
    assert (torch.compiler.is_compiling(), torch.compiler.is_exporting()) == before
    assert not is_fx_tracing()
