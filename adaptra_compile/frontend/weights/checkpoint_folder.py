"""Reads tensors from a folder of torch.distributed.checkpoint."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed import checkpoint
from torch.distributed.checkpoint import CheckpointException, FileSystemReader, Metadata

from adaptra.errors import StateError
from adaptra.frontend.weights.fitting import file_in, reading, refuse_missing, refuse_shape, refuse_untied
from adaptra.graph.ops.specs import dtype_name
from adaptra.progress import Progress

_METADATA: Final = ".metadata"
_WHOLE: Final = "a whole checkpoint of torch.distributed.checkpoint"


def is_checkpoint(path: Path) -> bool:
    """Return whether a path is a folder that torch.distributed.checkpoint has written."""
    return (path / _METADATA).is_file()


def read_checkpoint(
    path: Path, targets: Mapping[str, Tensor], names_of: Mapping[str, Sequence[str]], progress: Progress
) -> None:
    """Fill tensors from a checkpoint of a model's state_dict or of :class:`adaptra.TrainingState`.

    The names may be part of a larger checkpoint, such as ``training.model.``; all then begin alike. Other tensors are not read.

    Args:
        path: The folder.
        targets: The tensors to fill.
        names_of: The names under which the checkpoint may have each of them.
        progress: Called at the end.

    Raises:
        StateError: A tensor is missing, has another shape or dtype, or has other values under a second name. Or a file is
            damaged. The text names it.
    """
    with reading(path / _METADATA, _WHOLE):
        metadata = FileSystemReader(path).read_metadata()
        known: dict[str, Any] = dict(metadata.state_dict_metadata)
    sizes = {name: one for name, one in known.items() if hasattr(one, "size")}
    aliases = next(iter(names_of.values()), ())
    prefixes = sorted({key.removesuffix(alias) for alias in aliases for key in sizes if _ends(key, alias)}, key=len)
    keys_of: dict[str, list[str]] = {}
    missing: list[str] = list(targets)
    for prefix in prefixes:
        present = {name: [prefix + one for one in names_of[name] if prefix + one in sizes] for name in targets}
        left = [name for name, keys in present.items() if not keys]
        if len(left) < len(missing):
            keys_of, missing = {name: keys for name, keys in present.items() if keys}, left
    refuse_missing(path, missing)
    for name, key in ((name, key) for name, keys in keys_of.items() for key in keys):
        refuse_shape(path, key, sizes[key].size, targets[name])
        dtype = sizes[key].properties.dtype
        if dtype != targets[name].dtype:
            raise StateError(
                f"weights={str(path)!r}: {key} is of {dtype_name(dtype)}: expected {dtype_name(targets[name].dtype)}, as a "
                "checkpoint is read without conversion; build the model in the checkpoint's dtype"
            )
    _require_files(path, metadata, {key for keys in keys_of.values() for key in keys})
    _load(path, {keys[0]: targets[name] for name, keys in keys_of.items()})
    for name, (key, *others) in keys_of.items():
        for other in others:  # one at a time, as each takes the memory of a tensor
            second = torch.empty_like(targets[name])
            _load(path, {other: second})
            refuse_untied(path, key, other, targets[name], second)
    progress("weights read", 1, 1)


def _load(path: Path, wanted: dict[str, Any]) -> None:
    """Fill tensors by the names in the checkpoint. Each rank reads its own ones, and none waits for another."""
    with reading(path, _WHOLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        try:
            checkpoint.load(wanted, storage_reader=FileSystemReader(path), no_dist=True)
        except CheckpointException as error:  # with a traceback in its text
            raise next(iter(error.failures.values()))[0] from error


def _require_files(path: Path, metadata: Metadata, names: Collection[str]) -> None:
    """Refuse a checkpoint of which a file with one of these tensors is missing, cut, or elsewhere."""
    places: Any = metadata.storage_data or {}
    ends: dict[str, int] = {}
    with reading(path / _METADATA, _WHOLE):
        for index, place in places.items():
            if index.fqn in names:
                ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
    for name, end in ends.items():
        size = file_in(path, name, path / _METADATA).stat().st_size
        if size < end:
            raise StateError(f"weights={str(path / name)!r}: it has {size} bytes: expected at least {end}; it was cut")


def _ends(key: str, name: str) -> bool:
    return key == name or key.endswith(f".{name}")
