"""Injected faults: a link or a stage that turns slow at a given step, on any transport.

The text form of a fault is one line::

    delay 1-2 60ms @8          each message between stages 1 and 2, both ways, arrives 60 ms later, from step 8 on
    delay 1>2 60ms @8..20      only from 1 to 2, in steps 8 to 19
    rate 1>2 50MB @8           the edge carries 50 MB a second
    lossy 1-2 5% 200ms @8      one in twenty messages arrives 200 ms later, as when it was lost and is sent again
    slow 2 1.5x @8             ops of stage 2 take one and a half times as long
    slow 2 5ms                 ops of stage 2 take 5 ms longer, always

This file defines the faults. :mod:`adaptra.runtime.injection.faulty_transport` applies them to messages and
:mod:`adaptra.runtime.injection.emulation` to ops.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal
from enum import Enum
from typing import Final

from adaptra.errors import CaseError
from adaptra.runtime.transports.base import Identity


class Effect(Enum):
    """The effect of a fault, and the unit of its amount."""

    DELAY = "delay"
    """Seconds by which a message arrives later."""
    RATE = "rate"
    """Bytes a second that an edge carries at most."""
    LOSS = "lossy"
    """Seconds by which a share of the messages, and those behind them on their channel, arrive later."""
    FACTOR = "factor"
    """The factor of the duration of a stage's ops; at least 1."""
    EXTRA = "extra"
    """Seconds by which the ops of a stage take longer."""


_TIMES: Final = {"s": 1, "ms": 1000, "us": 1000000}
_RATES: Final = {"GB": 1000000000, "MB": 1000000, "kB": 1000, "B": 1}
_EXPECTED: Final = (
    "expected such as 'delay 1-2 60ms @8', 'delay 1>2 60ms @8..20', 'rate 1>2 50MB @8', 'lossy 1-2 5% 200ms @8', "
    "'slow 2 1.5x @8' or 'slow 2 5ms'"
)
_NUMBER: Final = r"\d+(?:\.\d+)?"
_WHOLE: Final = r"0|[1-9]\d*"
_SPAN: Final = rf"(?: @(?P<first>{_WHOLE})(?:\.\.(?P<until>{_WHOLE}))?)?"
_EDGE: Final = rf"(?P<stage>{_WHOLE})(?P<ways>[->])(?P<peer>{_WHOLE})"
_FORMS: Final = (
    re.compile(rf"delay {_EDGE} (?P<number>{_NUMBER})(?P<unit>s|ms|us){_SPAN}"),
    re.compile(rf"lossy {_EDGE} (?P<share>{_NUMBER})% (?P<number>{_NUMBER})(?P<unit>s|ms|us){_SPAN}"),
    re.compile(rf"rate {_EDGE} (?P<number>{_NUMBER})(?P<unit>GB|MB|kB|B){_SPAN}"),
    re.compile(rf"slow (?P<stage>{_WHOLE}) (?P<number>{_NUMBER})(?P<unit>x|s|ms|us){_SPAN}"),
)


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault.

    Attributes:
        effect: Its effect.
        amount: The size of the effect, in the effect's unit.
        stage: The slow stage, or the stage at one end of the edge.
        peer: The stage at the edge's other end, None for a slow stage.
        both_ways: Whether messages from ``peer`` to ``stage`` are affected too.
        from_step: The first step affected.
        until_step: The first step not affected any more, None for ever.
        share: The share of late messages on a lossy edge: above 0, at most 1. Their identities decide which ones, the same in
            every run.

    Raises:
        CaseError: The parts don't fit together.
    """

    effect: Effect
    amount: float
    stage: int
    peer: int | None = None
    both_ways: bool = False
    from_step: int = 0
    until_step: int | None = None
    share: float = 1.0

    def __post_init__(self) -> None:
        is_edge = self.effect in {Effect.DELAY, Effect.RATE, Effect.LOSS}
        if is_edge != (self.peer is not None) or self.peer == self.stage or (self.both_ways and not is_edge):
            raise CaseError(f"fault {self.effect.value} of stage {self.stage} and {self.peer}: {_EXPECTED}")
        least = {Effect.RATE: math.ulp(0.0), Effect.FACTOR: 1.0}.get(self.effect, 0.0)
        if not (math.isfinite(self.amount) and self.amount >= least):
            raise CaseError(f"fault {self.effect.value} {self.amount}: expected a finite number of at least {least}")
        if not 0 < self.share <= 1 or (self.share < 1 and self.effect is not Effect.LOSS):
            share = f"{self.effect.value} {100 * self.share:g}%"
            raise CaseError(f"fault {share}: expected above 0% and at most 100%, and of a lossy edge alone")
        if self.until_step is not None and self.until_step <= self.from_step:
            raise CaseError(f"fault @{self.from_step}..{self.until_step}: expected the second step to be after the first")

    @staticmethod
    def parse(text: str) -> Fault:
        """Read the text form.

        Raises:
            CaseError: Shows the text and the forms expected.
        """
        found = next(filter(None, (form.fullmatch(text) for form in _FORMS)), None)
        if found is None:
            raise CaseError(f"fault {text!r}: {_EXPECTED}")
        parts = found.groupdict()
        number, unit = float(parts["number"]), parts["unit"]
        if unit == "x":
            effect, amount = Effect.FACTOR, number
        elif unit in _RATES:
            effect, amount = Effect.RATE, number * _RATES[unit]
        elif "share" in parts:
            effect, amount = Effect.LOSS, number / _TIMES[unit]
        else:
            effect, amount = Effect.DELAY if "peer" in parts else Effect.EXTRA, number / _TIMES[unit]
        peer, until = parts.get("peer"), parts["until"]
        return Fault(
            effect,
            amount,
            int(parts["stage"]),
            None if peer is None else int(peer),
            parts.get("ways") == "-",
            int(parts["first"] or 0),
            None if until is None else int(until),
            float(Decimal(parts.get("share") or 100) / 100),
        )

    def check_stages(self, stages: int) -> None:
        """Refuse a fault of a stage that a pipeline of ``stages`` stages does not have.

        Raises:
            CaseError: Names the fault and the stages there are.
        """
        for stage in (self.stage, self.peer):
            if stage is not None and stage >= stages:
                raise CaseError(f"fault '{self}': there is no stage {stage}: expected stages of 0..{stages - 1}")

    def __str__(self) -> str:
        where = str(self.stage) if self.peer is None else f"{self.stage}{'-' if self.both_ways else '>'}{self.peer}"
        match self.effect:
            case Effect.DELAY:
                what, amount = "delay", _seconds(self.amount)
            case Effect.RATE:
                what, amount = "rate", _rate(self.amount)
            case Effect.LOSS:
                what, amount = "lossy", f"{_percent(self.share)} {_seconds(self.amount)}"
            case Effect.FACTOR:
                what, amount = "slow", f"{_decimal(self.amount)}x"
            case Effect.EXTRA:
                what, amount = "slow", _seconds(self.amount)
        if self.until_step is not None:
            span = f" @{self.from_step}..{self.until_step}"
        else:
            span = f" @{self.from_step}" if self.from_step else ""
        return f"{what} {where} {amount}{span}"

    def is_on(self, step: int) -> bool:
        """Return True if the fault is active in a step."""
        return self.from_step <= step and (self.until_step is None or step < self.until_step)

    def is_of_edge(self, source: int, destination: int) -> bool:
        """Return True if messages from stage ``source`` to stage ``destination`` are affected."""
        ends = (self.stage, self.peer)
        return ends == (source, destination) or (self.both_ways and ends == (destination, source))


def compute_factor(faults: Iterable[Fault], stage: int, step: int) -> float:
    """Return the factor of the duration of a stage's ops in a step; factors multiply."""
    return math.prod(f.amount for f in faults if f.effect is Effect.FACTOR and f.stage == stage and f.is_on(step))


def compute_extra(faults: Iterable[Fault], stage: int, step: int) -> float:
    """Return the seconds that each op of a stage takes longer in a step, after the factor."""
    return sum(f.amount for f in faults if f.effect is Effect.EXTRA and f.stage == stage and f.is_on(step))


def link_delay(faults: Iterable[Fault], identity: Identity) -> float:
    """Return the seconds by which a message arrives later."""
    mine = (f for f in faults if f.is_of_edge(*identity.edge) and f.is_on(identity.step))
    return sum(f.amount for f in mine if f.effect is Effect.DELAY or (f.effect is Effect.LOSS and _is_lost(identity, f.share)))


def _is_lost(identity: Identity, share: float) -> bool:
    """Return True if a message is in the share of late ones, the same in every run and without a pattern between messages."""
    return random.Random(repr(identity.key)).random() < share


def link_occupancy(faults: Iterable[Fault], identity: Identity) -> float:
    """Return the seconds for which a message occupies its edge: its bytes at the lowest injected rate."""
    rates = [f.amount for f in faults if f.effect is Effect.RATE and f.is_of_edge(*identity.edge) and f.is_on(identity.step)]
    return sum(spec.travelling_bytes for spec in identity.specs) / min(rates) if rates else 0.0


def _decimal(value: float) -> str:
    text = format(Decimal(repr(value)), "f")
    return text.rstrip("0").rstrip(".") if "." in text else text


def _percent(share: float) -> str:
    """Return the text that reads back to the same share."""
    return f"{(100 * Decimal(repr(share))).normalize():f}%"


def _seconds(value: float) -> str:
    """Return the shortest text that reads back to the same number of seconds."""
    texts = [(f"{_decimal(value * per_second)}{unit}", value * per_second / per_second) for unit, per_second in _TIMES.items()]
    return min((text for text, again in texts if again == value), key=len)


def _rate(value: float) -> str:
    """Return the shortest text that reads back to the same number of bytes a second."""
    texts = [(f"{_decimal(value / bytes_each)}{unit}", value / bytes_each * bytes_each) for unit, bytes_each in _RATES.items()]
    return min((text for text, again in texts if again == value), key=len)
