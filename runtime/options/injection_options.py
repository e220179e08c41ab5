"""The user's options of injection: faults and devices that a run is to behave as if it had."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from adaptra.checks import is_list_of
from adaptra.errors import OptionError
from adaptra.runtime.injection.emulation import EmulatedDevice
from adaptra.runtime.options.rank_agreement import agreed


@dataclass(frozen=True, kw_only=True)
class InjectionOptions:
    """Options of injection, for experiments and tests.

    Attributes:
        faults: Faults to inject, such as ``"delay 1-2 60ms @8"`` or ``"slow 1.2 2x"``, which slows the worker of replica 1 that
            has stage 2. ``"kill 1.2 @8"`` ends its process. See :mod:`adaptra.runtime.injection.faults`.
        emulate: Pad every op to a stated duration by sleeping, to see the timeline of devices that this machine doesn't have.

    Raises:
        OptionError: An option is invalid; names it, the given value and the expected one.
    """

    faults: Sequence[str] = field(default=(), metadata=agreed())
    emulate: EmulatedDevice | None = field(default=None, metadata=agreed())

    def __post_init__(self) -> None:
        faults: Any = self.faults
        if not is_list_of(str, faults):
            raise OptionError(f"faults={faults!r}: expected a list of texts such as ['delay 1-2 60ms @8']")
        emulate: Any = self.emulate
        if emulate is not None and not isinstance(emulate, EmulatedDevice):
            raise OptionError(f"emulate={emulate!r}: expected an adaptra.EmulatedDevice or None")
