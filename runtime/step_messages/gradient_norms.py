"""The norm of all gradients of a model whose stages are on several ranks, bitwise equal to that of one process.

torch takes the norm of each parameter's gradient, and then the norm of those norms, in the order of the parameters. So the
ranks exchange the norms of their parameters' gradients. Each sends them to every other at once, so that a slow link adds only
its latency. Every rank then sorts them in the model's order and gets the same number, on its device, by torch's own functions.
The host never waits for a GPU: which parameters have gradients is known to it beside their norms. The ranks exchange in the
same way whether any of them found a gradient that is not finite. Where the optimizer is sharded, the replicas exchange before.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import reduce
from typing import Final

import torch
from torch import Tensor

from adaptra.graph import CompiledStages
from adaptra.graph.ops.specs import MessageSpec, TensorSpec
from adaptra.program.placement import stages_of
from adaptra.runtime.data_parallel.shards import Shards
from adaptra.runtime.devices.read_later import moved_to
from adaptra.runtime.transports.base import Identity, Purpose, Transport

_DTYPES: Final = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_ABSENT: Final = 255
"""Stands for the precision of a parameter's norm that has no gradient."""
_FLAG: Final = (TensorSpec((1,), torch.float32, stays_on_host=True),)


def counted_on(stages: Collection[int], compiled: CompiledStages) -> tuple[str, ...]:
    """Return the trainable parameters that count on a rank with these stages: each of a model's counts on one rank."""
    owners = compiled.owners
    return tuple(
        name
        for one in compiled.train
        if one.index in stages
        for name in one.trainable
        if owners.get(name, one.index) == one.index
    )


class GradientNorms:
    """One rank's part. Used by the thread that runs the steps, between two of them.

    Args:
        rank: This rank; messages name it by its first stage.
        trainable: The trainable parameters of its stages by name.
        compiled: All stages; a parameter that several use counts at its owner.
        placement: ``placement[stage]`` is the stage's rank.
        transport: Carries the messages.
        device: The device of the parameters, and of the norm.
    """

    def __init__(
        self,
        rank: int,
        trainable: Mapping[str, Tensor],
        compiled: CompiledStages,
        placement: Sequence[int],
        transport: Transport,
        device: torch.device,
    ) -> None:
        self._rank = rank
        self._placement = placement
        self._trainable = trainable
        self._counted = [counted_on(stages_of(each, placement), compiled) for each in range(len(set(placement)))]
        self._device = device
        self._order = tuple(dict.fromkeys(compiled.aliases.values()))
        self._transport = transport
        self._shards: Shards | None = None

    def shard(self, shards: Shards) -> None:
        """Take each gradient's norm from the replica that owns the parameter, from now on."""
        self._shards = shards

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
        own = self._own(norm_type)
        tables = {self._rank: own} | self._exchange(step, own, self._spec, timeout)
        held = [
            (name, code)
            for rank, (_, codes) in sorted(tables.items())
            for name, code in zip(self._counted[rank], codes.tolist(), strict=True)
        ]
        places = {name: place for place, (name, code) in enumerate(held) if code != _ABSENT}
        if not places:
            return torch.zeros((), device=self._device)
        order = torch.tensor([places[name] for name in self._order if name in places])
        norms = torch.cat([moved_to(self._device, norms) for _, (norms, _) in sorted(tables.items())])
        dtype = reduce(torch.promote_types, {_DTYPES[code] for _, code in held if code != _ABSENT})
        return torch.linalg.vector_norm(norms[moved_to(self._device, order)].to(dtype), norm_type)

    def _own(self, norm_type: float) -> tuple[Tensor, Tensor]:
        """Return the norms of this rank's gradients on its device, and on the host the codes of their precisions."""
        gradients = [self._trainable[name].grad for name in self._counted[self._rank]]
        present = [(place, one.detach()) for place, one in enumerate(gradients) if one is not None]
        codes = torch.full((len(gradients),), _ABSENT, dtype=torch.uint8)
        norms = [torch.zeros((), dtype=torch.float64, device=self._device)] * len(gradients)
        for dtype in dict.fromkeys(one.dtype for _, one in present):
            places = [place for place, one in present if one.dtype == dtype]
            alike = [one for _, one in present if one.dtype == dtype]
            found = torch._foreach_norm(alike, norm_type)  # pyright: ignore[reportPrivateUsage] - torch clips by it too
            for place, norm in zip(places, found, strict=True):
                norms[place], codes[place] = norm, _DTYPES.index(norm.dtype)
        own = torch.stack(norms).double() if norms else torch.zeros(0, dtype=torch.float64, device=self._device)
        return (own, codes) if self._shards is None else self._shards.whole_norms(self._counted[self._rank], own, codes)

    def found_anywhere(self, step: int, has_property: bool, timeout: float) -> bool:
        """Return True if ``has_property`` is true on any rank; every rank calls it after the same step.

        Args:
            step: The last step that was run.
            has_property: Whether this rank's gradients have the property in question.
            timeout: Seconds to wait for the other ranks.

        Raises:
            TransportError: The answers could not be exchanged.
        """
        if self._shards is not None:
            has_property = self._shards.replicas.any_has(has_property)
        answers = self._exchange(step, (torch.tensor([float(has_property)]),), lambda _: _FLAG, timeout)
        return has_property or any(bool(one) for (one,) in answers.values())

    def _exchange(
        self, step: int, own: tuple[Tensor, ...], spec_of: Callable[[int], MessageSpec], timeout: float
    ) -> dict[int, tuple[Tensor, ...]]:
        """Send this rank's tensors to every other rank and return theirs, on the host.

        ``spec_of`` gives the form of each rank's tensors.
        """

        def identity(source: int, destination: int) -> Identity:
            ends = self._placement.index(source), self._placement.index(destination)
            return Identity(step, Purpose.GRADIENT_NORM, *ends, 0, spec_of(source))

        awaited = {other: self._transport.receive(other, identity(other, self._rank)) for other in self._others()}
        for other in awaited:
            self._transport.send(other, identity(self._rank, other), own)
        arrived: dict[int, tuple[Tensor, ...]] = {}
        for other, pending in awaited.items():
            arrived[other] = tuple(one.clone() for one in pending.wait(timeout))
            self._transport.release(pending)
        return arrived

    def _others(self) -> list[int]:
        return [rank for rank in range(len(self._counted)) if rank != self._rank]

    def _spec(self, rank: int) -> MessageSpec:
        count = len(self._counted[rank])
        return tuple(TensorSpec((count,), dtype, stays_on_host=True) for dtype in (torch.float64, torch.uint8))
