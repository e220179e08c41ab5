"""Errors for tensors of a model that share memory and would part, as each rank has a memory of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from adaptra.errors import OptionError
from adaptra.graph import CompiledStages
from adaptra.graph.effects.shared_memory import overlapping
from adaptra.runtime.launch.job import Launch


def refuse_shared_memory(
    model: nn.Module, compiled: CompiledStages, placement: Sequence[int], launched: Launch, *, is_empty: bool
) -> None:
    """Refuse tensors over one memory that training changes, where their ranks would each have a memory of its own.

    Args:
        model: The user's model.
        compiled: The stages of the model.
        placement: ``placement[stage]`` is the stage's rank.
        launched: The ranks of this process. If all are, they are threads and share the model's own memory.
        is_empty: Whether the model gets its values, each tensor by itself.

    Raises:
        OptionError: There are such tensors. The text has both names.
    """
    named = dict(model.named_parameters()) | dict(model.named_buffers())
    copied = compiled.copied(placement)
    changing = compiled.changing | {name for name, one in named.items() if one.requires_grad}
    for first, other in overlapping(named):
        ranks = {placement[stage] for name in (first, other) for stage in compiled.names[name]}
        parts = is_empty or not copied.isdisjoint((first, other)) or len({launched.row[rank] for rank in ranks}) > 1
        if parts and {first, other} & changing:
            where = "each get values of their own" if is_empty else f"have copies on ranks {', '.join(map(str, sorted(ranks)))}"
            raise OptionError(
                f"model: {first!r} and {other!r} are two tensors over one memory and would {where}, which training makes "
                "differ: expected one Parameter under both names, which ties them, or a clone() for one of them"
            )


def refuse_to_part(what: str, named: Mapping[str, Tensor]) -> None:
    """Refuse to move tensors to other ranks where two of them share memory.

    Args:
        what: The change that would move them.
        named: The tensors by name.

    Raises:
        OptionError: Two of them do. The text has both names.
    """
    for one, other in overlapping(named):
        raise OptionError(
            f"{what}: {one!r} and {other!r} are two tensors over one memory, which would part where they move between ranks: "
            "expected one Parameter under both names, which ties them, or a clone() for one of them"
        )
