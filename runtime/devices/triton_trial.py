"""Whether Triton's kernels work here, which a trial tells."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable


def why_not(is_right: Callable[[], bool]) -> str | None:
    """Return the reason why a kernel can't be used, or None after it has worked.

    Args:
        is_right: Runs the kernel, and returns whether its bits are right.
    """
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed: pip install 'adaptra[gpu]'"
    try:
        return None if is_right() else "triton's kernel gives wrong bits here"
    except Exception as error:  # Compilers and drivers may raise any exception, and torch's ops work without them.
        return f"triton can't compile or run a kernel here: {type(error).__name__}: {error}"
