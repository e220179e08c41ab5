"""Synchronisation modes as data: which gradients are in an update, and what an update waits for."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from adaptra.errors import OptionError

Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Synchronous:
    """Every update has the gradients of all microbatches, of the same parameters: the bits of one process.

    Attributes:
        stealing: Whether replicas that are done take microbatches that others have not begun, within the step. Otherwise
            microbatches are shared beforehand, by what is known of lasting slowness.
    """

    stealing: bool = False

    def __str__(self) -> str:
        return "stealing" if self.stealing else "exact"


@dataclass(frozen=True, slots=True)
class XOrder:
    """An update happens when x replicas have reported. Gradients of the others are older when they are in an update.

    Attributes:
        x: The number of replicas whose gradients an update has; 1 is asynchronous, and all of them is exact. None with groups.
        groups: The replicas of each group, which reports as a whole; or True for groups by speed.
        staleness: The most updates by which a gradient may be old; an older one is computed anew. None is no limit.
    """

    x: int | None = None
    groups: Groups | bool = False
    staleness: int | None = None

    def __str__(self) -> str:
        return "groups" if self.groups else "asynchronous" if self.x == 1 else f"x-order={self.x}"


@dataclass(frozen=True, slots=True)
class Deadline:
    """An update happens when a share of all microbatches is in. The others are deferred to the next step, none is dropped.

    Attributes:
        quorum: The share; 1 is exact without sharing.
    """

    quorum: float = 0.9

    def __str__(self) -> str:
        return f"deadline={self.quorum:g}"


@dataclass(frozen=True, slots=True)
class Local:
    """Each replica updates by itself, and all exchange what they have learnt once in a while (DiLoCo).

    Attributes:
        every: The number of steps between two exchanges.
    """

    every: int = 32

    def __str__(self) -> str:
        return f"local={self.every}"


Mode = Synchronous | XOrder | Deadline | Local

_WORDS: Final[Mapping[str, Mode]] = {
    "exact": Synchronous(),
    "stealing": Synchronous(stealing=True),
    "groups": XOrder(groups=True),
    "asynchronous": XOrder(x=1),
}
_NUMBERED: Final[Mapping[str, Callable[[str], Mode]]] = {
    "x-order": lambda number: XOrder(x=int(number)),
    "deadline": lambda number: Deadline(quorum=float(number)),
    "local": lambda number: Local(every=int(number)),
}
FORMS: Final = "exact, stealing, groups, asynchronous, x-order=N, deadline=SHARE or local=STEPS"
"""The texts that :func:`parse_mode` takes."""


def parse_mode(text: str) -> Mode:
    """Return the mode that a text names, such as ``exact`` or ``x-order=7``.

    Raises:
        OptionError: It names none. The text says what was expected.
    """
    name, _, number = text.partition("=")
    try:
        return _WORDS[text] if text in _WORDS else _NUMBERED[name](number)
    except (KeyError, ValueError):
        raise OptionError(f"mode {text!r}: expected {FORMS}") from None


def check_mode(mode: Mode, replicas: int) -> None:
    """Refuse a mode that so many replicas can't train in.

    Raises:
        OptionError: The mode is refused. The text names it, and what was expected.
    """
    match mode:
        case XOrder():
            _check_order(mode, replicas)
        case Deadline(quorum=quorum) if not (math.isfinite(quorum) and 0 < quorum <= 1):
            raise OptionError(f"mode {mode}: expected a share above 0, and at most 1")
        case Local(every=every) if every < 1:
            raise OptionError(f"mode {mode}: expected at least 1 step")
        case Local() if replicas < 2:
            raise OptionError(f"mode {mode}: expected at least 2 replicas, which exchange")
        case Synchronous() | Deadline() | Local():
            pass


def _check_order(mode: XOrder, replicas: int) -> None:
    if mode.x is None and not mode.groups:
        raise OptionError("XOrder(): expected x or groups")
    if mode.x is not None and mode.groups:
        raise OptionError(f"XOrder(x={mode.x}, groups={mode.groups}): expected x or groups, not both")
    if mode.x is not None and not 1 <= mode.x <= replicas:
        raise OptionError(f"mode {mode}: expected 1 to {replicas} replicas in an update")
    if not isinstance(mode.groups, bool) and sorted(one for group in mode.groups for one in group) != [*range(replicas)]:
        raise OptionError(f"groups {mode.groups}: expected each replica of 0..{replicas - 1} in one group")
    if mode.staleness is not None and mode.staleness < 0:
        raise OptionError(f"staleness={mode.staleness}: expected a whole number of at least 0, or None")


def kind_of(mode: Mode) -> str:
    """Return the kind of a mode, by which users allow it."""
    match mode:
        case Synchronous():
            return "exact"
        case XOrder():
            return "x-order"
        case Deadline():
            return "deadline"
        case Local():
            return "local"


KINDS: Final = ("exact", "x-order", "deadline", "local")
"""All that :func:`kind_of` returns."""


def is_trial(mode: Mode) -> bool:
    """Return whether only a trial can say how the loss falls: gradients are old, or replicas differ between exchanges."""
    return isinstance(mode, XOrder | Local)
