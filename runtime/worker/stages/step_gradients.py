"""Division of a step's gradients by the batch's weight, if a loss is not a mean of equal parts.

Backward passes start from unscaled sums. Every rank knows the divisor only once all microbatches and replicas have sent their
weights. So the division is done once, at the end of the step, and only for the gradients of this step.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor


class StepGradients:
    """Separates the gradients of a step from those of earlier ones.

    Args:
        parameters: The trainable parameters of a rank's stages by name.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._parameters = parameters
        self._before: dict[str, Tensor | None] = {}

    def begin_step(self) -> None:
        """Set aside the gradients of earlier steps."""
        for name, parameter in self._parameters.items():
            self._before[name], parameter.grad = parameter.grad, None

    def end_step(self, weight: float | None) -> None:
        """Divide by a weight, if there is one, and add to the gradients of earlier steps.

        If the weight is zero, negative or infinite, this step adds nothing.
        """
        for name, earlier in self._before.items():
            parameter = self._parameters[name]
            gradient, parameter.grad = parameter.grad, earlier
            if gradient is None or (weight is not None and not 0 < weight < float("inf")):
                continue
            if weight is not None:
                gradient /= weight
            parameter.grad = gradient if earlier is None else earlier.add_(gradient)
        self._before = {}
