"""Import paths of version 0.1 that have moved. Each still works, with a warning that names the new path.

Only paths that documentation, examples or benchmarks named are supported. Version 0.3 will remove them.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Final

MOVED: Final = {
    "adaptra.api": "adaptra.frontend.api",
    "adaptra.comparison": "adaptra.planning.explaining.comparison",
    "adaptra.cost": "adaptra.simulation.cost",
    "adaptra.critical_path": "adaptra.simulation.critical_path",
    "adaptra.dependencies": "adaptra.program.dependencies",
    "adaptra.dynamo": "adaptra.frontend.dynamo",
    "adaptra.exact": "adaptra.planning.exact",
    "adaptra.explanation": "adaptra.planning.explaining.explanation",
    "adaptra.lockstep": "adaptra.program.lockstep",
    "adaptra.loss_scale": "adaptra.frontend.grad_scaler",
    "adaptra.planner": "adaptra.planning.planner",
    "adaptra.published": "adaptra.planning.published",
    "adaptra.report.run": "adaptra.report.run_records",
    "adaptra.robust": "adaptra.planning.robust",
    "adaptra.roles": "adaptra.program.roles",
    "adaptra.runtime.emulation": "adaptra.runtime.injection.emulation",
    "adaptra.runtime.events": "adaptra.runtime.control.plans.events",
    "adaptra.runtime.faults": "adaptra.runtime.injection.faults",
    "adaptra.runtime.plan": "adaptra.runtime.control.plans.plan",
    "adaptra.runtime.transports.contract": "adaptra.program.transport_contract",
    "adaptra.schedules": "adaptra.program.schedules",
    "adaptra.sensitivity": "adaptra.simulation.sensitivity",
    "adaptra.simulate": "adaptra.simulation.simulate",
    "adaptra.timeline": "adaptra.simulation.timeline",
    "adaptra.torch_csv": "adaptra.program.torch_csv",
    "adaptra.training_state": "adaptra.frontend.checkpoint_state",
    "adaptra.verify": "adaptra.program.verify",
}
"""Each path of version 0.1, and the module's current path."""


class MovedModules(MetaPathFinder, Loader):
    """Finds modules of :data:`MOVED` that no other finder finds, as stand-ins with the attributes of the moved module."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the spec of the stand-in of a moved module, or None."""
        return ModuleSpec(fullname, self) if fullname in MOVED else None

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Return None, for a plain module."""
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Warn, and copy every attribute of the module at its new path."""
        home = MOVED[module.__name__]
        warnings.warn(f"{module.__name__} is now {home}", DeprecationWarning, stacklevel=2)
        moved = importlib.import_module(home)
        module.__dict__["__getattr__"] = partial(getattr, moved)
        module.__dict__["__all__"] = [name for name in vars(moved) if not name.startswith("_")]


def keep_moved_paths() -> None:
    """Make the paths of :data:`MOVED` importable from now on."""
    if not any(isinstance(finder, MovedModules) for finder in sys.meta_path):
        sys.meta_path.append(MovedModules())
