"""The choice of roles for ranks, when some links between ranks are slower than others.

A step lasts as long as the slowest replica's pipeline plus the slowest averaging of gradients. A slow link hurts the
averaging in full; between two stages a schedule hides its latency. To compare assignments of ranks to roles, we plan for each
of their pipelines. Then we add what the rounds of the averaging take among the ranks that have copies of the same stages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from typing import Final

from adaptra.collectives.seconds import DIRECT, SumPlan
from adaptra.errors import CaseError
from adaptra.planning.layouts.layout_change import RoleChange
from adaptra.planning.limitation import EFFORT
from adaptra.planning.routes.steady_steps import timing_of
from adaptra.program.placement import in_turn
from adaptra.program.roles import Roles, moved
from adaptra.simulation.case import Case
from adaptra.simulation.cost import CostModel
from adaptra.simulation.links import Link

LEAST_GAIN: Final = 0.03
"""Fraction of a step that a change must save to be considered. The simulator is not more accurate than this."""


@dataclass(frozen=True, slots=True)
class StageLoad:
    """Gradients and state of one rank of a pipeline, of all its stages.

    Attributes:
        gradient_bytes: Bytes of gradients averaged with the other replicas after every step.
        state_bytes: Bytes that move with the role: parameters, buffers and the optimizer's state.
    """

    gradient_bytes: int
    state_bytes: int


@dataclass(frozen=True)
class JobModel:
    """The costs by which assignments of ranks to roles are compared.

    Attributes:
        cost: Durations and memory of the stages. Its edges are not used.
        microbatches: Microbatches per step.
        message_bytes: Per edge between two stages, the bytes that a microbatch sends forward and backward.
        loads: Gradients and state per rank of a pipeline.
        links: The link of every pair of ranks. A pair's smaller rank comes first.
        restart: Seconds that a change costs in addition to moving state.
        placement: The rank of each stage within its pipeline; stage i on rank i if empty.
        sums: How gradients are added up.
        barrier: Whether ranks meet between steps. Then a step of a pipeline costs its makespan, otherwise its period.
    """

    cost: CostModel
    microbatches: int
    message_bytes: Sequence[tuple[int, int]]
    loads: Sequence[StageLoad]
    links: Mapping[tuple[int, int], Link]
    restart: float = 0.0
    placement: tuple[int, ...] = ()
    sums: SumPlan = DIRECT
    barrier: bool = False

    def link(self, rank: int, other: int) -> Link:
        """Return the link between two ranks.

        Raises:
            CaseError: The link is not known.
        """
        pair = (min(rank, other), max(rank, other))
        if pair not in self.links:
            raise CaseError(f"links: none between ranks {pair[0]} and {pair[1]}: expected one for every pair of ranks")
        return self.links[pair]

    def pipeline(self, ranks: Sequence[int]) -> Case:
        """Return the planning problem of a pipeline of these ranks, in order. Stages of one rank have no link between them."""
        placement = self.placement or in_turn(self.cost.stages)
        links = [Link(0.0, 0.0) if one == other else self.link(ranks[one], ranks[other]) for one, other in pairwise(placement)]
        latency = tuple(link.latency for link in links)
        forward = tuple(sent * link.per_byte for (sent, _), link in zip(self.message_bytes, links, strict=True))
        backward = tuple(sent * link.per_byte for (_, sent), link in zip(self.message_bytes, links, strict=True))
        cost = replace(
            self.cost,
            latency_forward=latency,
            latency_backward=latency,
            occupancy_forward=forward,
            occupancy_backward=backward,
        )
        return Case(cost, self.microbatches, placement, "roles", self.barrier)

    def averaging(self, place: int, ranks: Sequence[int]) -> float:
        """Return the seconds that these ranks take to average the gradients of a pipeline's rank ``place``."""
        return self.sums.seconds(
            self.loads[place].gradient_bytes, len(ranks), lambda one, other: self.link(ranks[one], ranks[other])
        )

    def moving(self, before: Roles, after: Roles) -> float:
        """Return the seconds that a change of roles takes: the slowest transfer of state plus the restart."""
        if before == after:
            return 0.0
        links = {rank: self.link(rank, before.successor(rank, after)) for rank in moved(before, after)}
        handovers = [link.latency + self.loads[before.of(rank)[1]].state_bytes * link.per_byte for rank, link in links.items()]
        return self.restart + max(handovers)


def choose_roles(job: JobModel, before: Roles, horizon: int) -> RoleChange | None:
    """Find the change of roles with the largest net saving over ``horizon`` steps, the cost of the move subtracted.

    The search begins with the current roles and applies the best swap of two ranks until no swap saves more.

    Returns:
        The change, or None if no change saves time.
    """
    seconds = _step_seconds(job, before)
    best = RoleChange(before, before, seconds, seconds, 0.0, job.placement)
    while (better := _better_swap(job, best, horizon)) is not None:
        best = better
    return None if best.after == before else best


def _better_swap(job: JobModel, best: RoleChange, horizon: int) -> RoleChange | None:
    """Return ``best`` with the further swap of two ranks that saves most, or None if no swap increases the saving."""
    better, saved, before = None, best.saved(horizon), best.seconds_before
    for one, other in combinations(range(len(best.after.ranks)), 2):
        candidate = best.after.swapped(one, other)
        moving = job.moving(best.before, candidate)
        # Bounds cost next to nothing, and for most swaps even the saving by the bound is too small.
        bound = replace(best, after=candidate, seconds_after=_least_seconds(job, candidate), moving=moving)
        if bound.saved(horizon) <= saved:
            continue
        change = replace(bound, seconds_after=_step_seconds(job, candidate))
        if change.saved(horizon) > saved and change.seconds_after < (1 - LEAST_GAIN) * before:
            better, saved = change, change.saved(horizon)
    return better


def _averaging(job: JobModel, roles: Roles) -> float:
    return max(job.averaging(place, roles.column(place)) for place in range(roles.stages))


def _least_seconds(job: JobModel, roles: Roles) -> float:
    """Return a lower bound of the step's seconds with these roles."""
    pipelines = [job.pipeline(roles.pipeline(replica)) for replica in range(roles.replicas)]
    timing = timing_of(barrier=job.barrier)
    return max(timing.bound(case) for case in pipelines) + _averaging(job, roles)


def _step_seconds(job: JobModel, roles: Roles) -> float:
    pipelines = {job.pipeline(roles.pipeline(replica)) for replica in range(roles.replicas)}
    timing = timing_of(barrier=job.barrier)
    return max(timing.of(timing.plan(case, effort=EFFORT), case.cost) for case in pipelines) + _averaging(job, roles)
