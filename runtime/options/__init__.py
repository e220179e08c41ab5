"""Options of a pipeline's runtime, grouped by concept. Users give all of them flat, as ``adaptra.Options(...)``."""

from adaptra.runtime.options.options import Options

__all__ = ["Options"]
