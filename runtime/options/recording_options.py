"""The user's options of recording: who receives a run's events and records."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from adaptra.checks import require_call, require_flag
from adaptra.errors import OptionError
from adaptra.runtime.options.rank_agreement import agreed, per_rank
from adaptra.runtime.telemetry.options import Telemetry


@dataclass(frozen=True, kw_only=True)
class RecordingOptions:
    """Options of recording.

    Attributes:
        on_event: Called with each event of the controller, such as a detected slow edge or a switch of plans, on a thread of
            telemetry's own. The first exception that it raises is logged.
        telemetry: Receivers of the run's records, see :class:`adaptra.runtime.telemetry.options.Telemetry`.
        noise_scale: Whether replicas measure the norms of their gradients in each step. From these follows the gradient noise
            scale: ``pipe.noise_scales``, and ``adaptra modes RUN`` of a run with telemetry. See ``docs/design/synchrony.md``.
            No number changes.

    Raises:
        OptionError: An option is invalid; names it, the given value and the expected one.
    """

    on_event: Callable[[Any], None] | None = field(
        default=None, metadata=per_rank("each rank calls its own with its own events")
    )
    telemetry: Telemetry = field(default_factory=Telemetry, metadata=per_rank("each rank has its own receivers"))
    noise_scale: bool = field(default=False, metadata=agreed())

    def __post_init__(self) -> None:
        require_call("on_event", self.on_event, "event")
        require_flag("noise_scale", self.noise_scale)
        given: Any = self.telemetry
        if not isinstance(given, Telemetry):
            raise OptionError(f"telemetry={given!r}: expected adaptra.Telemetry(...)")
