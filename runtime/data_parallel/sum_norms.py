"""Squared norms of what goes into a sum of gradients and of what comes out, for the gradient noise scale.

Each replica takes the norm of its own term, as the sum asks for it and before a result replaces it. So each term is counted
once, whichever way it travels and wherever it is added, ahead of others or behind them. Of the results, which are the same on
all replicas, each one takes the norm of its part. Neither changes a value, nor sends a message.

Squares are added in float64, or short rows of them in float32. On a GPU sums stay there until somebody wants them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from adaptra.runtime.data_parallel.accumulators import Accumulators
from adaptra.runtime.data_parallel.collectives.owned_chunks import real
from adaptra.runtime.devices.read_later import ReadLater

_BLOCK: Final = 1 << 15
"""Elements that are converted at a time. They stay in a core's cache."""

_ROW: Final = 1 << 10
"""Elements whose squares a CPU adds in float32, in a fifth of the time. The sum of many rows is wrong by some 1e-8 of it."""

_IN_RANGE: Final = 1e-20
"""The least sum that float32 squares are trusted with. Of smaller ones too much may be below its range."""


class SumNorms:
    """One replica's share of the squared norms of a step's gradients.

    Args:
        counted: The names of the parameters that count here. One with copies on several ranks counts on one of them.
        sums: The gradients of the step that is under way: terms before the sum, and results behind it.
        replica: This replica.
        replicas: The number of replicas.
    """

    def __init__(self, counted: Collection[str], sums: Accumulators, replica: int, replicas: int) -> None:
        self._counted = counted
        self._sums = sums
        self._replica, self._replicas = replica, replicas
        self._terms: list[Tensor] = []
        self._found: ReadLater | None = None
        self._is_whole = True

    def begin_step(self) -> None:
        """Begin a step. A term that begins from gradients of earlier steps is not of this one's samples."""
        self._terms, self._found = [], None
        self._is_whole = not self._sums.begins_from_earlier(self._counted)

    def of_terms(self, order: Sequence[str], get: Callable[[int], Tensor]) -> Callable[[int], Tensor]:
        """Return what gets this replica's terms by number, each once, and takes their norms in passing."""

        def get_with_norm(number: int) -> Tensor:
            tensor = get(number)
            if self._is_whole and order[number] in self._counted:
                self._terms.append(_squared_norm(tensor))
            return tensor

        return get_with_norm

    def end_sum(self, order: Sequence[str], owners: Sequence[int]) -> None:
        """Take the norm of this replica's part of the results, which are in the sums by now.

        Args:
            order: The names of the parameters.
            owners: The replica that has the result of each; empty if all have them.
        """
        if not self._is_whole:
            return
        own = [name for name, owner in zip(order, owners, strict=True) if owner == self._replica] if owners else order
        totals = {name: real(self._sums.total(name)) for name in own if name in self._counted}
        parts = totals.values() if owners else _parts(totals, self._replica, self._replicas)
        means = [_squared_norm(part) for part in parts]
        both = [torch.stack(some).sum() if some else None for some in (self._terms, means)]
        device = next((one.device for one in both if one is not None), torch.device("cpu"))
        zero = torch.zeros((), dtype=torch.float64, device=device)
        self._found = ReadLater(torch.stack([zero if one is None else one for one in both]))

    def read(self) -> tuple[float, float] | None:
        """Return the squared norms of this replica's term, and of its part of the results.

        None where the step had none, or not of its own samples alone.
        """
        if self._found is None:
            return None
        term, part = self._found.wait().tolist()
        return term, part


def _parts(totals: Mapping[str, Tensor], replica: int, replicas: int) -> list[Tensor]:
    """Return a replica's part of the elements of all tensors, which are about as many for each replica."""
    count, before, parts = sum(one.numel() for one in totals.values()), 0, list[Tensor]()
    begin, end = count * replica // replicas, count * (replica + 1) // replicas
    for total in totals.values():
        first, last = max(begin - before, 0), min(end - before, total.numel())
        if first < last:
            parts.append(total.reshape(-1)[first:last])
        before += total.numel()
    return parts


def _squared_norm(tensor: Tensor) -> Tensor:
    """Return the sum of the squares of a tensor's elements, in float64 on its device."""
    values = real(tensor.detach()).reshape(-1)
    if values.device.type != "cpu":
        return torch.linalg.vector_norm(values, dtype=torch.float64).square()
    rows = values.numel() // _ROW * _ROW if values.dtype == torch.float32 else 0
    if rows:
        whole = torch.linalg.vector_norm(values[:rows].view(-1, _ROW), dim=1).double().square().sum()
        if _IN_RANGE < whole.item() < math.inf:
            return whole + _in_float64(values[rows:])
    return _in_float64(values)


def _in_float64(values: Tensor) -> Tensor:
    total, memory = torch.zeros((), dtype=torch.float64), torch.empty(min(_BLOCK, values.numel()), dtype=torch.float64)
    for block in values.split(_BLOCK):
        squares = memory[: block.numel()].copy_(block)
        total += torch.dot(squares, squares)
    return total
