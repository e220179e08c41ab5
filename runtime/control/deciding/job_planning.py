"""The compiler as the control plane of a job of several replicas uses it: shares and detours are among its plans."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from adaptra.errors import PlanError
from adaptra.planning.remedies.bandwidth_remedies import Remedies
from adaptra.planning.remedies.job_remedies import JobRemedy, compare_remedies
from adaptra.planning.routes.joined_programs import crossed_replicas, join, order_of_replica
from adaptra.planning.routes.measured_jobs import UpdateSeconds, measured_case
from adaptra.program import Program
from adaptra.program.placement import Edge
from adaptra.program.routing import Grid, Routing
from adaptra.program.verify import verify
from adaptra.runtime.control.deciding.replanning import Planning
from adaptra.runtime.control.plans.plan import MAX_REASON, Edges, Plan
from adaptra.runtime.detection.detector import Detection
from adaptra.simulation.case import Case
from adaptra.simulation.simulate import simulate

LONGEST_SEARCH: Final = 0.2
"""Seconds of the longest search for remedies: with more, it finds hardly any better ones."""

DRAFT: Final = 0.25
"""The part of a search's seconds for a suspicion, since all ranks must be ready before the next step ends."""


@dataclass(frozen=True, slots=True)
class JobPlanning(Planning):
    """The compiler of a job. Its plans have a program of one pipeline, if all replicas run the same, or of all replicas.

    Attributes:
        ranks: The number of workers of a replica.
        seconds: The longest search, in seconds, at most :data:`LONGEST_SEARCH`.
        changing: The stages whose forwards change buffers, which workers hand over.
        at_home: The stages whose microbatches no other replica's worker may compute.
    """

    ranks: int = 1
    seconds: float = LONGEST_SEARCH
    changing: frozenset[int] = frozenset()
    at_home: frozenset[int] = frozenset()

    def workers(self, case: Case) -> Grid:
        """Return the workers of each stage by replica."""
        return Routing.at_home(case.placement, self.replicas, case.microbatches).workers

    def check(self, program: Program) -> None:
        """Refuse a program that workers of these stages can't execute; raises a PlanError too, see :meth:`Planning.check`."""
        verify(program, changing=self.changing)
        for replica, row in enumerate(program.routing.workers):
            for stage in sorted(self.at_home):
                away = [one for one in range(program.microbatches) if program.holder(replica, stage, one) != row[stage]]
                if away:
                    raise PlanError(
                        f"microbatch {away[0]} of replica {replica} leaves stage {stage}: expected it to stay at home"
                    )

    def plan_for(self, detection: Detection, current: Plan, delegated: Edges, is_draft: bool) -> tuple[Plan, Remedies | None]:
        """The best of all remedies for what was detected: keep, reorder, share, detour.

        Args:
            detection: What holds now.
            current: The plan that runs.
            delegated: The edges that take the delegate under the new plan. Further edges keep it as long as one replica needs
                it, and edges don't need it whose slow links no route takes.
            is_draft: Whether there is time for a quick search only.
        """
        running = self._of_job(current.program)
        case = self._with_room_for(running, self._case(detection, current.case))
        budget = min(self.seconds, LONGEST_SEARCH) * (DRAFT if is_draft else 1.0)
        compared = compare_remedies(case, running, budget=budget)
        best = compared.best
        is_kept = best.kind is JobRemedy.KEEP
        program = current.program if is_kept else _as_one_pipeline(best.program)
        asked = {edge for edge in delegated if edge in current.delegated or _takes_slow_links(best.program, case, edge)}
        delegated = tuple(sorted(asked | {edge for edge in current.delegated if _slow_links(case, edge)}))
        moved = ", ".join(f"{source}→{to}" for source, to in delegated if (source, to) not in current.delegated)
        what = f"{best.what}; edges that take the delegate: {moved}" if moved else best.what
        reason = f"{detection.reason}; {what}; {compared}"[:MAX_REASON]
        planned = replace(current.case, cost=detection.cost, barrier=detection.barrier)
        remedy = current.remedy if is_kept else best.kind
        return Plan(current.version, program, planned, best.period, best.bound, reason, delegated, remedy=remedy), None

    def expect(self, program: Program, detection: Detection) -> float:
        """The period of a program under the detected costs of all replicas."""
        case = self._case(detection, Case(detection.cost, program.microbatches, program.placement))
        return simulate(self._of_job(program), case).period

    def _case(self, detection: Detection, case: Case) -> Case:
        """Return the job's case: the costs of each replica, and the memory of its ranks in microbatches."""
        costs = detection.by_replica or (detection.cost,) * self.replicas
        nothing = (0.0,) * case.cost.stages
        memory = case.of_replicas(self.replicas).memory
        updates = UpdateSeconds(nothing, nothing, barrier=detection.barrier)
        measured = measured_case(costs, case.microbatches, updates, placement=case.placement, memory=memory)
        return replace(measured, changing=self.changing, at_home=self.at_home)

    def _with_room_for(self, running: Program, case: Case) -> Case:
        """Return the case with room for what runs. A limit in bytes allows more than as many whole microbatches."""
        if case.memory is None:
            return case
        held = simulate(running, case).held
        by_rank = (max(held[rank :: self.ranks]) for rank in range(self.ranks))
        return replace(case, memory=tuple(map(max, case.memory, by_rank)))

    def _of_job(self, program: Program) -> Program:
        return join([program] * self.replicas) if program.is_one_pipeline else program


def _slow_links(case: Case, edge: Edge) -> set[tuple[int, int]]:
    """Return the links of replicas over which messages of an edge of stages take longer than in others."""
    links = ((case.worker(replica, edge[0]), case.worker(replica, edge[1])) for replica in range(case.replicas))
    return case.links.keys() & set(links)


def _takes_slow_links(program: Program, case: Case, edge: Edge) -> bool:
    """Return whether a route takes one of these links, or all replicas are alike."""
    slow = _slow_links(case, edge)
    return not slow or any((route.workers[edge[0]], route.workers[edge[1]]) in slow for route in program.routing.routes)


def _as_one_pipeline(program: Program) -> Program:
    """Return the program of one pipeline if all replicas run the same, each its own microbatches; else the given one."""
    if crossed_replicas(program.routing):
        return program
    orders = [order_of_replica(program, replica) for replica in range(program.replicas)]
    return orders[0] if all(one.orders == orders[0].orders for one in orders) else program
