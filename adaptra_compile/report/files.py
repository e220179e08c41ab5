"""Atomic writes of result files, so that no reader sees an incomplete one."""

from __future__ import annotations

import io
import secrets
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from adaptra.errors import MissingExtraError, ReportError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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


def write_figure(
    path: str | Path, suffixes: tuple[str, ...], inches: tuple[float, float], compose: Callable[[Figure], None]
) -> None:
    """Compose a figure of matplotlib and write it. Equal figures give equal files.

    Args:
        path: A file name with one of the suffixes. The file is written atomically.
        suffixes: The suffixes, each a format of matplotlib.
        inches: Width and height.
        compose: Draws on the empty figure.

    Raises:
        ReportError: The suffix is unknown, or the folder does not exist.
        MissingExtraError: matplotlib is not installed.
    """
    suffix = check_suffix(path, suffixes)
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError("pictures need matplotlib: pip install 'adaptra[viz]'") from error
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "adaptra", "font.family": "DejaVu Sans"}):
        figure = Figure(figsize=inches)
        compose(figure)
        buffer = io.BytesIO()
        metadata = {"Date": None} if suffix == ".svg" else None
        figure.savefig(buffer, format=suffix[1:], dpi=150, facecolor="white", metadata=metadata)
    write_whole(path, buffer.getvalue())
