"""Which ranks should change roles, when some links between them are slower than others.

A step takes as long as the slowest replica's pipeline and then the slowest averaging of a stage's gradients. A slow link costs
least where it carries least, or between two stages, where a plan hides its latency; averaging hides nothing. So assignments of
ranks to roles are compared by planning for each of their pipelines, and by what averaging takes on a ring of a stage's ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from typing import Final

from adaptra.errors import CaseError
from adaptra.planning.layout_change import RoleChange
from adaptra.planning.limitation import EFFORT
from adaptra.planning.planner import plan
from adaptra.program.roles import Roles, moved
from adaptra.simulation.cost import Case, CostModel
from adaptra.simulation.links import Link
from adaptra.simulation.simulate import lower_bound, simulate

LEAST_GAIN: Final = 0.03
"""The part of a step that a change must save to be worth a thought; the simulator is not better than that."""


@dataclass(frozen=True, slots=True)
class StageLoad:
    """What a stage brings to its rank.

    Attributes:
        gradient_bytes: Averaged with the other replicas after every step.
        gradients: In so many tensors.
        state_bytes: What moves with the stage: parameters, buffers and the optimizer's state.
    """

    gradient_bytes: int
    gradients: int
    state_bytes: int


@dataclass(frozen=True)
class JobModel:
    """What an assignment is judged by.

    Attributes:
        cost: Durations and memory of the stages; its links don't matter.
        microbatches: Microbatches per step.
        message_bytes: Per edge between two stages, what a microbatch sends forward and backward.
        loads: One per stage.
        links: By pair of ranks, the smaller first; of every pair.
        restart: What a change costs besides moving state, seconds.
    """

    cost: CostModel
    microbatches: int
    message_bytes: Sequence[tuple[int, int]]
    loads: Sequence[StageLoad]
    links: Mapping[tuple[int, int], Link]
    restart: float = 0.0

    def link(self, one: int, other: int) -> Link:
        """The link between two ranks.

        Raises:
            CaseError: It is not known.
        """
        pair = (min(one, other), max(one, other))
        if pair not in self.links:
            raise CaseError(f"links: none between ranks {pair[0]} and {pair[1]}: expected one for every pair of ranks")
        return self.links[pair]

    def pipeline(self, ranks: Sequence[int]) -> Case:
        """The planning problem of a pipeline on these ranks, by stage."""
        links = [self.link(*pair) for pair in pairwise(ranks)]
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
        return Case(cost, self.microbatches, tuple(range(cost.stages)), "roles")

    def averaging(self, stage: int, ranks: Sequence[int]) -> float:
        """Seconds that averaging the stage's gradients takes on a ring of these ranks.

        Each tensor goes round twice, once to be summed and once to be told, a part of it on every link at a time; a round is as
        fast as its slowest link.
        """
        count, load = len(ranks), self.loads[stage]
        ring = [self.link(*pair) for pair in zip(ranks, (*ranks[1:], ranks[0]), strict=True)] if count > 1 else []
        rounds = [load.gradients * link.latency + load.gradient_bytes / count * link.per_byte for link in ring]
        return 2 * (count - 1) * max(rounds, default=0.0)

    def moving(self, before: Roles, after: Roles) -> float:
        """Seconds that a change of roles takes: the slowest handover, and the new pipelines' start."""
        if before == after:
            return 0.0
        links = {rank: self.link(rank, before.successor(rank, after)) for rank in moved(before, after)}
        handovers = [link.latency + self.loads[before.of(rank)[1]].state_bytes * link.per_byte for rank, link in links.items()]
        return self.restart + max(handovers)


def choose_roles(job: JobModel, before: Roles, horizon: int) -> RoleChange | None:
    """The change of roles that saves most over ``horizon`` steps, what moving costs taken off; None if none does.

    From the roles as they are, the best swap of two ranks is taken, and again from there, until no swap saves more.
    """
    seconds = _step_seconds(job, before)
    best = RoleChange(before, before, seconds, seconds, 0.0)
    while (better := _better_swap(job, best, horizon)) is not None:
        best = better
    return None if best.after == before else best


def _better_swap(job: JobModel, best: RoleChange, horizon: int) -> RoleChange | None:
    """Of all swaps of two more ranks the one that saves most, if that is more than without it."""
    found, saved, before = None, best.saved(horizon), best.seconds_before
    for one, other in combinations(range(len(best.after.ranks)), 2):
        candidate = best.after.swapped(one, other)
        moving = job.moving(best.before, candidate)
        # What the bounds promise is too little already for most swaps, and bounds cost next to nothing.
        if RoleChange(best.before, candidate, before, _least_seconds(job, candidate), moving).saved(horizon) <= saved:
            continue
        change = RoleChange(best.before, candidate, before, _step_seconds(job, candidate), moving)
        if change.saved(horizon) > saved and change.seconds_after < (1 - LEAST_GAIN) * before:
            found, saved = change, change.saved(horizon)
    return found


def _averaging(job: JobModel, roles: Roles) -> float:
    return max(job.averaging(stage, roles.column(stage)) for stage in range(roles.stages))


def _least_seconds(job: JobModel, roles: Roles) -> float:
    """What no plans beat."""
    pipelines = [job.pipeline(roles.pipeline(replica)) for replica in range(roles.replicas)]
    return max(lower_bound(case).value for case in pipelines) + _averaging(job, roles)


def _step_seconds(job: JobModel, roles: Roles) -> float:
    pipelines = {job.pipeline(roles.pipeline(replica)) for replica in range(roles.replicas)}
    return max(simulate(plan(case, effort=EFFORT), case.cost).makespan for case in pipelines) + _averaging(job, roles)
