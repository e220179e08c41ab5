"""The user's options of planning: the first plan, and whether others follow it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from adaptra.checks import are_edges, is_finite, require_flag, require_seconds
from adaptra.errors import OptionError
from adaptra.program import Program
from adaptra.runtime.options.rank_agreement import agreed, per_rank


@dataclass(frozen=True, kw_only=True)
class PlanningOptions:
    """Options of planning.

    Attributes:
        adapt: Re-plan when a link or a stage turns slow. False measures and reports, and never switches.
        schedule: The program to start with: a generator's name such as ``"1f1b"``, a compute-only Program, or None for the plan
            adapted to the estimated costs. Of the plans within one per cent of the shortest period, that is the one with
            the least memory. If ``memory`` is given, spare memory is spread evenly over the edges as slack. With
            ``adapt=False`` it may also be a Program of several replicas, whose routes are then followed.
        expected_delays: Delays that a link may get, if they are known beforehand. Per directed edge of neighbouring stages: the
            seconds added to each message, and their relative weights, such as ``{(1, 2): {0.0: 0.9, 0.06: 0.1}}``. The first
            plan is then good on average over all combinations.
        share: Whether replicas compute microbatches for each other while a worker is slow, or carry them round a slow link.
            Without replicas it says nothing. See ``docs/replicas.md`` for the jobs whose replicas can't.
        planning_seconds: The longest search for another plan, in seconds, beside training and on one rank alone. It never takes
            more than half a step, or a tenth of a step for a speculative plan. The search for the first plan is limited by
            effort instead, so that every rank finds the same one.

    Raises:
        OptionError: An option is invalid; names it, the given value and the expected one.
    """

    adapt: bool = field(default=True, metadata=agreed())
    schedule: str | Program | None = field(default=None, metadata=agreed())
    expected_delays: Mapping[tuple[int, int], Mapping[float, float]] = field(
        default_factory=dict[Any, Any],
        metadata=agreed(),
    )
    share: bool = field(default=True, metadata=agreed())
    planning_seconds: float = field(
        default=0.1, metadata=per_rank("only the coordinator searches, and every rank receives its result")
    )

    def __post_init__(self) -> None:
        require_flag("adapt", self.adapt)
        require_flag("share", self.share)
        given: Any = self.schedule
        if given is not None and not isinstance(given, str | Program):
            raise OptionError(f"schedule={given!r}: expected a generator's name such as '1f1b', an adaptra.Program, or None")
        if not _are_delays(self.expected_delays):
            raise OptionError(
                f"expected_delays={self.expected_delays!r}: expected per directed edge of neighbouring stages its delays in "
                "seconds and the weight of each, such as {(1, 2): {0.0: 0.9, 0.06: 0.1}}"
            )
        if self.expected_delays and self.schedule is not None:
            raise OptionError("expected_delays=… together with schedule=…: expected one of them, as both say what comes first")
        require_seconds("planning_seconds", self.planning_seconds)


def _are_delays(value: object) -> bool:
    if not isinstance(value, Mapping):
        return False
    delays = cast("Mapping[object, object]", value)
    return are_edges(list(delays)) and all(isinstance(each, Mapping) and _are_weighted(each) for each in delays.values())


def _are_weighted(given: Mapping[object, object]) -> bool:
    numbers = [*given.keys(), *given.values()]
    return bool(given) and all(is_finite(one) and one >= 0 for one in numbers) and 0 not in given.values()
