"""Names of a program's ops in torch.profiler, as ``adaptra: 1F3``. Where no profiler runs, a name costs a comparison."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

from torch.autograd import profiler

_UNNAMED: Final[AbstractContextManager[Any]] = nullcontext()


def named(what: object) -> AbstractContextManager[Any]:
    """Return a context in which a profiler sees an op by its name. A profiler that starts later does not see it."""
    # The name of a flag that torch sets for all threads; a version without it has ops without names.
    if not getattr(profiler, "_is_profiler_enabled", False):
        return _UNNAMED
    return profiler.record_function(f"adaptra: {what}")
