"""Injected faults: a link or a worker that turns slow or fails at a given step, on any transport.

The text form of a fault is one line::

    delay 1-2 60ms @8          each message between stages 1 and 2, both ways, arrives 60 ms later, from step 8 on
    delay 1>2 60ms @8..20      only from 1 to 2, in steps 8 to 19
    rate 1>2 50MB @8           the edge carries 50 MB a second
    rate 1-2 /6 @8             the edge carries a sixth of the lowest such rate that it has in a step
    lossy 1-2 5% 200ms @8      one in twenty messages arrives 200 ms later, as when it was lost and is sent again
    slow 2 1.5x @8             ops of stage 2 take one and a half times as long
    slow 2 5ms                 ops of stage 2 take 5 ms longer, always
    break 2 @8                 the connections of the worker of stage 2 break in step 8: an error as a reset one gives
    kill 2 @8                  its process ends at once (SIGKILL)
    freeze 2 @8 5s             its process stops for 5 s (SIGSTOP); where all workers are threads, its thread alone
    cut 2 @8 3s                no message leaves that worker or reaches it for 3 s, as when a cable is pulled; only what
                               adaptra's transports carry, which sums over replicas and signs of life are not

They hit every replica of the job, unless they name one::

    delay 1-2@replica0 60ms @8      only the messages of replica 0; so with ``rate`` and ``lossy``
    slow 1.2 1.5x @8                only the worker of replica 1 that has stage 2, in the ops of all its stages
    kill 1.2 @8                     only that worker; so with ``break``, ``freeze`` and ``cut``

Failures act once in a process's life, at the begin of the step unless a point in it follows::

    kill 1.2 @8:2W3            in the op 2W3 of the worker's own replica, once it is computed
    kill 1.2 @8:REDUCE         as it waits for the sum over replicas
    kill 1.2 @8:certificate    between the end of the step on this rank and the filling of ``grad``
    kill 1.2 @8:optimizer      after step 8, as the next call begins
    kill 1.2 @8:clip           after step 8, in the norm of its gradients

A rate such as ``/6`` is a fault of its own, beside those with the rates that it divides. Several multiply. Without a rate to
divide, of the same replica or of all, it is refused.

A fault is of a place, a stage of a replica, whichever rank of the job has it. So the fault stays where it is when ranks change
roles: then another rank is slow.

This file defines the faults. :mod:`adaptra.runtime.injection.faulty_transport` applies them to messages,
:mod:`adaptra.runtime.injection.emulation` slows ops and :mod:`adaptra.runtime.injection.failures` has workers fail.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from enum import Enum
from typing import Final

from adaptra.errors import CaseError
from adaptra.program import Op
from adaptra.program.routing import NUMBER
from adaptra.runtime.injection.points import Moment, Point, parse_point
from adaptra.runtime.transports.base import Identity


class Effect(Enum):
    """The effect of a fault, and the unit of its amount."""

    DELAY = "delay"
    """Seconds by which a message arrives later."""
    RATE = "rate"
    """Bytes a second that an edge carries at most."""
    DIVISOR = "divisor"
    """The divisor of the lowest RATE of the same edge in a step; at least 1."""
    LOSS = "lossy"
    """Seconds by which a share of the messages, and those behind them on their channel, arrive later."""
    FACTOR = "factor"
    """The factor of the duration of a stage's ops; at least 1."""
    EXTRA = "extra"
    """Seconds by which the ops of a stage take longer."""
    BREAK = "break"
    """No amount: the connections of a worker break once."""
    KILL = "kill"
    """No amount: the process of a worker is killed."""
    FREEZE = "freeze"
    """Seconds for which the process of a worker is stopped once."""
    CUT = "cut"
    """Seconds for which no message leaves or reaches a worker, once."""


_TIMES: Final = {"s": 1, "ms": 1000, "us": 1000000}
_RATES: Final = {"GB": 1000000000, "MB": 1000000, "kB": 1000, "B": 1}
_EXPECTED: Final = (
    "expected such as 'delay 1-2 60ms @8', 'delay 1>2@replica0 60ms @8..20', 'rate 1>2 50MB @8', 'rate 1-2 /6 @8', "
    "'lossy 1-2 5% 200ms @8', 'slow 2 1.5x @8', 'slow 1.2 5ms', 'break 1.2 @8', 'kill 1.2 @8:2W3', 'freeze 1.2 @8 5s' or "
    "'cut 1.2 @8 3s'"
)
_EDGES: Final = frozenset({Effect.DELAY, Effect.RATE, Effect.DIVISOR, Effect.LOSS})
FAILURES: Final = frozenset({Effect.BREAK, Effect.KILL, Effect.FREEZE, Effect.CUT})
"""The effects that act once, at a point of a step."""
_LASTING: Final = frozenset({Effect.FREEZE, Effect.CUT})
_LEAST: Final = {Effect.RATE: math.ulp(0.0), Effect.DIVISOR: 1.0, Effect.FACTOR: 1.0}
_NUMBER: Final = r"\d+(?:\.\d+)?"
_AMOUNT: Final = rf"(?P<number>{_NUMBER})"
_SECONDS: Final = rf"{_AMOUNT}(?P<unit>s|ms|us)"
_SPAN: Final = rf"(?: @(?P<first>{NUMBER})(?:\.\.(?P<until>{NUMBER}))?)?"
_EDGE: Final = rf"(?P<stage>{NUMBER})(?P<ways>[->])(?P<peer>{NUMBER})(?:@replica(?P<replica>{NUMBER}))?"
_WORKER: Final = rf"(?:(?P<replica>{NUMBER})\.)?(?P<stage>{NUMBER})"
_FORMS: Final = tuple(
    re.compile(form)
    for form in (
        rf"(?P<what>delay) {_EDGE} {_SECONDS}{_SPAN}",
        rf"(?P<what>lossy) {_EDGE} (?P<share>{_NUMBER})% {_SECONDS}{_SPAN}",
        rf"(?P<what>rate) {_EDGE} {_AMOUNT}(?P<unit>GB|MB|kB|B){_SPAN}",
        rf"(?P<what>rate) {_EDGE} (?P<unit>/){_AMOUNT}{_SPAN}",
        rf"(?P<what>slow) {_WORKER} {_AMOUNT}(?P<unit>x|s|ms|us){_SPAN}",
        rf"(?P<what>break|kill|freeze|cut) {_WORKER} @(?P<first>{NUMBER})(?::(?P<point>\S+))?(?: {_SECONDS})?",
    )
)


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault.

    Attributes:
        effect: Its effect.
        amount: The size of the effect, in the effect's unit.
        stage: The stage that is slow or whose worker is, or the stage at one end of the edge.
        peer: The stage at the edge's other end, None for a slow stage or worker.
        both_ways: Whether messages from ``peer`` to ``stage`` are affected too.
        from_step: The first step affected.
        until_step: The first step not affected any more, None for ever.
        share: The share of late messages on a lossy edge: above 0, at most 1. Their identities decide which ones, the same in
            every run.
        replica: The replica whose worker or edge is affected, None for all replicas.
        point: The point of the step at which a worker fails.

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
    replica: int | None = None
    point: Point = Moment.BEGIN

    def __post_init__(self) -> None:
        is_edge = self.effect in _EDGES
        if is_edge != (self.peer is not None) or self.peer == self.stage or (self.both_ways and not is_edge):
            raise CaseError(f"fault {self.effect.value} of stage {self.stage} and {self.peer}: {_EXPECTED}")
        least = _LEAST.get(self.effect, 0.0)
        if not (math.isfinite(self.amount) and self.amount >= least):
            raise CaseError(f"fault {self.effect.value} {self.amount}: expected a finite number of at least {least}")
        if not 0 < self.share <= 1 or (self.share < 1 and self.effect is not Effect.LOSS):
            share = f"{self.effect.value} {100 * self.share:g}%"
            raise CaseError(f"fault {share}: expected above 0% and at most 100%, and of a lossy edge alone")
        if self.until_step is not None and self.until_step <= self.from_step:
            raise CaseError(f"fault @{self.from_step}..{self.until_step}: expected the second step to be after the first")
        if self.until_step is not None and self.effect in FAILURES:
            span = f"{self.effect.value} @{self.from_step}..{self.until_step}"
            raise CaseError(f"fault {span}: expected one step, as a worker fails once")

    @staticmethod
    def parse(text: str) -> Fault:
        """Read the text form.

        Raises:
            CaseError: Shows the text and the forms expected.
        """
        matched = next(filter(None, (form.fullmatch(text) for form in _FORMS)), None)
        if matched is None:
            raise CaseError(f"fault {text!r}: {_EXPECTED}")
        parts = matched.groupdict()
        unit = parts["unit"]
        if parts["what"] in {one.value for one in FAILURES} and (Effect(parts["what"]) in _LASTING) != (unit is not None):
            expected = f"no duration, such as '{text.rpartition(' ')[0]}'" if unit else f"a duration, such as '{text} 5s'"
            raise CaseError(f"fault {text!r}: expected {expected}")
        point = parse_point(text, parts.get("point"))
        match parts["what"], unit:
            case "rate", "/":
                effect = Effect.DIVISOR
            case "slow", "x":
                effect = Effect.FACTOR
            case "slow", _:
                effect = Effect.EXTRA
            case what, _:
                effect = Effect(what)
        peer, until, replica = (None if (one := parts.get(name)) is None else int(one) for name in ("peer", "until", "replica"))
        return Fault(
            effect,
            float(parts["number"] or 0) * _RATES.get(unit, 1) / _TIMES.get(unit, 1),
            int(parts["stage"]),
            peer,
            parts.get("ways") == "-",
            int(parts["first"] or 0),
            until,
            float(Decimal(parts.get("share") or 100) / 100),
            replica,
            point,
        )

    def check_stages(self, stages: int) -> None:
        """Refuse a fault of a stage that a pipeline of ``stages`` stages does not have.

        Raises:
            CaseError: Names the fault and the stages there are.
        """
        for stage in (self.stage, self.peer):
            if stage is not None and stage >= stages:
                raise CaseError(f"fault '{self}': there is no stage {stage}: expected stages of 0..{stages - 1}")

    def check_replica(self, replicas: int) -> None:
        """Refuse a fault of a replica that a job of ``replicas`` replicas does not have.

        Raises:
            CaseError: Names the fault and the replicas there are.
        """
        if (self.replica or 0) >= replicas:
            raise CaseError(f"fault '{self}': there is no replica {self.replica}: expected replicas of 0..{replicas - 1}")

    def check_point(self, placement: Sequence[int], microbatches: int, *, with_loss: bool) -> None:
        """Refuse a failure at a point that its worker does not come to.

        Args:
            placement: ``placement[stage]`` is the stage's rank.
            microbatches: Microbatches per step.
            with_loss: Whether a step is one call that returns a loss.

        Raises:
            CaseError: Names the fault and what its point may be.
        """
        if isinstance(self.point, Op):
            own = [stage for stage, rank in enumerate(placement) if rank == placement[self.stage]]
            if self.point.stage not in own or self.point.microbatch >= microbatches:
                raise CaseError(
                    f"fault '{self}': its worker has no op {self.point}: expected one of stage {', '.join(map(str, own))} and "
                    f"microbatch 0..{microbatches - 1}"
                )
        elif self.point in (Moment.REDUCE, Moment.CERTIFICATE) and not with_loss:
            raise CaseError(f"fault '{self}': the function returns no loss: expected another point than {self.point}")

    def check_job(self, replicas: int, *, in_threads: bool) -> None:
        """Refuse a fault that no worker of a job can have.

        Args:
            replicas: The number of replicas.
            in_threads: Whether all workers are threads of one process.

        Raises:
            CaseError: Names the fault and what is expected instead.
        """
        self.check_replica(replicas)
        if self.point is Moment.REDUCE and replicas == 1:
            raise CaseError(f"fault '{self}': one replica has no sum over replicas: expected several, or another point")
        if self.effect is Effect.KILL and in_threads:
            raise CaseError(
                f"fault '{self}': all workers are threads of this process, which would end: expected a process for each, as "
                f"under torchrun, or '{replace(self, effect=Effect.BREAK)}'"
            )

    def check_base(self, faults: Iterable[Fault]) -> None:
        """Refuse a divisor without a rate to divide, in any step and direction in which it is on.

        The rate must be of the divisor's replica or of all replicas.

        Args:
            faults: All faults of the job.

        Raises:
            CaseError: Names the fault, the edge and the step, and shows a rate that would do.
        """
        if self.effect is not Effect.DIVISOR:
            return
        assert self.peer is not None, "a divisor is of an edge"
        bases = [one for one in faults if one.effect is Effect.RATE and one.replica in (None, self.replica)]
        ends = {one.until_step for one in bases if one.until_step is not None and self.is_on(one.until_step)}
        ways = [(self.stage, self.peer), (self.peer, self.stage)]
        for source, destination in ways if self.both_ways else ways[:1]:
            for step in sorted({self.from_step, *ends}):
                if not any(one.is_of_edge(source, destination) and one.is_on(step) for one in bases):
                    raise CaseError(
                        f"fault '{self}': edge {source}→{destination} has no rate to divide in step {step}: expected another "
                        f"fault such as '{replace(self, effect=Effect.RATE, amount=50e6)}'"
                    )

    def __str__(self) -> str:
        before, behind = ("", "") if self.replica is None else (f"{self.replica}.", f"@replica{self.replica}")
        way = "-" if self.both_ways else ">"
        where = f"{before}{self.stage}" if self.peer is None else f"{self.stage}{way}{self.peer}{behind}"
        match self.effect:
            case Effect.DELAY:
                what, amount = "delay", _seconds(self.amount)
            case Effect.RATE:
                what, amount = "rate", _rate(self.amount)
            case Effect.DIVISOR:
                what, amount = "rate", f"/{_decimal(self.amount)}"
            case Effect.LOSS:
                what, amount = "lossy", f"{_percent(self.share)} {_seconds(self.amount)}"
            case Effect.FACTOR:
                what, amount = "slow", f"{_decimal(self.amount)}x"
            case Effect.EXTRA:
                what, amount = "slow", _seconds(self.amount)
            case Effect.BREAK | Effect.KILL | Effect.FREEZE | Effect.CUT:
                point = "" if self.point is Moment.BEGIN else f":{self.point}"
                amount = f" {_seconds(self.amount)}" if self.effect in _LASTING else ""
                return f"{self.effect.value} {where} @{self.from_step}{point}{amount}"
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


def faults_of_worker(faults: Iterable[Fault], replica: int, stages: Sequence[int]) -> Iterator[Fault]:
    """Yield the faults that a worker applies: to its ops, and to the messages that it sends.

    A slow worker is slow at all its stages, so its fault is yielded once for each.

    Args:
        faults: All faults of the job.
        replica: The worker's replica.
        stages: The worker's stages.
    """
    for fault in faults:
        if fault.replica not in (None, replica):
            continue
        if fault.peer is not None:
            yield fault
        elif fault.stage in stages:
            is_whole = fault.replica is not None and fault.effect not in FAILURES
            yield from (replace(fault, stage=stage) for stage in (stages if is_whole else [fault.stage]))


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
    *named, replica, _ = identity.key
    # The messages of the first replica are those that versions without replicas in the key chose.
    drawn = tuple(named) if replica == 0 else (*named, replica)
    return random.Random(repr(drawn)).random() < share


def link_occupancy(faults: Iterable[Fault], identity: Identity) -> float:
    """Return the seconds for which a message occupies its edge: its bytes at the lowest injected rate, divided by all
    divisors.
    """
    mine = [f for f in faults if f.is_of_edge(*identity.edge) and f.is_on(identity.step)]
    rates = [f.amount for f in mine if f.effect is Effect.RATE]
    divisor = math.prod(f.amount for f in mine if f.effect is Effect.DIVISOR)
    return sum(spec.travelling_bytes for spec in identity.specs) * divisor / min(rates) if rates else 0.0


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
