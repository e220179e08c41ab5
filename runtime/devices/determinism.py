"""Kernels that give the same bits each time: torch's switches for them, set for this process and looked at again.

On a GPU some kernels add in an order that differs from run to run, such as the backward of an embedding. torch has others for
most of them, or an error that names the op: see torch.use_deterministic_algorithms. cuBLAS needs a workspace of a fixed size,
which it reads from the environment once.
"""

from __future__ import annotations

import os
from typing import Final

import torch

from adaptra.errors import OptionError

WORKSPACE: Final = "CUBLAS_WORKSPACE_CONFIG"
FIXED: Final = (":4096:8", ":16:8")
"""The values of the variable under which torch takes cuBLAS for deterministic."""


def why_not_on_a_gpu() -> str | None:
    """Return the reason why this process can't run deterministic kernels on a GPU; None if it can."""
    workspace = os.environ.get(WORKSPACE)
    if workspace in FIXED:
        return None
    now = "is not set" if workspace is None else f"is {workspace}"
    return f"{WORKSPACE} {now}: expected {' or '.join(FIXED)} in the environment of every process, before it uses a GPU"


def set_deterministic(device: torch.device) -> None:
    """Have this process run deterministic kernels only, also after the pipeline's end.

    Raises:
        OptionError: The model is on a GPU and cuBLAS's workspace is not of a fixed size.
    """
    if device.type == "cuda" and (reason := why_not_on_a_gpu()) is not None:
        raise OptionError(f"deterministic=True: {reason}")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def require_deterministic() -> None:
    """Raise if the process no longer runs deterministic kernels only.

    Raises:
        OptionError: Something has changed a switch of :func:`set_deterministic`; names it.
    """
    if not torch.are_deterministic_algorithms_enabled() or torch.is_deterministic_algorithms_warn_only_enabled():
        switch = "torch.use_deterministic_algorithms(True)"
    elif torch.backends.cudnn.benchmark:
        switch = "torch.backends.cudnn.benchmark = False"
    else:
        return
    raise OptionError(f"deterministic=True: something has undone {switch}, which compile ran: expected it to stay")
