"""Gives a model on the meta device the memory and the values of some of its parameters and buffers.

The others stay on the meta device, so a rank holds its own stages only. The tensors are set in the user's model itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from adaptra.frontend.weights.checkpoint_folder import is_checkpoint, read_checkpoint
from adaptra.frontend.weights.fresh_values import fresh_values
from adaptra.frontend.weights.safetensors_files import read_safetensors
from adaptra.progress import Progress


def is_empty(model: nn.Module) -> bool:
    """Return whether some of a model's parameters or buffers have no values, being on the meta device."""
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def materialise(
    model: nn.Module,
    names: Iterable[str],
    aliases: Mapping[str, str],
    saved: Mapping[str, str],
    weights: str | Path | None,
    device: torch.device,
    progress: Progress,
) -> None:
    """Set parameters and buffers of a model that are on the meta device.

    With ``weights`` they are read from there. Buffers that no checkpoint has, and all of them without ``weights``, are computed
    by the modules' own ``reset_parameters``: see :func:`adaptra.frontend.weights.fresh_values.fresh_values`.

    Args:
        model: The model; its tensors are replaced.
        names: The names of the wanted tensors, one for each tensor.
        aliases: Every name of the model's state to the tensor's one name.
        saved: Every name of the model's state_dict, and so of files, to the tensor's one name.
        weights: A .safetensors file, a folder with such files, or a checkpoint of torch.distributed.checkpoint; or None.
        device: The device of the tensors.
        progress: Called as tensors are read.

    Raises:
        StateError: A value is missing, has another shape, or can't be computed. The text names it.
        MissingExtraError: The file needs safetensors, which is not installed.
    """
    present = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    wanted = [name for name in dict.fromkeys(names) if present[name].is_meta]
    in_files = set(saved.values()) if weights is not None else set[str]()
    to_read = [name for name in wanted if name in in_files]
    targets = {name: _empty_like(present[name], device) for name in wanted}
    if weights is not None:
        path = Path(weights)
        read = read_checkpoint if is_checkpoint(path) else read_safetensors
        names_of: dict[str, list[str]] = {name: [] for name in to_read}
        for alias, name in {**saved, **aliases}.items():  # with the names that hooks of the state_dict replace
            if name in names_of:
                names_of[name].append(alias)
        read(path, {name: targets[name] for name in to_read}, names_of, progress)
    computed = {name: targets[name] for name in wanted if name not in in_files}
    if computed:
        targets |= fresh_values(model, computed, device, whole=weights is None)
    # One object for all names of a tied tensor.
    filled = {name: _as_before(value, present[name]) for name, value in targets.items()}
    for alias, name in aliases.items():
        if name in filled:
            path, _, last = alias.rpartition(".")
            setattr(model.get_submodule(path), last, filled[name])


def _as_before(value: Tensor, before: Tensor) -> Tensor:
    return nn.Parameter(value, before.requires_grad) if isinstance(before, nn.Parameter) else value


def _empty_like(tensor: Tensor, device: torch.device) -> Tensor:
    return torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device=device)
