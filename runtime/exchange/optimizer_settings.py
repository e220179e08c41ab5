"""The settings of an optimizer's groups as text, which is the same in all processes that run the same lines."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor


def settings_of(optimizer: torch.optim.Optimizer) -> list[dict[str, str]]:
    """Return the settings of each group by name, without its parameters: see :func:`text_of`."""
    return [{name: text_of(value) for name, value in group.items() if name != "params"} for group in optimizer.param_groups]


def text_of(value: Any) -> str:
    """Return a setting as text.

    Numbers and elements of tensors have all of their digits. Functions are given by module and name, since they lie at another
    address in each process. Devices are given by type, as each process has one of its own.
    """
    match value:
        case torch.device():
            text = value.type
        case Tensor():
            dtype = "" if value.dtype == torch.get_default_dtype() else f", dtype={str(value.dtype).removeprefix('torch.')}"
            text = f"tensor({value.detach().tolist()!r}{dtype})"
        case partial():
            text = f"partial({text_of(value.func)}, {text_of(value.args)}, {text_of(value.keywords)})"
        case list() | tuple():
            begin, end = "[]" if isinstance(value, list) else "()"
            text = f"{begin}{', '.join(map(text_of, value))}{end}"
        case set() | frozenset():  # whose order is another in each process
            text = f"{type(value).__name__}({', '.join(sorted(map(text_of, value)))})"
        case Mapping():
            text = f"{{{', '.join(f'{text_of(name)}: {text_of(one)}' for name, one in value.items())}}}"
        case _ if callable(value):
            of = value if hasattr(value, "__qualname__") else type(value)
            text = f"{getattr(of, '__module__', None)}.{of.__qualname__}"
        case _:
            text = re.sub(r" at 0x[0-9a-f]+", "", repr(value))
    return text
