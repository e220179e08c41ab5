"""The optimizer whose state moves with a pipeline's parameters."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import Tensor

from adaptra.errors import PipelineError, StateError


def refuse_foreign(parameters: Iterable[Tensor], own: Collection[Tensor]) -> None:
    """Refuse an optimizer of parameters that are not a pipeline's own.

    Raises:
        StateError: Gives the number of foreign parameters.
    """
    ids = {id(parameter) for parameter in own}
    foreign = sum(id(parameter) not in ids for parameter in parameters)
    if foreign:
        raise StateError(
            f"optimizer: {foreign} of its parameters are not this pipeline's: expected an optimizer over pipe.parameters()"
        )


def given_or_attached(
    call: str, argument: torch.optim.Optimizer | None, attached: torch.optim.Optimizer | None
) -> torch.optim.Optimizer:
    """Return the optimizer that a call was given, or else the attached one.

    Raises:
        PipelineError: There is neither.
    """
    optimizer = attached if argument is None else argument
    if optimizer is None:
        raise PipelineError(f"{call}: no optimizer: expected pipe.attach(optimizer) before it, or the optimizer as an argument")
    return optimizer
