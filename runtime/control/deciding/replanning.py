"""The compiler, as the control plane uses it. One pipeline is a job of one replica, with remedies of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Final

from adaptra.errors import PlanError
from adaptra.passes.insert_comm import Channel
from adaptra.planning.remedies.bandwidth_remedies import BFLOAT16_SHARE, Remedies, Remedy, needed_rounding
from adaptra.planning.remedies.job_remedies import JobRemedy, compare_remedies
from adaptra.planning.routes.joined_programs import crossed_replicas, join, order_of_replica
from adaptra.planning.routes.measured_jobs import UpdateSeconds, measured_case
from adaptra.planning.routes.steady_steps import timing_of
from adaptra.program import Program
from adaptra.program.placement import Edge
from adaptra.program.routing import Grid, Routing
from adaptra.runtime.control.plans.plan import MAX_REASON, Edges, Plan
from adaptra.runtime.detection.detector import Detection
from adaptra.runtime.detection.step_noise import steps_until_sure
from adaptra.simulation.case import Case
from adaptra.simulation.cost import CostModel
from adaptra.simulation.job import alike_case
from adaptra.simulation.simulate import simulate, verify_whole
from adaptra.sizes import size_text

LONGEST_SEARCH: Final = 0.2
"""Seconds of the longest search for remedies of several replicas: with more, it finds hardly any better ones."""

DRAFT: Final = 0.25
"""The part of such a search's seconds for a suspicion, since all ranks must be ready before the next step ends."""


def nothing_helps(_case: Case, _program: Program, _spread: Edges, _rounded: Edges) -> None:
    """No remedies, where nobody looks for them."""


def step_seconds(program: Program, cost: CostModel, *, barrier: bool) -> float:
    """Return the predicted time of a step, in the unit of the cost model.

    Behind a barrier that is the makespan of one pipeline, otherwise the period of steps in a row.
    """
    if program.is_one_pipeline:
        return timing_of(barrier=barrier).of(program, cost)
    return simulate(program, replace(alike_case(program, cost), barrier=barrier)).period


def step_bound(case: Case) -> float:
    """Return a time that no program of a case is below: of the makespan behind a barrier, otherwise of the period."""
    return timing_of(barrier=case.barrier).bound(case)


def nothing_ahead(_program: Program, _cost: CostModel) -> Mapping[Channel, int]:
    """No receives posted ahead, where nobody lowers programs."""
    return {}


@dataclass(frozen=True, slots=True)
class Planning:
    """The compiler, as the controller uses it.

    Plans have a program of one pipeline, if all replicas run the same, or of all replicas.

    Attributes:
        planner: The best program of one pipeline for a case, given the one that runs now. May raise an AdaptraError: the old
            plan is then kept. Several replicas are planned as a whole.
        remedies: Relief for the edges whose bandwidth binds in a case, given its program and the edges that already take the
            delegate or round; see :func:`adaptra.planning.remedies.bandwidth_remedies.find_remedies`.
        draft: As ``planner``, but sooner, for what is only suspected; by default the planner itself.
        ahead_of_need: How many messages ahead of need the receives of each channel are posted when a program is lowered for a
            cost model; see :meth:`adaptra.passes.insert_comm.InsertComm.ahead_of_need`.
        activation_bytes: The most bytes of activations on each rank at a time under a program, where they are known.
        fills_free: Whether the limits of memory are what the devices have free, as the user gave none. A plan's reason then
            says how much of that it uses.
        replicas: The number of replicas that are planned together.
        seconds: The longest search for remedies of several replicas, in seconds, at most :data:`LONGEST_SEARCH`.
        changing: The stages whose forwards change buffers, which workers hand over.
        at_home: The stages whose microbatches no other replica's worker may compute.
        guests: The workers that compute nothing, as their processes compute for other replicas.
    """

    planner: Callable[[Case, Program], Program]
    remedies: Callable[[Case, Program, Edges, Edges], Remedies | None] = nothing_helps
    draft: Callable[[Case, Program], Program] | None = None
    ahead_of_need: Callable[[Program, CostModel], Mapping[Channel, int]] = nothing_ahead
    activation_bytes: Callable[[Program], tuple[int, ...]] | None = None
    fills_free: bool = False
    replicas: int = 1
    seconds: float = LONGEST_SEARCH
    changing: frozenset[int] = frozenset()
    at_home: frozenset[int] = frozenset()
    guests: frozenset[int] = frozenset()

    def workers(self, case: Case) -> Grid:
        """Return the workers of each stage by replica."""
        return Routing.at_home(case.placement, self.replicas, case.microbatches).workers

    def check(self, program: Program) -> None:
        """Refuse a program that workers of these stages can't execute.

        Raises:
            ScheduleError: As :func:`adaptra.program.verify.verify`.
            PlanError: A microbatch leaves a stage of :attr:`at_home`.
        """
        verify_whole(program, changing=self.changing)
        for replica, row in enumerate(program.routing.workers):
            for stage in sorted(self.at_home):
                away = [one for one in range(program.microbatches) if program.holder(replica, stage, one) != row[stage]]
                if away:
                    raise PlanError(
                        f"microbatch {away[0]} of replica {replica} leaves stage {stage}: expected it to stay at home"
                    )

    def plan_for(self, detection: Detection, current: Plan, delegated: Edges, is_draft: bool) -> tuple[Plan, Remedies | None]:
        """The best plan for what was detected that the time allows, and what would relieve edges whose bandwidth binds.

        Edges that round and would not bind as they are become exact again; where rounding is allowed and wins, it is part of
        the plan. The plan has the version of the running one. Of several replicas it is the best of: keep, reorder, share,
        detour.

        Args:
            detection: What holds now.
            current: The plan that runs.
            delegated: The edges that take the delegate under the new plan. Of several replicas, further edges keep it as long
                as one needs it, and edges don't need it whose slow links no route takes.
            is_draft: Whether there is time for a quick search only, and none for remedies.
        """
        if self.replicas > 1:
            return self._plan_together(detection, current, delegated, is_draft), None
        rounded = needed_rounding(replace(current.case, cost=detection.cost), current.rounded)
        needless = tuple(edge for edge in current.rounded if edge not in rounded)
        detection = detection.with_occupancies(needless, 1 / BFLOAT16_SHARE)
        case, program = self._search(detection, current, is_draft)
        reason, remedies = detection.reason, None if is_draft else self.remedies(case, program, delegated, rounded)
        rounding = None if remedies is None else remedies.best(Remedy.ROUNDING)
        if remedies is not None and rounding is not None:
            exact = tuple(edge for edge in remedies.edges if edge not in rounded)
            detection, rounded = detection.with_occupancies(exact, BFLOAT16_SHARE), tuple(sorted({*rounded, *exact}))
            case, program, reason = replace(case, cost=rounding.cost), rounding.program, f"{reason}; {rounding.change}"
        predicted, bound = self.expect(program, detection), step_bound(case)
        reason = (reason + self._room_used(program, current.program))[:MAX_REASON]
        return Plan(current.version, program, case, predicted, bound, reason, delegated, rounded), remedies

    def expect(self, program: Program, detection: Detection) -> float:
        """The seconds of a step of a program under the detected costs; with lossy edges the mean over their scenarios.

        They are the makespan if ranks meet between steps, otherwise the period.
        """
        barrier = detection.barrier
        if self.replicas > 1:
            case = self._together(detection, Case(detection.cost, program.microbatches, program.placement))
            return simulate(self._joined(program), case).period
        if not detection.scenarios:
            return step_seconds(program, detection.cost, barrier=barrier)
        weights = [scenario.weight for scenario in detection.scenarios]
        times = (step_seconds(program, scenario.cost, barrier=barrier) for scenario in detection.scenarios)
        return fmean(times, weights)

    def lowered_anew(self, current: Plan, detection: Detection, delegated: Edges | None = None) -> Plan | None:
        """The running program with its receives posted in time for the detected costs, and its slow edges on the delegate.

        Where a barrier came or went, it is planned anew with the seconds of a step that hold now.

        Receives count as posted in time if late ones may cost less than steps scatter by themselves. A late receive delays its
        message by a latency at most. All of them cost no more than the step has become longer.

        Args:
            current: The plan that runs.
            detection: What holds now.
            delegated: The edges that take the delegate under the new plan, as in :meth:`plan_for`; None for the present ones.

        Returns:
            The plan, or None if nothing of it would change.
        """
        case = replace(current.case, cost=detection.cost, barrier=detection.barrier)
        edges, moved = current.delegated if delegated is None else self._taken(current, detection, delegated), ""
        if edges != current.delegated:
            moved = f"; {_moved_text(current.delegated, edges)}"
        if detection.barrier != current.case.barrier:
            how = "the same order"
        elif self._has_late_receives(current, detection):
            how = "the same order, receives sooner"
        elif moved:
            how = "the same order"
        else:
            return None
        predicted, reason = self.expect(current.program, detection), f"{detection.reason}; {how}{moved}"[:MAX_REASON]
        return replace(current, case=case, predicted=predicted, bound=step_bound(case), reason=reason, delegated=edges)

    def _has_late_receives(self, current: Plan, detection: Detection) -> bool:
        """Return True if the running program's receives are posted too late for the detected costs, and that may be noticed."""
        before = self.ahead_of_need(current.program, current.case.cost)
        now = self.ahead_of_need(current.program, detection.cost)
        if all(count <= before[channel] for channel, count in now.items()):
            return False
        before_now = step_seconds(current.program, current.case.cost, barrier=detection.barrier)
        longer = self.expect(current.program, detection) - before_now
        return steps_until_sure(max(longer, _added_latency(current.case.cost, detection.cost)), detection.noise) == 0

    def _taken(self, current: Plan, detection: Detection, delegated: Edges) -> Edges:
        """Return the edges that take the delegate, of those asked for, if the running program stays."""
        if self.replicas == 1:
            return delegated
        return _needed(self._joined(current.program), self._together(detection, current.case), delegated, current.delegated)

    def _search(self, detection: Detection, current: Plan, is_draft: bool) -> tuple[Case, Program]:
        """Return the case that was planned for, and the best program without messages.

        With lossy edges there is a search for each scenario and one for the mean, and the program with the shortest mean step
        wins. Mostly that is the one for late messages: more microbatches in flight hide more of a stall. Each of these searches
        is as short as a draft's.
        """
        costs = dict.fromkeys((detection.cost, *(scenario.cost for scenario in detection.scenarios)))
        planner = self.draft if self.draft is not None and (is_draft or len(costs) > 1) else self.planner
        cases = [replace(current.case, cost=cost, barrier=detection.barrier) for cost in costs]
        found = [(case, planner(case, current.program).compute_only()) for case in cases]
        return min(found, key=lambda pair: self.expect(pair[1], detection))

    def _plan_together(self, detection: Detection, current: Plan, delegated: Edges, is_draft: bool) -> Plan:
        """Return the best plan of several replicas."""
        running = self._joined(current.program)
        case = self._with_room_for(running, self._together(detection, current.case))
        budget = min(self.seconds, LONGEST_SEARCH) * (DRAFT if is_draft else 1.0)
        compared = compare_remedies(case, running, budget=budget)
        best = compared.best
        is_kept = best.kind is JobRemedy.KEEP
        program = current.program if is_kept else _as_one_pipeline(best.program)
        delegated = _needed(best.program, case, delegated, current.delegated)
        moved = _moved_text(current.delegated, delegated)
        what = f"{best.what}; {moved}" if moved else best.what
        used = self._room_used(program, current.program)
        reason = f"{detection.reason}; {what}{used}; {compared}"[:MAX_REASON]
        planned = replace(current.case, cost=detection.cost, barrier=detection.barrier)
        remedy = current.remedy if is_kept else best.kind
        return Plan(current.version, program, planned, best.period, best.bound, reason, delegated, remedy=remedy)

    def _room_used(self, program: Program, running: Program) -> str:
        """Return the end of a reason that says by how much a rank keeps more than now, since its device has room for it."""
        if not self.fills_free or self.activation_bytes is None:
            return ""
        before, after = self.activation_bytes(running), self.activation_bytes(program)
        if len(before) != len(after):
            return ""
        _, rank = max((now - was, rank) for rank, (was, now) in enumerate(zip(before, after, strict=True)))
        if after[rank] <= before[rank]:
            return ""
        now, was = size_text(after[rank]), size_text(before[rank])
        return f"; the devices have room: activations of up to {now} on rank {rank} instead of {was}"

    def _together(self, detection: Detection, case: Case) -> Case:
        """Return the job's case: the costs of each replica, and the memory of its ranks in microbatches."""
        costs = detection.by_replica or (detection.cost,) * self.replicas
        steps = tuple(map(median, zip(*(cost.update for cost in costs), strict=True)))  # with REDUCE, as it is measured
        memory = case.of_replicas(self.replicas).memory
        updates = UpdateSeconds(steps, (0.0,) * case.stages, barrier=detection.barrier)
        measured = measured_case(costs, case.microbatches, updates, placement=case.placement, memory=memory)
        return replace(measured, changing=self.changing, at_home=self.at_home, guests=self.guests)

    def _with_room_for(self, running: Program, case: Case) -> Case:
        """Return the case with room for what runs. A limit in bytes allows more than as many whole microbatches."""
        if case.memory is None:
            return case
        held = simulate(running, case).held
        by_rank = (max(held[rank :: case.ranks]) for rank in range(case.ranks))
        return replace(case, memory=tuple(map(max, case.memory, by_rank)))

    def _joined(self, program: Program) -> Program:
        return join([program] * self.replicas) if program.is_one_pipeline else program


def _slow_links(case: Case, edge: Edge) -> set[tuple[int, int]]:
    """Return the links of replicas over which messages of an edge of stages take longer than in others."""
    links = ((case.worker(replica, edge[0]), case.worker(replica, edge[1])) for replica in range(case.replicas))
    return case.links.keys() & set(links)


def _takes_slow_links(program: Program, case: Case, edge: Edge) -> bool:
    """Return whether a route takes one of these links, or all replicas are alike."""
    slow = _slow_links(case, edge)
    return not slow or any((route.workers[edge[0]], route.workers[edge[1]]) in slow for route in program.routing.routes)


def _needed(program: Program, case: Case, asked: Edges, taken: Edges) -> Edges:
    """Return the edges that need the delegate: of those asked for, those with a slow link that a route takes.

    Those that take it now keep it as long as one of their links is slow.
    """
    needed = {edge for edge in asked if edge in taken or _takes_slow_links(program, case, edge)}
    return tuple(sorted(needed | {edge for edge in taken if _slow_links(case, edge)}))


def _moved_text(before: Edges, now: Edges) -> str:
    """Return the edges that move to the delegate and those that leave it, in words; empty if none does."""
    changes = [("take", sorted(set(now) - set(before))), ("leave", sorted(set(before) - set(now)))]
    return "; ".join(
        f"edges that {how} the delegate: {', '.join(f'{source}→{to}' for source, to in edges)}"
        for how, edges in changes
        if edges
    )


def _as_one_pipeline(program: Program) -> Program:
    """Return the program of one pipeline if all replicas run the same, each its own microbatches; else the given one."""
    if crossed_replicas(program.routing):
        return program
    orders = [order_of_replica(program, replica) for replica in range(program.replicas)]
    return orders[0] if all(one.orders == orders[0].orders for one in orders) else program


def _added_latency(before: CostModel, now: CostModel) -> float:
    """The largest growth of an edge's latency, in the unit of the cost models."""
    pairs = zip((*before.latency_forward, *before.latency_backward), (*now.latency_forward, *now.latency_backward), strict=True)
    return max((later - earlier for earlier, later in pairs), default=0.0)
