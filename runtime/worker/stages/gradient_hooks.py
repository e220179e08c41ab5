"""Hooks of parameters: torch's ``register_hook`` and ``register_post_accumulate_grad_hook``, once per step.

Autograd runs them once per backward pass, and a step is one backward pass of the whole batch. So they run at its end, when the
gradient includes all microbatches, uses and replicas, and optimizers see the gradient that a hook returns. Torch itself runs
them: autograd gets the gradient and treats it as in any backward pass.

The same parameters must have hooks in all replicas. A hook that only one replica had would make its copy of the parameter
another one. The sum over the replicas would also have earlier steps' gradients of some replicas and not of others.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from torch import Tensor

from adaptra.errors import OptionError
from adaptra.runtime.data_parallel.equal_numbers import are_equal

_MOST_NAMES: Final = 3


class GradientHooks:
    """The hooks of one rank's parameters in a step. Their sums begin from nothing, and autograd adds them to earlier ``grad``.

    Args:
        parameters: The trainable parameters of its stages by name.
        copied: The names of parameters that stages of several ranks use, each with a copy of its own.

    Attributes:
        names: The parameters that have hooks in this step.
    """

    def __init__(self, parameters: Mapping[str, Tensor], copied: Collection[str]) -> None:
        self._parameters = parameters
        self._copied = copied
        self.names: list[str] = []

    def begin_step(self) -> None:
        """Find the parameters with hooks.

        Raises:
            OptionError: A parameter with copies on several ranks has a hook; names it.
        """
        self.names = [name for name, parameter in self._parameters.items() if is_hooked(parameter)]
        for name in self.names:
            if name in self._copied:
                raise OptionError(copy_is_hooked(name))

    def marks(self) -> tuple[int, int]:
        """Return two numbers that are equal in all replicas if the same parameters have hooks: a count and a checksum."""
        return len(self.names), zlib.crc32("\n".join(sorted(self.names)).encode())

    def check_marks(self, means: Sequence[float], replica: int) -> None:
        """Compare the marks of all replicas, given the mean of each of their bits over the replicas.

        Raises:
            OptionError: They differ: names this replica's parameters with hooks.
        """
        if not are_equal(means):
            names = sorted(self.names)
            shown = ", ".join([*names[:_MOST_NAMES], *(["…"] if len(names) > _MOST_NAMES else [])]) or "no parameter"
            raise OptionError(
                f"replica {replica} has gradient hooks of {shown}: expected hooks of the same parameters in all replicas, as "
                "their copies would become different; register them on every rank, and let the hook look at pipe.replica"
            )


def is_hooked(tensor: Tensor) -> bool:
    """Return True if a parameter has a hook on its gradient."""
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]


def copy_is_hooked(name: str) -> str:
    """Return the error text for a hook that would have to run on several ranks."""
    return (
        f"{name}: a gradient hook of a parameter that stages of several ranks use, each with a copy of its own: expected none, "
        "as the copies would become different; change its gradient between the step and optimizer.step()"
    )
