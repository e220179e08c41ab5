"""The settings of an optimizer's groups as text, which is the same in all processes that run the same lines."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor


def settings_of(optimizer: torch.optim.Optimizer) -> list[dict[str, str]]:
    """Return the settings of each group by name, without its parameters.

    Numbers and elements of tensors have all of their digits. Functions are given by module and name, since they lie at another
    address in each process.
    """
    return [{name: _text(value) for name, value in group.items() if name != "params"} for group in optimizer.param_groups]


def _text(value: Any) -> str:
    match value:
        case Tensor():
            dtype = "" if value.dtype == torch.get_default_dtype() else f", dtype={str(value.dtype).removeprefix('torch.')}"
            return f"tensor({value.detach().tolist()!r}{dtype})"
        case partial():
            return f"partial({_text(value.func)}, {_text(value.args)}, {_text(value.keywords)})"
        case list() | tuple():
            begin, end = "[]" if isinstance(value, list) else "()"
            return f"{begin}{', '.join(map(_text, value))}{end}"
        case Mapping():
            return f"{{{', '.join(f'{_text(name)}: {_text(one)}' for name, one in value.items())}}}"
        case _ if callable(value):
            of = value if hasattr(value, "__qualname__") else type(value)
            return f"{getattr(of, '__module__', None)}.{of.__qualname__}"
        case _:
            return re.sub(r" at 0x[0-9a-f]+", "", repr(value))
