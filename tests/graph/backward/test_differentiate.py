from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from chained import compile_example, loss_of, train_eagerly, train_in_stages
from models import EXAMPLES, Batch, Example, TiedBlocks, begin_blocks, square_loss, tied_blocks, vectors
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from adaptra.errors import BatchError, CaptureError
from adaptra.graph.compile import CompiledStages, compile_stages
from adaptra.graph.ops.random_state import RandomKey

ROWS, MICROBATCHES = 3, 3


@pytest.mark.parametrize(
    ("dtype", "stages"),
    [(torch.float32, 1), (torch.float32, 2), (torch.float32, 4), (torch.bfloat16, 1), (torch.bfloat16, 4)],
    ids=["fp32-1", "fp32-2", "fp32-4", "bf16-1", "bf16-4"],
)
@pytest.mark.parametrize("name", EXAMPLES)
def test_stages_compute_bitwise_what_eager_torch_computes(name: str, dtype: torch.dtype, stages: int) -> None:
    example = EXAMPLES[name]
    batches = [example.rows(ROWS, seed, dtype) for seed in range(MICROBATCHES)]
    model = example.make(dtype)
    compiled = compile_example(example, model, batches[0], stages)
    assert len(compiled.train) == stages
    in_stages = train_in_stages(compiled, model, batches)
    assert in_stages.differences(train_eagerly(example, model, batches)) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_all_uses_of_a_tied_weight_are_added_in_autograds_order(stages: int, dtype: torch.dtype) -> None:
    for seed in range(4):
        example = tied_blocks(stages, 10 * stages + seed)
        batches = [example.rows(ROWS, seed, dtype) for seed in range(MICROBATCHES)]
        model: Any = example.make(dtype)
        compiled = compile_example(example, model, batches[0], stages, split=begin_blocks(stages))
        in_stages = train_in_stages(compiled, model, batches)
        assert in_stages.differences(train_eagerly(example, model, batches)) == [], [block.uses for block in model.blocks]


def compile_blocks(*uses: Sequence[str]) -> CompiledStages:
    example = Example("tied_blocks", lambda: TiedBlocks(uses), vectors(8), square_loss)
    return compile_example(example, example.make(), example.rows(ROWS, 0), len(uses), split=begin_blocks(len(uses)))


def test_only_uses_that_autograd_adds_to_a_sum_of_later_ones_are_handed_on_one_by_one() -> None:
    name = "blocks.0.weight"
    compiled = compile_blocks(["layer"] * 3, ["without gradient"], ["layer", "both arguments"], ["layer"] * 2)
    assert [stage.contributions.count(name) for stage in compiled.train] == [3, 0, 3, 1]
    assert all(name in stage.trainable for stage in compiled.train)
    (tied,) = compiled.tied
    assert (tied.stages, tied.owner, tied.order) == ((0, 1, 2, 3), 0, (3, 2, 2, 2, 0, 0, 0))


def test_a_tied_weight_whose_uses_never_reach_the_loss_has_no_gradient() -> None:
    compiled = compile_blocks(["without gradient"], ["without gradient"])
    assert not any("blocks.0.weight" in (*stage.trainable, *stage.contributions) for stage in compiled.train)
    (tied,) = compiled.tied
    assert (tied.stages, tied.order) == ((0, 1), ())


def compiled_example(name: str, stages: int, split: list[str] | None = None) -> tuple[CompiledStages, nn.Module, Batch]:
    example = EXAMPLES[name]
    model, batch = example.make(), example.rows(ROWS, 0)
    return compile_example(example, model, batch, stages, split=split), model, batch


def test_without_adaptras_randomness_plain_eager_torch_gives_the_same_too() -> None:
    example = EXAMPLES["gpt"]
    batches = [example.rows(ROWS, seed) for seed in range(MICROBATCHES)]
    model = example.make()
    in_stages = train_in_stages(compile_example(example, model, batches[0], 4), model, batches)
    assert in_stages.differences(train_eagerly(example, model, batches, random=False)) == []


def test_input_and_weight_gradients_together_do_the_work_of_one_backward_pass() -> None:
    # torch counts its own CPU attention kernel since 2.15; left out here, and counted by hand.
    uncounted = dict.fromkeys((_FLASH, _FLASH_BACKWARD), lambda *_, **__: 0)
    for name in ("gpt", "resnet", "skip_mlp"):
        compiled, model, batch = compiled_example(name, 4)
        with FlopCounterMode(display=False, custom_mapping=uncounted) as forward:
            loss = loss_of(EXAMPLES[name], model, batch)
        with FlopCounterMode(display=False, custom_mapping=uncounted) as backward:
            loss.backward()
        attention = _attention_flops() if name == "gpt" else (0, 0)
        assert sum(stage.flops.forward for stage in compiled.train) == forward.get_total_flops() + attention[0]
        both = sum(stage.flops.input_grad + stage.flops.weight_grad for stage in compiled.train)
        assert both == backward.get_total_flops() + attention[1]


_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def _attention_flops() -> tuple[int, int]:
    # Of 4 layers: 2 products forward, 5 backward, of 4 heads, 16 x 16 x 8.
    product = 2 * ROWS * 4 * 16 * 16 * 8
    return 4 * 2 * product, 4 * 5 * product


def test_a_stage_behind_frozen_ones_gets_its_gradients_and_sends_none_back() -> None:
    compiled, _, _ = compiled_example("frozen_upstream", 4, ["layers.2", "layers.4", "layers.6"])
    assert [stage.trainable for stage in compiled.train] == [
        (),
        (),
        ("layers.4.weight", "layers.4.bias"),
        ("layers.6.weight", "layers.6.bias"),
    ]
    assert [len(stage.grad_inputs) for stage in compiled.train] == [0, 0, 0, 1]
    frozen, first = compiled.train[0], compiled.train[2]
    assert (frozen.kept_after_forward, frozen.kept_after_input_grad) == (0, 0)
    assert frozen.flops.input_grad == frozen.flops.weight_grad == 0
    # Nobody needs the gradient of its input, so W does all there is to do.
    assert first.flops.input_grad == 0 < first.flops.weight_grad


def test_a_stage_that_ends_in_a_view_sends_its_memory_as_it_lies() -> None:
    compiled, model, batch = compiled_example("views", 4, ["layers.1", "layers.2", "layers.3"])
    stage = compiled.train[0]
    (sent,), _ = stage.run_forward(stage.state(model), batch[0], RandomKey(0, 0, 0))
    layers: Any = model.layers
    assert torch.equal(sent, layers[0](batch[0][0]))


def test_what_a_microbatch_keeps_is_what_the_stage_says_and_is_freed_when_used() -> None:
    """Saved values and received messages, apart from the caller's batch."""
    compiled, model, (args, _, targets) = compiled_example("gpt", 4)
    message: tuple[Tensor, ...] = args
    for stage in compiled.train:
        state = stage.state(model)
        held = {tensor.untyped_storage().data_ptr() for tensor in state.values()}
        received = message if stage.index else ()
        message, saved = stage.run_forward(state, message, RandomKey(0, 0, 0), (targets,) if stage.targets else ())
        assert _bytes([*saved.values, *received], held) == stage.kept_after_forward
        grad_outputs = [torch.ones(spec.shape) for spec in stage.grad_outputs]
        kept = [weakref.ref(tensor) for tensor in saved.values if tensor.untyped_storage().data_ptr() not in held]
        sent, left = stage.run_input_grad(saved, grad_outputs)
        assert saved.values == []
        received = (*received, *grad_outputs)
        assert _bytes([*left.values, *received], held) == stage.kept_after_input_grad
        needed = {one.untyped_storage().data_ptr() for one in (*left.values, *received, *message, *args, *sent, targets)}
        alive = [tensor for tensor in (ref() for ref in kept) if tensor is not None]
        assert [tensor.shape for tensor in alive if tensor.untyped_storage().data_ptr() not in needed] == []
        del alive
        stage.run_weight_grad(left)
        assert left.values == []


def _bytes(tensors: list[Tensor], held: set[int]) -> int:
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(size for pointer, size in storages.items() if pointer not in held)


def test_the_weight_gradients_of_a_convolution_are_left_to_w() -> None:
    compiled, _, _ = compiled_example("resnet", 2)
    last = compiled.train[1]
    assert last.flops.input_grad == last.flops.forward
    assert last.flops.weight_grad == last.flops.forward


class ChangesWhatItNeeds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.layer(x))
        y.mul_(2.0)
        return y


def test_a_model_that_autograd_refuses_is_refused() -> None:
    x = torch.randn(2, 4)
    with pytest.raises(
        CaptureError, match=r"stage 0, layer: torch can't differentiate .*: one of the variables needed for gradient"
    ):
        compile_stages(ChangesWhatItNeeds(), (x,), {}, stages=1, loss=lambda y, _: y.sum())


def test_a_missing_gradient_counts_as_zeros() -> None:
    compiled, model, (args, _, _) = compiled_example("skip_mlp", 2)
    stage = compiled.train[0]
    for grad_outputs in ([None] * len(stage.grad_outputs), [torch.zeros(spec.shape) for spec in stage.grad_outputs]):
        _, saved = stage.run_forward(stage.state(model), args, RandomKey(0, 0, 0))
        _, left = stage.run_input_grad(saved, grad_outputs)
        assert not any(gradient is not None and gradient.any() for gradient in stage.run_weight_grad(left))


def test_gradients_of_another_shape_are_refused() -> None:
    compiled, model, (args, _, _) = compiled_example("skip_mlp", 2)
    stage = compiled.train[0]
    _, saved = stage.run_forward(stage.state(model), args, RandomKey(0, 0, 0))
    with pytest.raises(BatchError, match=r"stage 0: 0 output gradients: expected \d"):
        stage.run_input_grad(saved, [])
    with pytest.raises(
        BatchError, match=r"stage 0: output gradients: tensor 0 is torch.float32\[1\]: expected torch.float32\[3, 16\]"
    ):
        stage.run_input_grad(saved, [torch.zeros(1)] * len(stage.grad_outputs))


def test_all_stages_of_a_gpt_compile_in_a_few_seconds() -> None:
    example = EXAMPLES["gpt"]
    model, batch = example.make(), example.rows(ROWS, 0)
    started = time.process_time()
    compile_example(example, model, batch, 4)
    assert time.process_time() - started < 15.0
