"""Train an example in a pipeline and in plain torch, and compare bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name all of torch uses
from models import Batch, Example, square_loss, vectors
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import adaptra
from adaptra.graph.ops.random_state import RandomKey, reference_randomness

Optimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class Mixed(nn.Module):
    """What depends on order, in one small model: a tied weight, dropout, BatchNorm's statistics and skip connections."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.middle = nn.ModuleList(nn.Linear(width, width) for _ in range(6))
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for _ in range(3))
        self.last = nn.Linear(width, width)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        start = x = torch.tanh(self.first(x))
        for index, layer in enumerate(self.middle):
            x = F.dropout(torch.tanh(layer(x)), 0.2, self.training) + (start if index % 2 else x)
            if index % 2:
                x = self.norms[index // 2](x)
        return self.last(x)


CLOCK_BYTES = 8
MIXED = Example("mixed", Mixed, vectors(8), square_loss)


@dataclass(frozen=True)
class Step:
    """What one step leaves.

    Attributes:
        losses: Of the microbatches, in their order.
        gradients: By parameter name, before the optimizer's step; of a parameter with several copies, of each copy.
        state: Parameters and buffers by name, after the optimizer's step.
    """

    losses: Tensor
    gradients: list[tuple[str, Tensor | None]]
    state: dict[str, Tensor]

    def differences(self, expected: Step, whole: bool = True) -> list[str]:
        """What is not bitwise as expected, by name.

        Args:
            expected: The plain model's step.
            whole: Whether everything that is expected must be here; False for one rank of several.
        """
        found = [] if _equal(self.losses, expected.losses) else [f"losses {self.losses} instead of {expected.losses}"]
        wanted = dict(expected.gradients)
        found += [f"gradient of {name}" for name, one in self.gradients if not _equal(one, wanted[name])]
        found += [f"state {name}" for name, one in self.state.items() if not _equal(one, expected.state[name])]
        if whole:
            found += [f"no gradient of {name}" for name in wanted.keys() - dict(self.gradients).keys()]
            found += [f"no state {name}" for name in expected.state.keys() - self.state.keys()]
        return found


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.dtype == other.dtype and torch.equal(one, other)


def adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def microbatches_of(batch: Batch, count: int) -> list[Batch]:
    """The batch in parts along the first dimension, as a user would cut it."""
    leaves, tree = pytree.tree_flatten(batch)
    columns = [leaf.chunk(count) if isinstance(leaf, Tensor) and leaf.dim() else [leaf] * count for leaf in leaves]
    return [pytree.tree_unflatten(list(row), tree) for row in zip(*columns, strict=True)]


def loss_of(example: Example, model: nn.Module, batch: Batch) -> Tensor:
    args, kwargs, targets = batch
    outputs = model(*args, **kwargs)
    return outputs["loss"] if example.loss is None else example.loss(outputs, targets)


def train_alone(
    example: Example,
    batches: Sequence[Batch],
    microbatches: int,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    optimizer: Optimizer = adam,
    model: nn.Module | None = None,
) -> list[Step]:
    """Plain torch in one process: a backward pass per microbatch, one optimizer step per batch.

    Args:
        example: What to train.
        batches: One per step.
        microbatches: Into how many parts each is cut.
        dtype: Of the fresh model.
        seed: Of the random numbers, which are those of a pipeline with this seed.
        optimizer: Makes the optimizer.
        model: The model to train instead of a fresh one.
    """
    model = example.make(dtype) if model is None else model
    optim = optimizer(model.parameters())
    steps: list[Step] = []
    for index, batch in enumerate(batches):
        losses: list[Tensor] = []
        for k, part in enumerate(microbatches_of(batch, microbatches)):
            with reference_randomness(RandomKey(seed, index, k)):
                loss = loss_of(example, model, part)
            (loss / microbatches).backward()
            losses.append(loss.detach())
        gradients = [(name, None if one.grad is None else one.grad.clone()) for name, one in model.named_parameters()]
        optim.step()
        optim.zero_grad()
        steps.append(Step(torch.stack(losses), gradients, _copied(model.state_dict())))
    return steps


def call(batch: Batch) -> tuple[tuple[Any, Any], dict[str, Any]]:
    """How a batch is given to a pipeline's step."""
    args, kwargs, targets = batch
    return (args, targets), kwargs


@contextmanager
def compiled(
    example: Example,
    batch: Batch,
    *,
    stages: int,
    microbatches: int,
    model: nn.Module | None = None,
    dtype: torch.dtype = torch.float32,
    **arguments: Any,
) -> Generator[adaptra.Pipeline, None, None]:
    """A pipeline of a fresh model, or of this one."""
    args, kwargs, targets = batch
    with adaptra.compile(
        example.make(dtype) if model is None else model,
        stages=stages,
        microbatches=microbatches,
        example_inputs=(args, targets),
        example_kwargs=kwargs,
        loss=example.loss,
        **arguments,
    ) as pipe:
        yield pipe


def run_step(pipe: adaptra.Pipeline, optim: torch.optim.Optimizer, batch: Batch) -> Step:
    """One step of a pipeline and its optimizer."""
    args, kwargs = call(batch)
    pipe.step(*args, **kwargs)
    gradients = [(name, None if one.grad is None else one.grad.clone()) for name, one in pipe.named_parameters()]
    optim.step()
    optim.zero_grad()
    return Step(pipe.microbatch_losses, gradients, _copied(pipe.state_dict()))


def train(pipe: adaptra.Pipeline, batches: Sequence[Batch], optimizer: Optimizer = adam) -> list[Step]:
    """A pipeline's steps, in the way of :func:`train_alone`."""
    optim = optimizer(pipe.parameters())
    return [run_step(pipe, optim, batch) for batch in batches]


def carried(pipe: adaptra.Pipeline) -> set[tuple[int, int]]:
    """The links over which this process's delegate has sent messages of the job, as (source, destination)."""
    assert pipe._session is not None
    lanes: Any = pipe._session.workers[0]._context.transport
    lanes = getattr(lanes, "_job", lanes)  # which joins the ranks of all replicas
    lanes = getattr(lanes, "_transport", lanes)._lanes["delegate"]
    # Clocks are compared over it too, by messages of one time each.
    return {
        (source, destination)
        for source, destination, _, is_sender, counters in lanes.statistics()
        if is_sender and counters["bytes"] > CLOCK_BYTES * counters["acknowledged"]
    }


def differences(steps: Sequence[Step], expected: Sequence[Step], whole: bool = True) -> list[str]:
    """What differs in any step."""
    assert len(steps) == len(expected)
    return [
        f"step {index}: {text}"
        for index, (step, reference) in enumerate(zip(steps, expected, strict=True))
        for text in step.differences(reference, whole)
    ]


def _copied(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: one.detach().clone() for name, one in state.items()}
