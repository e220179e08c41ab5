"""The norm of all gradients of a model whose stages are on several ranks, bitwise equal to that of one process.

torch takes the norm of each parameter's gradient, and then the norm of those norms, in the order of the parameters. So the
ranks exchange the norms of their parameters' gradients. Each sends them to every other at once, so that a slow link adds only
its latency. Every rank then sorts them in the model's order and gets the same number. The ranks exchange in the same way
whether any of them found a gradient that is not finite.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from adaptra.graph import CompiledStages
from adaptra.graph.ops.specs import MessageSpec, TensorSpec
from adaptra.runtime.transports.base import Identity, Purpose, Transport

_DTYPES: Final = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_ABSENT: Final = -1.0
"""Stands for the norm of a parameter without gradient: norms are never negative."""
_FLAG: Final = (TensorSpec((1,), torch.float32),)


class GradientNorms:
    """One rank's part. Used by the thread that runs the steps, between two of them.

    Args:
        rank: This rank; messages name it by its first stage.
        trainable: The trainable parameters of its stages by name.
        compiled: All stages; a parameter that several use counts at its owner.
        placement: ``placement[stage]`` is the stage's rank.
        transport: Carries the messages.
    """

    def __init__(
        self,
        rank: int,
        trainable: Mapping[str, Tensor],
        compiled: CompiledStages,
        placement: Sequence[int],
        transport: Transport,
    ) -> None:
        self._rank = rank
        self._placement = placement
        self._trainable = trainable
        owners = {one.name: one.owner for one in compiled.tied}
        counted = [[name for name in one.trainable if owners.get(name, one.index) == one.index] for one in compiled.train]
        self._counted = [
            tuple(name for stage, names in enumerate(counted) if placement[stage] == each for name in names)
            for each in range(len(set(placement)))
        ]
        self._order = tuple(dict.fromkeys(compiled.aliases.values()))
        self._transport = transport

    def receive_counts(self) -> dict[tuple[int, MessageSpec], int]:
        """Return the number of receive buffers needed at a time, per source rank and message."""
        return {(other, spec): 1 for other in self._others() for spec in (self._spec(other), _FLAG)}

    def total(self, step: int, norm_type: float, timeout: float) -> Tensor:
        """Return the norm of the gradients as they are, a scalar; every rank calls it after the same step.

        Args:
            step: The last step that was run.
            norm_type: The p of the p-norm; ``inf`` for the largest absolute value.
            timeout: Seconds to wait for the other ranks.

        Raises:
            TransportError: Norms could not be exchanged.
        """
        gradients = [self._trainable[name].grad for name in self._counted[self._rank]]
        own = [None if one is None else torch.linalg.vector_norm(one.detach(), norm_type) for one in gradients]
        rows = [(_ABSENT, 0.0) if one is None else (one.item(), float(_DTYPES.index(one.dtype))) for one in own]
        table = torch.tensor(rows, dtype=torch.float64).reshape(-1, 2)
        norms = _named(self._counted[self._rank], table)
        for other, arrived in self._exchange(step, table, self._spec, timeout).items():
            norms |= _named(self._counted[other], arrived)
        ordered = [norms[name] for name in self._order if name in norms]
        return torch.linalg.vector_norm(torch.stack(ordered), norm_type) if ordered else torch.tensor(0.0)

    def found_anywhere(self, step: int, has_property: bool, timeout: float) -> bool:
        """Return True if ``has_property`` is true on any rank; every rank calls it after the same step.

        Args:
            step: The last step that was run.
            has_property: Whether this rank's gradients have the property in question.
            timeout: Seconds to wait for the other ranks.

        Raises:
            TransportError: The answers could not be exchanged.
        """
        answers = self._exchange(step, torch.tensor([float(has_property)]), lambda _: _FLAG, timeout)
        return has_property or any(bool(one) for one in answers.values())

    def _exchange(self, step: int, own: Tensor, spec_of: Callable[[int], MessageSpec], timeout: float) -> dict[int, Tensor]:
        """Send this rank's tensor to every other rank and return theirs; ``spec_of`` gives the form of each rank's tensor."""

        def identity(source: int, destination: int) -> Identity:
            ends = self._placement.index(source), self._placement.index(destination)
            return Identity(step, Purpose.GRADIENT_NORM, *ends, 0, spec_of(source))

        awaited = {other: self._transport.receive(other, identity(other, self._rank)) for other in self._others()}
        for other in awaited:
            self._transport.send(other, identity(self._rank, other), (own,))
        arrived: dict[int, Tensor] = {}
        for other, pending in awaited.items():
            arrived[other] = pending.wait(timeout)[0].clone()
            self._transport.release(pending)
        return arrived

    def _others(self) -> list[int]:
        return [rank for rank in range(len(self._counted)) if rank != self._rank]

    def _spec(self, rank: int) -> MessageSpec:
        return (TensorSpec((len(self._counted[rank]), 2), torch.float64),)


def _named(names: Sequence[str], table: Tensor) -> dict[str, Tensor]:
    """Return the norms of those parameters that have gradients, each in its parameter's precision."""
    rows = zip(names, table.tolist(), strict=True)
    return {name: torch.tensor(norm, dtype=_DTYPES[int(index)]) for name, (norm, index) in rows if norm != _ABSENT}
