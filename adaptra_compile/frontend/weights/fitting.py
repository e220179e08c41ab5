"""Errors for files that do not fit a model, and a log line for values that a model's dtype rounds."""

from __future__ import annotations

import logging
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import Final

import torch
from torch import Tensor

from adaptra.errors import StateError

_NAMED: Final = 3

logger = logging.getLogger(__name__)


@contextmanager
def reading(file: Path, expected: str) -> Generator[None]:
    """Name the file in any error of a reader in this context.

    Raises:
        StateError: Whatever the reader raised, in one line. ``expected`` says what the file should be.
    """
    try:
        yield
    except StateError:
        raise
    except Exception as error:  # readers of damaged files raise errors of all kinds
        text = (str(error) or type(error).__name__).splitlines()[0]
        raise StateError(f"weights={str(file)!r}: it can't be read: {text}: expected {expected}") from error


def file_in(folder: Path, name: object, source: Path) -> Path:
    """Return a file of a folder, by the name that another file of the folder gives it.

    Args:
        folder: The folder.
        name: The name, which may lead to folders in it. The file itself may be a link, as in the cache of Hugging Face's hub.
        source: The file that gives the name.

    Raises:
        StateError: It is no name of a file in the folder, or there is no such file.
    """
    if not isinstance(name, str) or not name or PurePath(name).is_absolute() or ".." in PurePath(name).parts:
        raise StateError(f"weights={str(source)!r}: it names the file {name!r:.80}: expected one in its own folder")
    if not (folder / name).is_file():
        raise StateError(f"weights={str(folder / name)!r}: no such file, which {source.name} names: expected all files of it")
    return folder / name


def refuse_missing(path: Path, names: Sequence[str]) -> None:
    """Refuse files without some of a rank's tensors.

    Raises:
        StateError: Names the first of them.
    """
    if names:
        raise StateError(
            f"weights={str(path)!r}: {_listed(names)}: not in the files: expected every parameter and persistent buffer by its "
            "name in the model's state_dict"
        )


def refuse_shape(path: Path, name: str, shape: Sequence[int], target: Tensor) -> None:
    """Refuse a tensor of another shape than the model's.

    Raises:
        StateError: Names the tensor, its file and both shapes.
    """
    if tuple(shape) != tuple(target.shape):
        raise StateError(f"weights={str(path)!r}: {name} has shape {list(shape)}: expected {list(target.shape)}")


def refuse_untied(path: Path, name: str, other: str, target: Tensor, other_values: Tensor) -> None:
    """Refuse other values for a second name of a tied tensor.

    Args:
        path: The files.
        name, other: The two names.
        target: The values of the first name, or some rows of them.
        other_values: Those of the second name.

    Raises:
        StateError: They are not bitwise equal in the model's dtype.
    """
    if not torch.equal(_as_bytes(target), _as_bytes(other_values.to(target.device, target.dtype))):
        raise StateError(
            f"weights={str(path)!r}: {name} and {other} have different values, and are one tied tensor in the model: expected "
            "equal ones, or one of the two names; build the model with two tensors, or remove the name that it shall not have"
        )


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def say_rounded(path: Path, names: Sequence[str]) -> None:
    """Log which values were rounded to the model's dtype."""
    if names:
        logger.warning("weights=%r: rounded to the model's dtype: %s", str(path), _listed(names))


def _listed(names: Sequence[str]) -> str:
    rest = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {rest} more" if rest > 0 else "")
