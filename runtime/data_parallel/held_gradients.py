"""Gradients of earlier steps to which the next one adds, where an update has several steps."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from adaptra.errors import StateError


class HeldGradients:
    """Those of one rank's parameters.

    Args:
        parameters: The parameters by name.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._parameters = parameters
        self._filled: dict[str, Tensor] = {}

    def end_step(self) -> None:
        """End a step, which has filled ``grad``."""
        self._filled = {name: one for name, one in self._parameters.items() if one.grad is not None}

    def first(self) -> str | None:
        """Return the name of a parameter whose gradient of the last step is still there; None where none is held.

        An optimizer that zeroes gradients leaves None or zeros for all of its parameters. Those that no optimizer has keep
        theirs. So where any gradient is gone, the others are not of an update that is under way.
        """
        gradients = {name: one.grad for name, one in self._filled.items() if one.grad is not None}
        if len(gradients) < len(self._filled):
            return None
        return next((name for name, gradient in gradients.items() if gradient.any()), None)

    def refuse(self, what: str) -> None:
        """Refuse what changes parameters while a gradient of them is held.

        Raises:
            StateError: One is; names its parameter, and ``what``.
        """
        name = self.first()
        if name is not None:
            raise StateError(
                f"{what}: {name} has a gradient of earlier steps: expected optimizer.step() and optimizer.zero_grad() before "
                "it, as an exchange changes the parameters that the gradient is of"
            )
