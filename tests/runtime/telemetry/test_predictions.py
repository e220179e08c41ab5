"""The predicted time of a step is that of the plan under which it runs."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from controller_world import plan_zero

from adaptra.runtime.control.plans.events import ControlEvent, EventKind
from adaptra.runtime.control.plans.plan import Plan
from adaptra.runtime.telemetry.rank import RankTelemetry


class Recorded:
    """A rank whose records go nowhere."""

    def __init__(self) -> None:
        nowhere: Any = SimpleNamespace(record=lambda _: None, follows_steps=False)
        transport: Any = SimpleNamespace(worker_of=lambda rank: rank)
        self.rank = RankTelemetry(0, "run", nowhere, transport, None, lambda *_: None)
        self.old = replace(plan_zero(), predicted=0.1)
        self.rank.started(self.old)
        self.rank.begin_step(0, self.old)

    def tell(self, kind: EventKind, version: int, before: float | None, text: str = "edge 0→1 slow") -> float:
        self.rank.event(ControlEvent(kind, 0, 5, version, text, 0.2, before))
        return self.rank._predicted

    def run(self, plan: Plan) -> float:
        self.rank.begin_step(6, plan)
        return self.rank._predicted


def test_it_changes_in_the_step_in_which_the_plan_runs() -> None:
    """A round that begins after a plan was agreed on is about that plan, which runs a step or two later."""
    of = Recorded()
    assert of.tell(EventKind.PROPOSED, 1, 0.4) == 0.4, "the running plan, over the slow link"
    assert of.tell(EventKind.AGREED, 1, 0.4) == 0.4
    assert of.tell(EventKind.KEPT, 1, 0.21) == 0.4, "of plan 1, which does not run yet"
    assert of.run(of.old) == 0.4
    assert of.run(replace(of.old, version=1, predicted=0.2)) == pytest.approx(0.21)
    assert of.tell(EventKind.KEPT, 1, 0.22) == 0.22


def test_a_suspicion_that_is_withdrawn_leaves_the_prediction() -> None:
    of = Recorded()
    assert of.tell(EventKind.PROPOSED, 1, 0.4, "in case of edge 0→1 slow") == 0.4
    assert of.tell(EventKind.WITHDRAWN, 1, None) == 0.1
