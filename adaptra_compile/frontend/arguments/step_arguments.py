"""The arguments of a step that can be given by position or by name, and that a model's forward may have too."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Final, Literal

from torch import nn

from adaptra.errors import BatchError, OptionError
from adaptra.graph.capture.containers import Opened, opened

Outputs = bool | Literal["all"]
"""Whether a step returns the model's outputs: on the rank of the last stage if that one asks, or on all ranks."""


class StepArguments:
    """Tells the step's own arguments from the model's.

    Args:
        model: The model, or the first of its stages.
        returns_loss: Whether the model itself returns the loss.
    """

    def __init__(self, model: nn.Module, *, returns_loss: bool) -> None:
        self._signature: Final = inspect.signature(model.forward)
        self._names: Final = frozenset(self._signature.parameters)
        self.returns_loss: Final = returns_loss

    def resolve(self, inputs: Any, targets: Any, kwargs: Mapping[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
        """Return inputs, targets, and the model's keyword arguments, with all containers opened.

        ``inputs=`` and ``targets=`` by name are the step's own, unless the model's forward has an argument of that name. With a
        ``loss=`` function ``targets=`` is always the loss's.

        Raises:
            BatchError: A value is neither a tensor, nor a container of tensors, nor a constant. The text names it.
        """
        named = dict(kwargs)
        if inputs is None and "inputs" not in self._names:
            inputs = named.pop("inputs", None)
        if targets is None and not (self.returns_loss and "targets" in self._names):
            targets = named.pop("targets", None)
        return self.opened(inputs, targets, named)

    @staticmethod
    def opened(inputs: Any, targets: Any, named: Mapping[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
        """Return a call's arguments with all containers opened."""
        positional, by_name = opened({"inputs": inputs, "targets": targets}, named)
        return positional["inputs"], positional["targets"], by_name

    def positional(self, inputs: Any, targets: Any) -> tuple[tuple[Any, ...], Any]:
        """Return the model's positional arguments and the loss's targets.

        Raises:
            BatchError: Targets are given without ``loss=``, and the model has no argument for them.
        """
        is_several = isinstance(inputs, tuple) and not isinstance(inputs, Opened)
        args = inputs if is_several else () if inputs is None else (inputs,)
        if self.returns_loss and targets is not None:
            try:
                self._signature.bind_partial(*args, targets)
            except TypeError:
                raise BatchError(
                    f"targets: without loss= they are the last positional argument of forward{self._signature}: expected one "
                    "for them; is loss= missing?"
                ) from None
            return (*args, targets), None
        return args, targets


def check_outputs(outputs: object) -> Outputs:
    """Return whether a step returns the model's outputs, and to which ranks.

    Raises:
        OptionError: ``outputs`` is another value.
    """
    if isinstance(outputs, bool):
        return outputs
    if isinstance(outputs, str) and outputs == "all":
        return "all"
    raise OptionError(
        f"outputs={outputs!r}: expected True, for the model's outputs on the last stage's rank, 'all' for outputs on all "
        "ranks, or False"
    )


def name_of_call(name: str, outputs: Outputs) -> str:
    """Return the name by which ranks compare their calls. All must give ``outputs="all"`` alike."""
    return f"{name}(outputs='all')" if outputs == "all" else name
