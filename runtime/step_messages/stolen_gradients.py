"""Weight gradients of microbatches that other replicas have taken, on their way home.

Floating-point sums depend on their order, so each microbatch's gradients travel by themselves, and their home adds them up in
microbatch order. They go through host memory, in one message of bytes, so that a rank has memory for one at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from adaptra.graph.ops.specs import MessageSpec, TensorSpec
from adaptra.runtime.data_parallel.accumulators import Accumulators
from adaptra.runtime.step_messages.shared_gradients import AwayFromHome, Gradients
from adaptra.runtime.transports.base import Transport
from adaptra.runtime.transports.message_format import flat_bytes


class StolenGradients(Gradients):
    """The weight gradients of one stage of another replica, which are kept by microbatch instead of added up.

    Args:
        rank: This rank.
        parameters: The stage's trainable parameters.
        transport: Joins the workers of all replicas.
        timeout: As of :class:`.Gradients`.
    """

    def __init__(self, rank: int, parameters: Mapping[str, Tensor], transport: Transport, timeout: float) -> None:
        super().__init__(rank, Accumulators(parameters), (), (), transport, timeout)
        self._kept: dict[int, list[Tensor | None]] = {}

    def begin_step(self, step: int, away: AwayFromHome | None = None, first: int = 0) -> None:
        """Start a step, and discard the remains of an interrupted one."""
        super().begin_step(step, away, first)
        self._kept.clear()

    def add(self, stage: int, name: str, microbatch: int, gradient: Tensor | None, *, fresh: bool = False) -> None:
        """Keep a gradient. It is copied, since the buffers that it may be a view of are used again."""
        self._kept.setdefault(microbatch, []).append(None if gradient is None else gradient.clone())

    def take(self, microbatch: int) -> list[Tensor | None]:
        """Return the gradients of a microbatch, in the order of W's results, and keep them no longer.

        There are none of a stage without trainable parameters.
        """
        return self._kept.pop(microbatch, [])


class PackedTensors:
    """How tensors lie in a message of bytes; each may be missing.

    Args:
        specs: The tensors.
    """

    def __init__(self, specs: Sequence[TensorSpec]) -> None:
        self._specs = specs
        # The message is as long as its flat buffer, so that it can be received into memory of its own.
        lines = [flat_bytes((spec,)) for spec in (TensorSpec((len(specs),), torch.uint8), *specs)]
        *begins, self._size = accumulate(lines)
        self._places = [slice(begin, begin + spec.bytes) for begin, spec in zip(begins, specs, strict=True)]

    def __bool__(self) -> bool:
        """Whether there are any, and so a message."""
        return bool(self._specs)

    @property
    def spec(self) -> MessageSpec:
        """The message."""
        return (TensorSpec((self._size,), torch.uint8, stays_on_host=True),)

    def empty(self) -> Tensor:
        """Return memory for a message."""
        return torch.empty(self._size, dtype=torch.uint8, device="cpu")

    def pack(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """Return the message of these tensors."""
        packed = self.empty()
        for number, (tensor, view) in enumerate(zip(tensors, self._views(packed), strict=True)):
            packed[number] = tensor is not None
            if tensor is not None:
                assert (tensor.dtype, tensor.shape) == (view.dtype, view.shape), "gradients are as their parameters"
                view.copy_(tensor)
        return packed

    def unpack(self, packed: Tensor) -> list[Tensor | None]:
        """Return the tensors of a message, which are parts of it."""
        is_there = packed[: len(self._specs)].tolist()
        return [view if there else None for there, view in zip(is_there, self._views(packed), strict=True)]

    def _views(self, packed: Tensor) -> list[Tensor]:
        return [packed[place].view(spec.dtype).view(spec.shape) for place, spec in zip(self._places, self._specs, strict=True)]
