"""Reads tensors from safetensors files: one file, or the shards of Hugging Face's hub format with their index."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from adaptra.errors import MissingExtraError, StateError
from adaptra.frontend.weights.fitting import file_in, reading, refuse_missing, refuse_shape, refuse_untied, say_rounded
from adaptra.graph.ops.specs import dtype_name
from adaptra.progress import Progress

INDEX: Final = "model.safetensors.index.json"
PIECE_BYTES: Final = 2**26
"""A file is opened anew for every piece of this size: its pages count as this process's memory while it is open."""


def read_safetensors(
    path: Path, targets: Mapping[str, Tensor], names_of: Mapping[str, Sequence[str]], progress: Progress
) -> None:
    """Copy the values of tensors from safetensors files. Other tensors in the files are not read.

    Args:
        path: A .safetensors file, or a folder with ``model.safetensors.index.json``, or with such files and no index.
        targets: The tensors to fill. They keep their dtype; a log line names values that it rounds.
        names_of: The names under which a file may have each of them. Files mostly have one of a tied tensor's names.
        progress: Called after every tensor.

    Raises:
        StateError: There are no such files, or one is damaged. Or a tensor is missing, has another shape, or has other values
            under a second name. The text names it and the file.
        MissingExtraError: safetensors is not installed.
    """
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise MissingExtraError("safetensors files need safetensors: pip install 'adaptra[safetensors]'") from error
    opened: Any = safe_open
    places = _places(path, opened)
    keys_of = {name: [one for one in names_of[name] if one in places] for name in targets}
    refuse_missing(path, [name for name, present in keys_of.items() if not present])
    rounded: list[str] = []
    for done, (name, target) in enumerate(targets.items(), 1):
        key, *others = keys_of[name]
        for rows, piece in _pieces(opened, places[key], key, target):
            rows.copy_(piece)
            if piece.dtype.is_floating_point and piece.dtype.itemsize > target.dtype.itemsize and name not in rounded:
                rounded.append(name)
        for other in others:
            for rows, piece in _pieces(opened, places[other], other, target):
                refuse_untied(path, key, other, rows, piece)
        progress("weights read", done, len(targets))
    say_rounded(path, rounded)


def _places(path: Path, opened: Any) -> dict[str, Path]:
    """Return the file of each tensor."""
    if path.is_dir() and (path / INDEX).exists():
        return _places_by(path / INDEX)
    files: Iterable[Path] = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    places: dict[str, Path] = {}
    for file in files:
        if not file.is_file():
            raise StateError(f"weights={str(path)!r}: no such file: expected a .safetensors file or a folder with such files")
        with _open(opened, file) as tensors:
            names = list(tensors.keys())
        twice = next((name for name in names if name in places), None)
        if twice is not None:
            raise StateError(
                f"weights={str(path)!r}: {twice} is in {places[twice].name} and in {file.name}: expected each tensor once, or "
                f"{INDEX}; give one of the files"
            )
        places |= dict.fromkeys(names, file)
    if not places:
        raise StateError(
            f"weights={str(path)!r}: no weights in it: expected .safetensors files, or a checkpoint of "
            "torch.distributed.checkpoint"
        )
    return places


def _places_by(index: Path) -> dict[str, Path]:
    with reading(index, "a whole index, a JSON object with 'weight_map', as on Hugging Face's hub"):
        found: Any = json.loads(index.read_text())
        named: Any = found.get("weight_map") if isinstance(found, dict) else None
        if not isinstance(named, dict):
            raise ValueError("it has no object 'weight_map'")
    files = {name: file_in(index.parent, name, index) for name in dict.fromkeys(map(_key, named.values()))}
    return {name: files[_key(file)] for name, file in named.items()}


def _key(name: Any) -> Any:
    """Return a file's name in an index, or the text of what stands in its place."""
    return name if isinstance(name, str) else (str(name),)


@contextmanager
def _open(opened: Any, file: Path) -> Generator[Any]:
    expected = "a whole .safetensors file; load one of torch.save by torch.load and pipe.load_state_dict"
    with reading(file, expected), opened(file, framework="pt") as tensors:
        yield tensors


def _pieces(opened: Any, file: Path, name: str, target: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the rows of a target, and a file's values for them, piece by piece."""
    first, rows = 0, max(1, target.shape[0]) if target.dim() else 1
    size = max(1, rows * PIECE_BYTES // max(1, target.nbytes))
    while first < rows:
        with _open(opened, file) as tensors:
            view = tensors.get_slice(name)
            refuse_shape(file, name, view.get_shape(), target)
            whole = target.dim() == 0 or size >= rows
            piece = tensors.get_tensor(name) if whole else view[first : first + size]
            del view
        if piece.dtype.is_floating_point != target.dtype.is_floating_point or piece.is_complex() != target.is_complex():
            raise StateError(
                f"weights={str(file)!r}: {name} is of {dtype_name(piece.dtype)}: expected {dtype_name(target.dtype)}, or a "
                "dtype of its kind, as whole numbers stand for others in quantized files"
            )
        yield (target if whole else target[first : first + size]), piece
        del piece
        first += rows if whole else size
