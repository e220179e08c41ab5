"""Whether two compilations gave the same stages, so that a change of the model has no effect on them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import Tensor

from adaptra.frontend.arguments.module_digests import module_digests
from adaptra.graph import CompiledStages
from adaptra.graph.compile import Captured


def are_same(before: CompiledStages, after: CompiledStages, memory: Collection[int]) -> bool:
    """Return whether stages run the same ops on the same state and constants. Stages that are modules never are.

    ``memory`` has the addresses of all tensors of the model, as a constant may be one of them and change in place later.
    """
    old, new = before.captured, after.captured
    if old is None or new is None or before.tied != after.tied or before.changing != after.changing:
        return False
    return (
        all(
            [str(one.inputs), str(one.outputs), *one.state_names, one.trainable, one.contributions]
            == [str(other.inputs), str(other.outputs), *other.state_names, other.trainable, other.contributions]
            for one, other in zip(before.train, after.train, strict=True)
        )
        and old.names == new.names
        and module_digests(old.flat) == module_digests(new.flat)
        and module_digests(old.eval_flat) == module_digests(new.eval_flat)
        and before.outputs.is_like(after.outputs)
        and before.outputs_in_training.is_like(after.outputs_in_training)
        and _have_same_constants(_constants(new), _constants(old), memory)
    )


def evaluate_the_same(before: CompiledStages, after: CompiledStages, memory: Collection[int]) -> bool:
    """Return whether stages that only evaluate run the same ops on the same state and constants; as :func:`are_same`."""
    if before.captured is None or after.captured is None:
        return False
    old, new = before.captured.eval_flat, after.captured.eval_flat
    return (
        [str([one.inputs, one.outputs, one.loss, one.targets]) for one in before.eval]
        == [str([one.inputs, one.outputs, one.loss, one.targets]) for one in after.eval]
        and list(old.state.values()) == list(new.state.values())
        and module_digests(old) == module_digests(new)
        and before.outputs.is_like(after.outputs)
        and _have_same_constants([*new.constants.values()], [*old.constants.values()], memory)
    )


def _have_same_constants(new: Sequence[Tensor], old: Sequence[Tensor], memory: Collection[int]) -> bool:
    """Return whether constants of equal digests, and so equally many, may change in place alike."""
    both = zip(new, old, strict=False)
    return all(_address(one) not in memory or one is other or _address(one) == _address(other) for one, other in both)


def _constants(captured: Captured) -> list[Tensor]:
    return [*captured.flat.constants.values(), *captured.eval_flat.constants.values()]


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
