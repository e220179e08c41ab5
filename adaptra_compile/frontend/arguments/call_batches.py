"""The batch of a call as users give it, or a function that gives that of any replica."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from adaptra.errors import BatchError
from adaptra.frontend.arguments.step_arguments import StepArguments
from adaptra.runtime.control.agreement.same_rows import numbers_of


@dataclass(frozen=True, slots=True)
class CallBatch:
    """A batch that a call was given.

    Attributes:
        args, kwargs: The model's arguments.
        targets: The loss's targets.
        rows: All of it by the names of the call's arguments.
    """

    args: tuple[Any, ...]
    targets: Any
    kwargs: Mapping[str, Any]
    rows: Mapping[str, Any]

    @staticmethod
    def of(arguments: StepArguments, inputs: Any, targets: Any, kwargs: Mapping[str, Any]) -> CallBatch:
        """Return the batch of a call's arguments, as :meth:`.StepArguments.resolve` returns them; raises as ``positional``."""
        by_place = {"inputs": inputs, "targets": targets}
        rows = {**kwargs, **{name: one for name, one in by_place.items() if one is not None}}
        return CallBatch(*arguments.positional(inputs, targets), kwargs, rows)


OfReplica = Callable[[int], CallBatch]
"""The batch of a replica in one call."""


def inputs_and_targets(batch: Any, what: str) -> tuple[Any, ...]:
    """Return a step's positional arguments of which a batch consists: inputs alone, or inputs and targets.

    Raises:
        BatchError: It is a longer tuple; ``what`` names it.
    """
    positional = batch if isinstance(batch, tuple) else (batch,)
    if len(positional) > 2:
        raise BatchError(
            f"{what}: a tuple of {len(positional)}: expected inputs alone or (inputs, targets); several inputs are a "
            "tuple of their own, as in ((first, second), targets)"
        )
    return positional


def given_by(arguments: StepArguments, function: Callable[..., Any], name: str, *before: int) -> OfReplica:
    """Return the batches that a user's function gives.

    Args:
        arguments: Tells the step's own arguments from the model's.
        function: From the replica to ``inputs``, ``(inputs, targets)``, or a dict of keyword arguments.
        name: The function, for error texts.
        before: Its arguments before the replica.
    """

    def batch(replica: int) -> CallBatch:
        result = function(*before, replica)
        what = f"{name}({', '.join(map(str, (*before, replica)))})"
        if result is None:
            raise BatchError(f"{what} returned None: expected inputs, (inputs, targets), or a dict of the step's arguments")
        named = result if isinstance(result, Mapping) else {}
        inputs, targets = (None, None) if named else (*inputs_and_targets(result, what), None)[:2]
        return CallBatch.of(arguments, *arguments.resolve(inputs, targets, named))

    return batch


def require_same(batch: CallBatch, expected: CallBatch, what: str) -> None:
    """Refuse a batch that differs from what a function returned. None need be given.

    Raises:
        BatchError: A tensor differs; names it.
    """
    if not batch.rows:
        return
    ours, theirs = numbers_of(batch.rows), numbers_of(expected.rows)
    name = next((name for name, number in ours.items() if theirs.get(name) != number), None)
    if name is not None:
        raise BatchError(f"step: {name} is not what {what} returned: expected the same, or pipe.step() without a batch")
