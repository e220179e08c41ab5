"""adaptra: a PyTorch compiler and runtime that keeps pipeline-parallel training fast while links and workers slow down.

Importing this package imports neither torch nor sympy; what needs them loads them when it is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from adaptra.api import Pipeline, compile
    from adaptra.cost import Case, CostModel
    from adaptra.program import Kind, Op, Program
    from adaptra.schedules import GENERATORS, generate
    from adaptra.simulate import simulate
    from adaptra.verify import verify

__version__: Final = "0.1.0"

__all__ = ["GENERATORS", "Case", "CostModel", "Kind", "Op", "Pipeline", "Program", "compile", "generate", "simulate", "verify"]

_HOMES: Final = {
    "GENERATORS": "adaptra.schedules",
    "Case": "adaptra.cost",
    "CostModel": "adaptra.cost",
    "Kind": "adaptra.program",
    "Op": "adaptra.program",
    "Pipeline": "adaptra.api",
    "Program": "adaptra.program",
    "compile": "adaptra.api",
    "generate": "adaptra.schedules",
    "simulate": "adaptra.simulate",
    "verify": "adaptra.verify",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'adaptra' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
