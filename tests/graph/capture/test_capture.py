from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from chained import SEED, STEP, compile_example, loss_of, train_eagerly, train_in_stages
from models import EXAMPLES, GPT, Options, class_loss, square_loss
from torch import Tensor, nn

from adaptra.errors import BatchError, CaptureError
from adaptra.graph.compile import CompiledStages, compile_stages
from adaptra.graph.ops.random_state import RandomKey, reference_randomness, run_seeded


def evaluate(
    compiled: CompiledStages, model: nn.Module, args: Any, kwargs: Any, targets: Any, *, with_loss: bool
) -> tuple[Tensor, ...]:
    message = tuple(compiled.inputs.flatten(args, kwargs))
    for stage, training in zip(compiled.eval, compiled.train, strict=True):
        given = compiled.targets.flatten(targets) if stage.loss and with_loss else ()
        message = stage.run_forward(training.state(model), message, given, with_loss=with_loss)
    return message


@pytest.mark.parametrize("stages", [1, 4])
@pytest.mark.parametrize("name", ["gpt_dropout", "gpt_tied", "resnet", "options", "skip_mlp", "noise"])
def test_evaluation_is_bitwise_the_model_in_evaluation_mode(name: str, stages: int) -> None:
    example = EXAMPLES[name]
    model = example.make()
    batch = example.rows(3, 0)
    compiled = compile_example(example, model, batch, stages)
    reference = example.make()
    # Batch norm's running statistics are those of a trained model, and evaluation does not change them.
    train_eagerly(example, model, [batch])
    reference.load_state_dict(model.state_dict())
    reference.eval()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with torch.no_grad():
        expected = loss_of(example, reference, batch)
    (loss,) = evaluate(compiled, model, *batch, with_loss=True)
    assert torch.equal(loss, expected)
    assert all(torch.equal(before[name], buffer) for name, buffer in model.named_buffers())


def test_without_targets_the_outputs_come_in_the_models_own_structure() -> None:
    example = EXAMPLES["options"]
    model = example.make()
    args, kwargs, _ = example.rows(3, 0)
    compiled = compile_example(example, model, (args, kwargs, None), 3)
    flat = evaluate(compiled, model, args, kwargs, None, with_loss=False)
    with torch.no_grad():
        expected = model.eval()(*args, **kwargs)
    found = compiled.outputs.unflatten(flat)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@dataclass
class Result:
    logits: Tensor
    loss: Tensor
    name: str = "result"


class Returns(nn.Module):
    def __init__(self, what: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.what = what

    def forward(self, x: Tensor) -> Any:
        return self.what(self.layer(x))


@pytest.mark.parametrize(
    "what",
    [
        lambda y: y.mean(),
        lambda y: (y.mean(), y),
        lambda y: {"logits": y, "loss": y.mean()},
        lambda y: Result(y, y.mean()),
    ],
    ids=["scalar", "tuple", "dict", "dataclass"],
)
def test_a_model_may_return_its_loss_in_several_ways(what: Callable[[Tensor], Any]) -> None:
    model, x = Returns(what), torch.randn(2, 4)
    compiled = compile_stages(model, (x,), {}, stages=1)
    (loss,) = evaluate(compiled, model, (x,), {}, None, with_loss=True)
    assert torch.equal(loss, model.layer(x).mean())
    outputs = compiled.outputs.unflatten(evaluate(compiled, model, (x,), {}, None, with_loss=False))
    assert type(outputs) is type(model(x))


@pytest.mark.parametrize(
    ("what", "loss", "message"),
    [
        (
            lambda y: y,
            None,
            r"the model returned float32\[2, 4\]: without loss= the model must return a scalar loss, or a dict",
        ),
        (lambda y: y, lambda y, t: y, r"the loss function returned shape \(2, 4\): expected a scalar tensor"),
        (lambda y: y, lambda y, t: 3, r"the loss function returned int: expected a scalar tensor"),
    ],
)
def test_a_missing_loss_is_refused(what: Any, loss: Any, message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        compile_stages(Returns(what), (torch.randn(2, 4),), {}, stages=1, loss=loss)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if y.sum() > 0:  # the line the error must name
            y = y * 2
        return y


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        return grad_outputs[0]


class Quantized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return Rounded.apply(self.layer(x))


def test_a_model_that_is_no_graph_is_refused_with_its_module_and_line() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(Branches()))
    with pytest.raises(CaptureError) as caught:
        compile_stages(model, (torch.randn(2, 4),), {}, stages=1, loss=square_loss, targets=torch.randn(2, 4))
    lines = open(__file__).read().splitlines()  # noqa: SIM115, PTH123 - closed at once, read only
    number = next(index for index, line in enumerate(lines, 1) if "the line the error must name" in line)
    assert f"module 1.0 (Branches) at {__file__}:{number}: the model can't become one graph" in str(caught.value)
    assert caught.value.__cause__ is not None
    assert model.training


def test_a_custom_backward_is_refused_and_not_dropped_in_silence() -> None:
    with pytest.raises(CaptureError, match=r"Rounded at .*test_capture.py:\d+: the model calls a torch.autograd.Function"):
        compile_stages(Quantized(), (torch.randn(2, 4),), {}, stages=1, loss=square_loss, targets=torch.randn(2, 4))


def test_a_loss_with_a_trainable_parameter_is_refused() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
            return square_loss(outputs, targets) * self.scale

    with pytest.raises(CaptureError, match="the loss function has a trainable parameter 'scale'"):
        compile_stages(nn.Linear(4, 4), (torch.randn(2, 4),), {}, stages=1, loss=Scaled(), targets=torch.randn(2, 4))


def test_a_loss_may_be_a_module_with_buffers() -> None:
    weight = torch.rand(10)
    model, x, y = nn.Linear(4, 10), torch.randn(6, 4), torch.arange(6)
    compiled = compile_stages(model, (x,), {}, stages=1, loss=nn.CrossEntropyLoss(weight), targets=y)
    (loss,) = evaluate(compiled, model, (x,), {}, y, with_loss=True)
    assert torch.equal(loss, nn.CrossEntropyLoss(weight)(model(x), y))


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((torch.zeros(3, 8), 3), {}, r"inputs: times is 3, but the pipeline was compiled with times=2 as a constant"),
        ((torch.zeros(3, 8), 2, True), {}, r"double is True, but the pipeline was compiled with double=False as a constant"),
        ((torch.zeros(3, 8), 2, 0), {}, r"double is 0, but the pipeline was compiled with double=False"),
        ((torch.zeros(3, 8, dtype=torch.float64), 2), {}, r"inputs: x is float64\[3, 8\]: expected float32\[batch, 8\]"),
        ((torch.zeros(3, 7), 2), {}, r"inputs: x is float32\[3, 7\]: expected float32\[batch, 8\]"),
        ((torch.zeros(8), 2), {}, r"inputs: x is float32\[8\]: expected float32\[batch, 8\]"),
        ((torch.zeros(3, 8),), {}, r"inputs: missing a required argument: 'times'"),
        ((torch.zeros(3, 8), 2), {"mask": torch.zeros(3, 8)}, r"inputs: mask is float32\[3, 8\], but .* with mask=None"),
        (
            (torch.zeros(3, 8), 2),
            {"other": 1},
            r"inputs: got an unexpected keyword argument 'other': expected arguments of forward",
        ),
        (([torch.zeros(3, 8)], 2), {}, r"inputs: given x=\[tensor\], times=2, .*: expected the structure"),
        ((3, 2), {}, r"inputs: x is an int: expected a tensor of float32"),
    ],
)
def test_a_batch_unlike_the_captured_one_is_refused(args: Any, kwargs: Any, message: str) -> None:
    compiled = _options_without_mask()
    with pytest.raises(BatchError, match=message):
        compiled.inputs.flatten(args, kwargs)


_COMPILED: list[CompiledStages] = []


def _options_without_mask() -> CompiledStages:
    if not _COMPILED:
        _COMPILED.append(compile_stages(Options(), (torch.zeros(3, 8), 2), {}, stages=2))
    return _COMPILED[0]


def test_an_argument_may_be_given_by_position_by_name_or_left_at_its_default() -> None:
    compiled, x = _options_without_mask(), torch.randn(6, 8)
    for args, kwargs in (((x, 2), {}), ((x,), {"times": 2}), ((), {"times": 2, "x": x}), ((x, 2, False), {"mask": None})):
        assert compiled.inputs.flatten(args, kwargs) == [x]


def test_a_smaller_last_batch_is_refused() -> None:
    compiled = _options_without_mask()
    state = compiled.train[0].state(Options())
    with pytest.raises(BatchError, match=r"stage 0: inputs: tensor 0 is .*\[2, 8\]: expected .*\[3, 8\]"):
        compiled.train[0].run_forward(state, [torch.zeros(2, 8)], RandomKey(0, 0, 0))


def test_compiling_leaves_the_model_as_it_was() -> None:
    model: Any = EXAMPLES["resnet"].make()
    model.body[0].norm1.eval()
    modes = [module.training for module in model.modules()]
    before = {name: (id(tensor), tensor.clone(), tensor._version) for name, tensor in model.state_dict(keep_vars=True).items()}
    attributes = {name: sorted(vars(module)) for name, module in model.named_modules()}
    generator = torch.get_rng_state()
    compiled = compile_example(EXAMPLES["resnet"], model, EXAMPLES["resnet"].rows(3, 0), 2)
    assert [module.training for module in model.modules()] == modes
    for name, tensor in model.state_dict(keep_vars=True).items():
        assert (id(tensor), tensor._version) == (before[name][0], before[name][2])
        assert torch.equal(tensor, before[name][1])
    assert {name: sorted(vars(module)) for name, module in model.named_modules()} == attributes
    assert torch.equal(torch.get_rng_state(), generator)
    # A part in evaluation mode stays frozen in training.
    batch = EXAMPLES["resnet"].rows(3, 0)
    assert train_in_stages(compiled, model, [batch]).differences(train_eagerly(EXAMPLES["resnet"], model, [batch])) == []


def test_a_model_given_in_evaluation_mode_trains_in_training_mode() -> None:
    example = EXAMPLES["noise"]
    model, batch = example.make().eval(), example.rows(3, 0)
    compiled = compile_example(example, model, batch, 2)
    assert not model.training
    assert train_in_stages(compiled, model, [batch]).differences(train_eagerly(example, model.train(), [batch])) == []


def test_nothing_compiled_refers_to_the_model_or_its_state() -> None:
    model = GPT(blocks=2)
    tensors = [weakref.ref(tensor) for tensor in model.state_dict(keep_vars=True).values()]
    compiled = compile_example(EXAMPLES["gpt"], model, EXAMPLES["gpt"].rows(2, 0), 2)
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None
    assert [tensor() for tensor in tensors if tensor() is not None] == []
    assert compiled.names["head.weight"] == (1,)


def test_the_same_model_compiles_to_the_same_stages_again() -> None:
    def text() -> list[str]:
        compiled = compile_example(EXAMPLES["skip_mlp"], EXAMPLES["skip_mlp"].make(), EXAMPLES["skip_mlp"].rows(2, 0), 3)
        return [
            f"{stage.parameters}{stage.inputs}{forward.code}{weight_grad.code}"
            for stage in compiled.train
            for forward, _, weight_grad in [stage.graphs]
        ]

    assert text() == text()


def test_every_name_of_the_state_has_its_stages() -> None:
    model = EXAMPLES["gpt_tied"].make()
    compiled = compile_example(EXAMPLES["gpt_tied"], model, EXAMPLES["gpt_tied"].rows(2, 0), 4)
    assert set(compiled.names) == set(dict(model.state_dict()))
    (tied,) = compiled.tied
    assert (tied.name, tied.aliases, tied.stages, tied.owner, tied.order) == (
        "tokens.weight",
        ("head.weight",),
        (0, 3),
        0,
        (3, 0),
    )
    assert compiled.names["head.weight"] == (0, 3)
    held = [name for stage in compiled.train for name in (*stage.parameters, *stage.buffers)]
    assert sorted(set(held)) == sorted(set(compiled.aliases.values()))
    inplace = compile_example(EXAMPLES["inplace"], EXAMPLES["inplace"].make(), EXAMPLES["inplace"].rows(2, 0), 2)
    assert inplace.non_persistent == {"table"}
    assert inplace.names["unused.weight"] == inplace.names["layers.3.bias"]


def test_random_numbers_depend_on_seed_step_microbatch_and_op_only() -> None:
    def draw(key: RandomKey) -> list[Tensor]:
        with reference_randomness(key):
            return [torch.rand(4), nn.functional.dropout(torch.ones(64)), torch.randn(4), torch.randperm(9)]

    before = torch.get_rng_state()
    first = draw(RandomKey(SEED, STEP, 0))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(*pair) for pair in zip(first, draw(RandomKey(SEED, STEP, 0)), strict=True))
    for other in (RandomKey(SEED + 1, STEP, 0), RandomKey(SEED, STEP + 1, 0), RandomKey(SEED, STEP, 1)):
        assert not any(torch.equal(*pair) for pair in zip(first, draw(other), strict=True))
    aten = torch.ops.aten
    assert torch.equal(first[2], run_seeded(RandomKey(SEED, STEP, 0), 2, aten.randn.default, [4]))


def test_an_op_without_a_generator_of_its_own_leaves_the_default_one_alone() -> None:
    key, ones, before = RandomKey(1, 2, 3), torch.ones(64), torch.get_rng_state()
    first, second = (run_seeded(key, 0, torch.ops.aten.native_dropout.default, ones, 0.5, True)[0] for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), before)


def test_integer_targets_enter_at_the_last_stage_only() -> None:
    example = EXAMPLES["resnet"]
    compiled = compile_stages(example.make(), *example.rows(3, 0)[:2], stages=3, loss=class_loss, targets=torch.zeros(3).long())
    assert [len(stage.targets) for stage in compiled.train] == [0, 0, 1]
    with pytest.raises(BatchError, match=r"targets: targets is int32\[3\]: expected int64\[batch\]"):
        compiled.targets.flatten(torch.zeros(3, dtype=torch.int32))
