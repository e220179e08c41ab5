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
    from adaptra.runtime.emulation import EmulatedDevice
    from adaptra.runtime.options import Options
    from adaptra.runtime.telemetry.log import JsonFormatter
    from adaptra.runtime.telemetry.options import Telemetry
    from adaptra.schedules import GENERATORS, generate
    from adaptra.training_state import TrainingState

__version__: Final = "0.1.0"

__all__ = [
    "GENERATORS",
    "Case",
    "CostModel",
    "EmulatedDevice",
    "JsonFormatter",
    "Kind",
    "Op",
    "Options",
    "Pipeline",
    "Program",
    "Telemetry",
    "TrainingState",
    "compile",
    "generate",
]

_HOMES: Final = {
    "GENERATORS": "adaptra.schedules",
    "Case": "adaptra.cost",
    "CostModel": "adaptra.cost",
    "EmulatedDevice": "adaptra.runtime.emulation",
    "JsonFormatter": "adaptra.runtime.telemetry.log",
    "Kind": "adaptra.program",
    "Op": "adaptra.program",
    "Options": "adaptra.runtime.options",
    "Pipeline": "adaptra.api",
    "Program": "adaptra.program",
    "Telemetry": "adaptra.runtime.telemetry.options",
    "TrainingState": "adaptra.training_state",
    "compile": "adaptra.api",
    "generate": "adaptra.schedules",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'adaptra' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
