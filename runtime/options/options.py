"""All options of a pipeline's runtime that few users change, kept out of compile()'s own arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from adaptra.known_keywords import known_keywords
from adaptra.runtime.options.injection_options import InjectionOptions
from adaptra.runtime.options.planning_options import PlanningOptions
from adaptra.runtime.options.recording_options import RecordingOptions
from adaptra.runtime.options.stage_options import StageOptions
from adaptra.runtime.options.transport_options import TransportOptions

GROUPS: Final = (PlanningOptions, StageOptions, TransportOptions, InjectionOptions, RecordingOptions)
"""The groups of fields. A part of the product takes the group that it needs."""


@known_keywords
@dataclass(frozen=True, kw_only=True)
class Options(RecordingOptions, InjectionOptions, TransportOptions, StageOptions, PlanningOptions):
    """Options of a pipeline's runtime: the fields of all groups, as in ``adaptra.Options(seed=1, delegate=True)``.

    Each group describes its own:

    - :class:`~adaptra.runtime.options.planning_options.PlanningOptions`: ``adapt``, ``schedule``, ``expected_delays``,
      ``planning_seconds``;
    - :class:`~adaptra.runtime.options.stage_options.StageOptions`: ``seed``, ``inner``, ``captured``, ``broadcast_buffers``,
      ``reduce``, ``deterministic``, ``shapes``, ``synchrony``;
    - :class:`~adaptra.runtime.options.transport_options.TransportOptions`: ``timeout``, ``delegate``, ``addresses``,
      ``lossy_bf16``, ``survive``;
    - :class:`~adaptra.runtime.options.injection_options.InjectionOptions`: ``faults``, ``emulate``;
    - :class:`~adaptra.runtime.options.recording_options.RecordingOptions`: ``on_event``, ``telemetry``,
      ``noise_scale``.

    Raises:
        OptionError: An option is invalid; names it, the given value and the expected one.
    """

    def __post_init__(self) -> None:
        for group in GROUPS:
            group.__post_init__(self)
