"""The plan of several replicas beside others for the same case: healthy, with nothing shared, in blocks or in turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from adaptra.errors import PlanError
from adaptra.planning.routes.job_planner import plan_job
from adaptra.planning.routes.route import share_evenly
from adaptra.program import Program
from adaptra.simulation.case import Case
from adaptra.simulation.simulate import Simulation, simulate

COMPARED: Final = {
    "healthy": "no worker is lost or slow",
    "kept": "slow workers keep all their microbatches, only those of lost ones are shared",
    "blocks": "workers give microbatches of the middle of the step, in contiguous blocks",
    "turns": "workers give microbatches in turns, as ReCycle does",
}
"""The plans to compare with, and what each of them is."""


def compare_job(
    case: Case, names: Sequence[str], adapted: Program, *, budget: float | None = None
) -> tuple[tuple[str, Simulation], ...]:
    """Return (name, simulated program) of the named plans, and at the end of the plan ``adapted`` itself.

    Args:
        case: The case.
        names: Some of :data:`COMPARED`.
        adapted: The plan to compare.
        budget: Seconds to search each plan, as of :func:`adaptra.planning.routes.job_planner.plan_job`.

    Raises:
        PlanError: A name is unknown.
    """
    for name in names:
        if name not in COMPARED:
            raise PlanError(f"compare {name!r} for several replicas: expected some of {', '.join(COMPARED)}")
    found: list[tuple[str, Simulation]] = []
    for name in dict.fromkeys(names):
        here = replace(case, lost=frozenset(), slow={}) if name == "healthy" else case
        equal = replace(case, slow={}, ports={}) if name == "kept" else here
        routing = None if name == "healthy" else share_evenly(equal, in_turns=name == "turns")
        program = replace(plan_job(here, budget=budget, routing=routing), name=name)
        found.append((name, simulate(program, here)))
    return (*found, (adapted.name, simulate(adapted, case)))
