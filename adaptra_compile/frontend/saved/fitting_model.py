"""The part of a model's state that a process loads, checked before anything changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from adaptra.errors import StateError
from adaptra.frontend.saved.model_names import ModelNames
from adaptra.graph import CompiledStages


@dataclass(frozen=True, slots=True)
class FittingModel:
    """What is to be loaded.

    Attributes:
        values: The stages' names of tensors, with a value for each. The last one of a name counts.
        extras: The modules' extra state by its names in the model's state_dict.
    """

    values: list[tuple[str, Tensor]]
    extras: dict[str, Any]


def fitting_model(
    names: ModelNames, compiled: CompiledStages, here: Mapping[str, Tensor], state: Mapping[str, Any], *, strict: bool
) -> FittingModel:
    """Return what this process loads of a state, whose names are those of the plain model.

    Args:
        names: What the model's state_dict has beside its tensors.
        compiled: The stages.
        here: The tensors of this process's stages.
        state: Tensors, and the modules' extra state.
        strict: Whether a missing name of these stages, or a name that the model does not have, is an error.

    Raises:
        StateError: Names are missing or unknown, or a value is not a tensor or has another shape.
    """
    given: Any = state
    if not isinstance(given, Mapping):
        raise StateError(f"state_dict: a {type(given).__name__}: expected a dict of tensors by their names in the model")
    names.require_plain()
    adapted = names.adapted(state)
    saved = compiled.saved
    # What hooks leave out of the state_dict and add again is no value to load, unless it was given.
    loaded = {name: one for name, one in compiled.aliases.items() if name in names.loaded}
    left_out = loaded.keys() - state.keys() - {name for name, one in loaded.items() if one in set(saved.values())}
    extras = names.given_extras(adapted)
    # All names under which the model saves a tensor, or all under which its modules load it.
    whole = {
        canonical
        for some in (saved, loaded)
        for canonical in set(some.values()) - {one for name, one in some.items() if name not in adapted}
    }
    missing = {name for name, one in saved.items() if one in here and one not in whole and name not in adapted}
    missing |= set(names.required) - extras.keys()
    unknown = {name for name in adapted if name not in saved and name not in loaded and not names.knows(name)}
    if strict and (missing or unknown):
        raise StateError(
            f"state_dict: missing {sorted(missing) or 'nothing'}, unknown {sorted(unknown) or 'nothing'}: expected the names "
            "of the model that was compiled; strict=False takes what fits"
        )
    values: list[tuple[str, Tensor]] = []
    for name, canonical in {**saved, **loaded}.items():
        if name not in adapted or name in left_out or canonical not in here:
            continue
        value, target = adapted[name], here[canonical]
        shape = list(value.shape) if isinstance(value, Tensor) else f"none: it is a {type(value).__name__}"
        if shape != list(target.shape):
            raise StateError(f"state_dict: {name} has shape {shape}: expected {list(target.shape)}")
        if target.is_meta and not value.is_meta:
            raise StateError(
                f"state_dict: {name} is on the meta device, which holds no values: expected a model with memory, by "
                "model.to_empty(device=...) before adaptra.compile"
            )
        values.append((canonical, value))
    return FittingModel(values, extras)
