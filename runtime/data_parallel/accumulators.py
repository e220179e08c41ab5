"""The gradients of a step that is under way, in buffers of their own: nothing of them is in ``grad`` before its end.

Floating-point sums depend on their order. Where autograd would add a step's microbatches to the gradients of earlier steps, the
sums begin from those. Else they begin from nothing, and what the step makes of them is added to earlier ones at its end. A step
that fails leaves every ``grad`` as it was.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

import torch
from torch import Tensor


class Accumulators:
    """Sums of the gradients of some parameters over a step's microbatches.

    Args:
        parameters: The parameters by name.

    Attributes:
        parameters: As given.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self.parameters: Final = parameters
        self._earlier: Mapping[str, Tensor] = {}
        self._sums: dict[str, Tensor] = {}

    def begin_step(self, aside: Collection[str] = (), earlier: Mapping[str, Tensor] | None = None) -> None:
        """Begin a step's sums from the gradients of earlier steps, and discard the remains of an interrupted one.

        Args:
            aside: The names of parameters whose sums begin from nothing, where those of others begin from ``grad``.
            earlier: The gradients from which sums begin instead. Those of other parameters begin from nothing.
        """
        if earlier is None:
            gradients = {name: one.grad for name, one in self.parameters.items() if name not in aside}
            earlier = {name: gradient for name, gradient in gradients.items() if gradient is not None}
        self._earlier = earlier
        self._sums = {}

    def begin_as(self, other: Accumulators | None) -> None:
        """Begin a step's sums from the gradients from which those of ``other`` have begun; without it from nothing."""
        self._earlier = {} if other is None else other._earlier
        self._sums = {}

    def begins_from_earlier(self, names: Collection[str]) -> bool:
        """Return whether a sum of these parameters has begun from gradients of earlier steps."""
        return any(name in self._earlier for name in names)

    def add(self, name: str, gradient: Tensor, *, fresh: bool = False) -> None:
        """Add a gradient as autograd does.

        A first one is copied. If it is ``fresh``, no other code refers to it, and it becomes the sum if it is laid out as its
        parameter.
        """
        if name in self._sums or name in self._earlier:
            self.total(name).add_(gradient)
            return
        parameter = self.parameters[name]
        may_stay = fresh and (gradient.stride(), gradient.dtype) == (parameter.stride(), parameter.dtype)
        self._sums[name] = gradient if may_stay else torch.empty_like(parameter).copy_(gradient)

    def put(self, name: str, total: Tensor) -> None:
        """Replace a sum by one from elsewhere, which is copied."""
        self._sums[name] = torch.empty_like(self.parameters[name]).copy_(total)

    def total(self, name: str) -> Tensor:
        """Return a sum, which may be changed in place; zeros if there is nothing to begin it from."""
        if name not in self._sums:
            earlier = self._earlier.get(name)
            self._sums[name] = torch.zeros_like(self.parameters[name]) if earlier is None else earlier.clone()
        return self._sums[name]

    def take(self, name: str) -> Tensor | None:
        """Remove a sum and return it; None if nothing was added to it, and there is nothing to begin it from."""
        if name in self._earlier:
            self.total(name)
        return self._sums.pop(name, None)

    def divide(self, divisor: float) -> None:
        """Divide all sums."""
        for total in self._sums.values():
            total /= divisor

    def drop(self, names: Collection[str]) -> None:
        """Forget the sums of some parameters."""
        for name in names:
            self._sums.pop(name, None)

    def fill(self, hooked: Collection[str] = (), *, replaces: bool = False) -> None:
        """Fill ``grad`` with the sums, and keep none.

        A ``grad`` that exists stays the same tensor. Autograd fills the ``grad`` of parameters with hooks, after the others.

        Args:
            hooked: Their names.
            replaces: Whether ``grad`` is what the step has made, whatever it was before.
        """
        with torch.no_grad():
            for name in [name for name in self.parameters if name in self._sums and name not in hooked]:
                parameter, total = self.parameters[name], self._sums.pop(name)
                if parameter.grad is None:
                    parameter.grad = total
                elif replaces or name in self._earlier:
                    parameter.grad.copy_(total)
                else:
                    parameter.grad.add_(total)
        for name in [name for name in self.parameters if name in self._sums]:
            torch.autograd.backward([self.parameters[name]], [self._sums.pop(name)])
        self.discard()

    def discard(self) -> None:
        """End the step without any change of ``grad``."""
        self._earlier, self._sums = {}, {}
