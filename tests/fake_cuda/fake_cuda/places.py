"""Where in the program something was called: the innermost lines that are neither torch's, Python's nor the stand-in's."""

from __future__ import annotations

import sys
import sysconfig
from functools import cache
from pathlib import Path
from typing import Final

_HERE: Final = str(Path(__file__).resolve().parent)
_PYTHON: Final = sysconfig.get_paths()["stdlib"]
_FRAMES: Final = 3

Place = tuple[tuple[str, int, str], ...]
"""Files, lines and functions, from the inside."""


@cache
def _is_passed_over(file: str) -> bool:
    parts = Path(file).parts
    return (
        file.startswith((_HERE, "<frozen")) or "torch" in parts or (file.startswith(_PYTHON) and "site-packages" not in parts)
    )


def here() -> Place:
    """Return the place of the call under way; empty in threads of torch."""
    frames: list[tuple[str, int, str]] = []
    frame = sys._getframe(1)
    while frame is not None and len(frames) < _FRAMES:
        code = frame.f_code
        if not _is_passed_over(code.co_filename):
            frames.append((code.co_filename, frame.f_lineno, code.co_name))
        frame = frame.f_back
    return tuple(frames)


def named(place: Place) -> str:
    """Name a place: ``file.py:12 in f, from other.py:3 in g``."""
    return ", from ".join(f"{Path(file).name}:{line} in {name}" for file, line, name in place) or "a thread of torch"
