"""Resilience: what a job still does with each number of lost workers.

Losses are where they cost least, since workers change stages for that. So the number of losses says enough, and a plan is made
once for each.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Final

from adaptra.errors import CaseError
from adaptra.planning.responses.normalize import normalized, stage_work
from adaptra.planning.responses.responses import Decision, ResponsePrices, decide
from adaptra.simulation.case import Case

_PLAN_EACH: Final = 2_000
"""The most workers with which each number of losses is planned. With more, a plan stands for up to half as many."""


@dataclass(frozen=True)
class Resilience:
    """Decisions by the number of lost workers.

    Attributes:
        case: The case. Which workers it has lost does not matter here.
        prices: What responses cost.
        effort, budget: Effort or seconds of the search for each plan.
    """

    case: Case
    prices: ResponsePrices
    effort: int | None = None
    budget: float | None = None
    _decisions: dict[int, Decision] = field(default_factory=dict[int, Decision], repr=False, compare=False)

    @property
    def most(self) -> int:
        """The most losses that leave a worker on each stage."""
        return self.case.workers - self.case.stages

    def decision(self, number: int) -> Decision:
        """Return the decision for a number of lost workers, planned once.

        With thousands of workers the plan for twice as many may stand for a number, if no worker has more to do then.

        Raises:
            CaseError: So many losses leave a stage without a worker.
        """
        if not 0 <= number <= self.most:
            stages = self.case.stages
            raise CaseError(
                f"{number} lost workers: expected 0..{self.most}, so that a worker lives on each of {stages} stages"
            )
        planned = self._planned(number)
        if planned not in self._decisions:
            case = with_losses(self.case, planned)
            self._decisions[planned] = decide(case, self.prices, effort=self.effort, budget=self.budget)
        return self._decisions[planned]

    def throughput(self, number: int) -> float:
        """Return the throughput with so many lost workers as a fraction of the healthy one; 0 if a stage has no worker."""
        if number > self.most:
            return 0.0
        found = self.decision(number)
        return found.healthy_period / found.last.period if found.last.period else 0.0

    def rows(self, most: int) -> Iterator[dict[str, Any]]:
        """Yield the figures for 0 to ``most`` lost workers as JSON values."""
        for number in range(most + 1):
            decision = self.decision(number)
            losses = normalized(self.case, number)
            healthy, period = decision.healthy_period, decision.last.period
            limit = healthy * self.case.workers / (self.case.workers - number)
            yield {
                "lost": number,
                "losses": list(losses),
                "period": period,
                "work_bound": self._work(number),
                "healthy_period": healthy,
                "fault_scaled_period": limit,
                "of_limit": limit / period if period else None,
                "1f1b_period": decision.one_f_one_b,
                "held": decision.last.held,
                "decision": str(decision),
            }

    def _planned(self, number: int) -> int:
        """Return the number of losses whose plan stands for this one: at most twice as many, and no more work."""
        if self.case.workers <= _PLAN_EACH or not number:
            return number
        last, work = min(1 << (number - 1).bit_length(), self.most), self._work(number)
        return bisect_right(range(number, last + 1), work, key=self._work) + number - 1

    def _work(self, number: int) -> float:
        return max(stage_work(self.case, *one) for one in enumerate(normalized(self.case, number)))


def with_losses(case: Case, number: int) -> Case:
    """Return the case with so many lost workers, on the stages where they cost least, each in another replica if possible."""
    lost: set[int] = set()
    for stage, losses in enumerate(normalized(case, number)):
        lost |= {case.worker((len(lost) + index) % case.replicas, stage) for index in range(losses)}
    return replace(case, lost=frozenset(lost))
