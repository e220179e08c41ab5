"""Atomic writes of result files, so that no reader sees an incomplete one."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from adaptra.errors import ReportError

if TYPE_CHECKING:
    pass


def check_suffix(path: str | Path, expected: Iterable[str]) -> str:
    """Return the suffix of ``path`` in lower case.

    Raises:
        ReportError: The suffix is not in ``expected``, or the folder does not exist. The text names the file and what was
            expected.
    """
    path, expected = Path(path), tuple(expected)
    suffix = path.suffix.lower()
    if suffix not in expected:
        raise ReportError(f"{path}: suffix {path.suffix!r}: expected {' or '.join(expected)}")
    if not path.parent.is_dir():
        raise ReportError(f"{path}: there is no folder {path.parent}")
    return suffix


def write_whole(path: str | Path, content: str | bytes) -> None:
    """Write a file under another name and rename it, so that ``path`` has either the old content or all of the new.

    Raises:
        ReportError: The system refuses. The text includes its reason.
    """
    path = Path(path)
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        unfinished.write_bytes(content.encode() if isinstance(content, str) else content)
        unfinished.replace(path)
    except OSError as error:
        raise ReportError(f"{path}: {error.strerror}") from error
    finally:
        unfinished.unlink(missing_ok=True)
