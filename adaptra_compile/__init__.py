"""adaptra: a PyTorch compiler and runtime that keeps pipeline-parallel training fast while links and workers slow down.

The import of this package imports neither torch nor sympy. Modules that need them load them when they are used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from adaptra.frontend.api import Pipeline, compile
    from adaptra.frontend.checkpoint_state import TrainingState
    from adaptra.planning.synchrony.modes import Auto, Deadline, Local, Outer, Stealing, XOrder
    from adaptra.program import Kind, Op, Program
    from adaptra.program.schedules import GENERATORS, generate
    from adaptra.runtime.injection.emulation import EmulatedDevice
    from adaptra.runtime.options import Options
    from adaptra.runtime.options.reduce_options import Reduce
    from adaptra.runtime.telemetry.log import JsonFormatter
    from adaptra.runtime.telemetry.options import Telemetry
    from adaptra.simulation.case import Case
    from adaptra.simulation.case_files import load_case
    from adaptra.simulation.cost import CostModel

__version__: Final = "0.1.0"

__all__ = [
    "GENERATORS",
    "Auto",
    "Case",
    "CostModel",
    "Deadline",
    "EmulatedDevice",
    "JsonFormatter",
    "Kind",
    "Local",
    "Op",
    "Options",
    "Outer",
    "Pipeline",
    "Program",
    "Reduce",
    "Stealing",
    "Telemetry",
    "TrainingState",
    "XOrder",
    "compile",
    "generate",
    "load_case",
]

_HOMES: Final = {
    "Auto": "adaptra.planning.synchrony.modes",
    "GENERATORS": "adaptra.program.schedules",
    "Case": "adaptra.simulation.case",
    "CostModel": "adaptra.simulation.cost",
    "Deadline": "adaptra.planning.synchrony.modes",
    "EmulatedDevice": "adaptra.runtime.injection.emulation",
    "JsonFormatter": "adaptra.runtime.telemetry.log",
    "Kind": "adaptra.program",
    "Local": "adaptra.planning.synchrony.modes",
    "Op": "adaptra.program",
    "Options": "adaptra.runtime.options",
    "Outer": "adaptra.planning.synchrony.modes",
    "XOrder": "adaptra.planning.synchrony.modes",
    "Pipeline": "adaptra.frontend.api",
    "Program": "adaptra.program",
    "Reduce": "adaptra.runtime.options.reduce_options",
    "Stealing": "adaptra.planning.synchrony.modes",
    "Telemetry": "adaptra.runtime.telemetry.options",
    "TrainingState": "adaptra.frontend.checkpoint_state",
    "compile": "adaptra.frontend.api",
    "generate": "adaptra.program.schedules",
    "load_case": "adaptra.simulation.case_files",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'adaptra' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
