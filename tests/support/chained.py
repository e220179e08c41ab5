"""Plain eager training, and compiled stages chained in one process: what tests compare bitwise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from models import Batch, Example
from torch import Tensor, nn

from adaptra.graph.compile import CompiledStages, compile_stages
from adaptra.graph.ops.random_state import RandomKey, reference_randomness

SEED, STEP = 5, 3


@dataclass(frozen=True)
class Trained:
    """What one step over some microbatches leaves: losses, gradients by name, and buffers by name."""

    losses: tuple[Tensor, ...]
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]

    def differences(self, other: Trained) -> list[str]:
        """What differs bitwise, by name."""
        found = [f"loss {k}" for k, pair in enumerate(zip(self.losses, other.losses, strict=True)) if not torch.equal(*pair)]
        for kind, mine, theirs in (("grad", self.gradients, other.gradients), ("buffer", self.buffers, other.buffers)):
            for name in mine.keys() | theirs.keys():
                one, two = mine.get(name), theirs.get(name)
                if (one is None) != (two is None) or (one is not None and two is not None and not torch.equal(one, two)):
                    found.append(f"{kind} {name}")
        return sorted(found)


def compile_example(example: Example, model: nn.Module, batch: Batch, stages: int, **options: Any) -> CompiledStages:
    args, kwargs, targets = batch
    return compile_stages(model, args, kwargs, stages=stages, loss=example.loss, targets=targets, **options)


def loss_of(example: Example, model: nn.Module, batch: Batch) -> Tensor:
    args, kwargs, targets = batch
    outputs = model(*args, **kwargs)
    return outputs["loss"] if example.loss is None else example.loss(outputs, targets)


def train_eagerly(example: Example, model: nn.Module, batches: Sequence[Batch], random: bool = True) -> Trained:
    """Plain torch: one backward pass per microbatch, gradients accumulated by autograd."""
    losses: list[Tensor] = []
    for k, batch in enumerate(batches):
        if random:
            with reference_randomness(RandomKey(SEED, STEP, k)):
                loss = loss_of(example, model, batch)
        else:
            loss = loss_of(example, model, batch)
        (loss / len(batches)).backward()
        losses.append(loss.detach())
    return Trained(
        tuple(losses),
        {name: parameter.grad for name, parameter in model.named_parameters()},
        {name: buffer.clone() for name, buffer in model.named_buffers()},
    )


def train_in_stages(compiled: CompiledStages, model: nn.Module, batches: Sequence[Batch]) -> Trained:
    """All F of a microbatch, then its I and W, each stage with a state of its own; every F runs before the first I."""
    states = [{name: tensor.detach().clone() for name, tensor in stage.state(model).items()} for stage in compiled.train]
    last = len(compiled.train) - 1
    losses: list[Tensor] = []
    saved: list[list[Any]] = []
    for k, (args, kwargs, targets) in enumerate(batches):
        message: Sequence[Tensor] = compiled.inputs.flatten(args, kwargs)
        saved.append([])
        for stage in compiled.train:
            given = compiled.targets.flatten(targets) if stage.index == last else ()
            message, kept = stage.run_forward(states[stage.index], message, RandomKey(SEED, STEP, k), given)
            assert [(tuple(one.shape), one.dtype) for one in message] == [(spec.shape, spec.dtype) for spec in stage.outputs]
            assert all(one.is_contiguous() for one in message)
            message = [one.clone() for one in message]
            saved[k].append(kept)
        losses.append(message[0])
    orders = {one.name: one.order for one in compiled.tied}
    total: dict[str, Tensor | None] = dict.fromkeys(name for stage in compiled.train for name in stage.parameters)
    for k in range(len(batches)):
        backward: Sequence[Tensor] = [torch.ones_like(losses[k]) / len(batches)] if compiled.train[last].grad_outputs else []
        contributions: dict[tuple[str, int], list[Tensor]] = {}
        for stage in reversed(compiled.train):
            backward, saved[k][stage.index] = stage.run_input_grad(saved[k][stage.index], backward)
            assert [(tuple(one.shape), one.dtype) for one in backward] == [
                (spec.shape, spec.dtype) for spec in stage.grad_inputs
            ]
            backward = [one.clone() for one in backward]
        for stage in compiled.train:
            gradients = stage.run_weight_grad(saved[k][stage.index])
            for name, one in zip(stage.contributions, gradients, strict=True):
                assert one is not None
                contributions.setdefault((name, stage.index), []).append(one)
        for name, before in total.items():
            order = orders.get(name, tuple(stage.index for stage in compiled.train if name in stage.trainable))
            if order:
                summed, *others = (contributions[name, user].pop(0) for user in order)
                for one in others:
                    summed = summed + one
                total[name] = summed.clone() if before is None else before + summed
    buffers = {name: state[name] for state, stage in zip(states, compiled.train, strict=True) for name in stage.buffers}
    return Trained(tuple(losses), total, buffers)
