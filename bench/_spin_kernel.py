"""A kernel that occupies its stream until the host sets a flag. It imports triton, so it is imported on GPUs alone."""

from __future__ import annotations

import triton  # pyright: ignore[reportMissingImports] - an extra
import triton.language as tl  # pyright: ignore[reportMissingImports]


@triton.jit  # pyright: ignore[reportUntypedFunctionDecorator]
def spin(flag):  # noqa: ANN001, ANN202  # pyright: ignore[reportMissingParameterType] - Triton types it, and refuses Any
    """Run until the flag, int32 in pinned memory of the host, is not zero."""
    seen = tl.load(flag, volatile=True)
    while seen == 0:
        seen = tl.load(flag, volatile=True)
