"""The compiler, as the control plane uses it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import fmean

from adaptra.cost import Case, CostModel
from adaptra.program import Program
from adaptra.remedies import Remedies
from adaptra.runtime.detector import Detection
from adaptra.runtime.plan import Edges, Plan


def nothing_helps(_case: Case, _program: Program, _spread: Edges, _rounded: Edges) -> None:
    """What is known where nobody looks for remedies."""


@dataclass(frozen=True, slots=True)
class Planning:
    """The compiler, as the controller uses it.

    Attributes:
        planner: The best program for a case, given the one that runs now. May raise an AdaptraError: the old plan is then kept.
        predict: The makespan of a program under a cost model; seconds.
        bound: What no program can beat in a case; seconds.
        remedies: What would relieve the edges whose bandwidth binds in a case, given its program and the edges that take the
            delegate or round already; see :func:`adaptra.remedies.find_remedies`.
        draft: As ``planner``, but sooner, for what is only suspected; by default the planner itself.
    """

    planner: Callable[[Case, Program], Program]
    predict: Callable[[Program, CostModel], float]
    bound: Callable[[Case], float]
    remedies: Callable[[Case, Program, Edges, Edges], Remedies | None] = nothing_helps
    draft: Callable[[Case, Program], Program] | None = None

    def find(self, case: Case, current: Program, is_draft: bool) -> Program:
        """The best program for a case that the time allows, without messages."""
        planner = self.draft if is_draft and self.draft is not None else self.planner
        return planner(case, current).compute_only()

    def expect(self, program: Program, detection: Detection) -> float:
        """The makespan of a program under what was detected: with lossy edges the mean over what their messages may meet."""
        if not detection.scenarios:
            return self.predict(program, detection.cost)
        weights = [scenario.weight for scenario in detection.scenarios]
        return fmean((self.predict(program, scenario.cost) for scenario in detection.scenarios), weights)

    def for_loss(self, detection: Detection, current: Plan, delegated: Edges) -> Plan:
        """The plan for lossy edges: made for a prompt, the mean or a late message, whichever is shortest on average.

        Its case has that one level, so nothing is planned for from message to message. A late message's level mostly wins: the
        more microbatches are in flight, the more of a stall passes unnoticed. There are several searches, so each is a draft's.
        """
        costs = dict.fromkeys((detection.cost, *(scenario.cost for scenario in detection.scenarios)))
        cases = [replace(current.case, cost=cost) for cost in costs]
        found = [(case, self.find(case, current.program, is_draft=True)) for case in cases]
        case, program = min(found, key=lambda pair: self.expect(pair[1], detection))
        predicted, bound = self.expect(program, detection), self.bound(case)
        return Plan(current.version, program, case, predicted, bound, detection.reason, delegated, current.rounded)
