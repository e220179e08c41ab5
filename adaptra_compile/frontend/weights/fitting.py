"""Errors for files that do not fit a model, and a log line for values that a model's dtype rounds."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from torch import Tensor

from adaptra.errors import StateError

_NAMED: Final = 3

logger = logging.getLogger(__name__)


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


def refuse_shape(path: Path, name: str, given: Sequence[int], target: Tensor) -> None:
    """Refuse a tensor of another shape than the model's.

    Raises:
        StateError: Names the tensor, its file and both shapes.
    """
    if tuple(given) != tuple(target.shape):
        raise StateError(f"weights={str(path)!r}: {name} has shape {list(given)}: expected {list(target.shape)}")


def say_rounded(path: Path, names: Sequence[str]) -> None:
    """Log which values were rounded to the model's dtype."""
    if names:
        logger.warning("weights=%r: rounded to the model's dtype: %s", str(path), _listed(names))


def _listed(names: Sequence[str]) -> str:
    rest = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {rest} more" if rest > 0 else "")
