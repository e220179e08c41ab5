"""Agreement on a role change or a cut change between two steps: all ranks measure, rank 0 chooses, and all apply its choice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import median
from typing import Final

import torch
from torch.distributed import ProcessGroup

from adaptra.collectives.seconds import SumPlan
from adaptra.graph.ops.specs import tensor_bytes
from adaptra.graph.stages.stages import TrainStage
from adaptra.planning.layouts.choose_roles import JobModel, StageLoad, choose_roles
from adaptra.planning.layouts.layout_change import RoleChange, SplitChange
from adaptra.program.placement import stages_of
from adaptra.program.roles import Roles
from adaptra.runtime.detection.job_detector import MEASURED
from adaptra.runtime.exchange.state_transfer import VALUE, Handover
from adaptra.runtime.measuring.measurement import StageMeasurement
from adaptra.runtime.transports.link_probe import measure_links
from adaptra.simulation.case import Case
from adaptra.simulation.cost import CostModel
from adaptra.simulation.cut_points import CutPoint, CutPoints, positions_of

RESTART_SECONDS: Final = 1.0
"""Seconds of a change besides the state transfer: ending the workers, starting others, and calibrating again."""


def agree_on_roles(
    group: ProcessGroup,
    roles: Roles,
    stages: Sequence[TrainStage],
    case: Case,
    measured: Sequence[StageMeasurement],
    held: Handover,
    horizon: int,
    sums: SumPlan,
) -> RoleChange | None:
    """Choose a role change that saves time, the same on every rank. All ranks of the job call it.

    Args:
        group: All ranks of the job, by rank.
        roles: The present roles.
        stages: The stages' graphs, which give the size of each message.
        case: The first plan's case: memory, and the shares of I and W where only B ran.
        measured: The measurements of this rank's stages in the last steps.
        held: The state that this rank would hand over.
        horizon: The number of steps over which a change must pay.
        sums: How gradients are added up.

    Returns:
        The change, or None if none pays.

    Raises:
        RuntimeError: A rank is lost.
    """
    rank, place = group.rank(), roles.of(group.rank())[1]
    trained = [held.tensors[name, VALUE] for name in held.groups]
    took = torch.zeros(group.size(), len(stages), 3, dtype=torch.float64)
    for stage in stages_of(place, case.placement):
        took[rank, stage] = torch.tensor(_durations(case, stage, [one for one in measured if one.stage == stage]))
    sizes = torch.zeros(group.size(), 2, dtype=torch.float64)
    sizes[rank] = torch.tensor([sum(map(tensor_bytes, trained)), held.nbytes])
    for facts in (took, sizes):
        group.allreduce([facts]).wait()
    links = measure_links(group)
    chosen = torch.zeros(3 + group.size(), dtype=torch.float64)
    if rank == 0:
        forward, input_grad, weight_grad = (tuple(times) for times in took.amax(0).T.tolist())
        cost = replace(case.cost, forward=forward, input_grad=input_grad, weight_grad=weight_grad)
        messages = [(one.output_bytes, other.grad_input_bytes) for one, other in pairwise(stages)]
        columns = [sizes[list(roles.column(one))].amax(0).tolist() for one in range(roles.stages)]
        loads = [StageLoad(*map(int, found)) for found in columns]
        job = JobModel(cost, case.microbatches, messages, loads, links, RESTART_SECONDS, case.placement, sums)
        change = choose_roles(job, roles, horizon)
        if change is not None:
            chosen = torch.tensor([change.seconds_before, change.seconds_after, change.moving, *change.after.ranks])
            chosen = chosen.to(torch.float64)
    group.broadcast([chosen]).wait()
    before, after, moving, *ranks = chosen.tolist()
    if not before:
        return None
    return RoleChange(roles, Roles(roles.stages, tuple(map(int, ranks))), before, after, moving, case.placement)


def gather_costs(
    group: ProcessGroup | None, planned: CostModel, measured: CostModel | None, held: Sequence[Handover]
) -> tuple[CostModel | None, float]:
    """Gather the measured costs, the same on every rank. All ranks of the job call it.

    Args:
        group: All ranks of the job, by rank; None if they are threads of this process.
        planned: The costs that the running plan is made for: memory, and whether the directions share an edge.
        measured: The costs that this rank has measured, if it coordinates its pipeline.
        held: The state of each stage of this process.

    Returns:
        The costs, of several replicas the largest, or None if no rank coordinates at present. And the bytes that move per byte
        of parameters, including gradients and optimizer state.

    Raises:
        RuntimeError: A rank is lost.
    """
    known = [] if measured is None else [value for name in MEASURED for value in getattr(measured, name)]
    count = sum(len(getattr(planned, name)) for name in MEASURED)
    values = sum(tensor_bytes(one) for state in held for (_, what), one in state.tensors.items() if what == VALUE)
    moves = sum(state.nbytes for state in held)
    row = torch.tensor([measured is not None, moves, values, *(known or [0.0] * count)], dtype=torch.float64)
    facts = row[None]
    if group is not None:
        facts = torch.zeros(group.size(), len(row), dtype=torch.float64)
        facts[group.rank()] = row
        group.allreduce([facts]).wait()
    is_known, moves, has, *_ = facts.sum(0).tolist()
    ratio = moves / has if has else 1.0
    if not is_known:
        return None, ratio
    largest = iter(facts.amax(0).tolist()[3:])
    found = {name: tuple(next(largest) for _ in getattr(planned, name)) for name in MEASURED}
    return replace(planned, **found), ratio


def share_split(
    group: ProcessGroup | None, decided: tuple[SplitChange, tuple[CutPoint, ...]] | None, places: CutPoints
) -> tuple[SplitChange, tuple[CutPoint, ...]] | None:
    """Broadcast rank 0's decision on a cut change. All ranks of the job call it.

    Args:
        group: All ranks of the job, by rank; None if they are threads of this process.
        decided: On rank 0, the change and where stages 1, 2, … then begin.
        places: The chosen and the possible cut points.

    Returns:
        The change and its cut points, or None if there is no change.

    Raises:
        RuntimeError: A rank is lost.
    """
    if group is None:
        return decided
    message = torch.zeros(3 + len(places.chosen), dtype=torch.float64)
    if decided is not None and group.rank() == 0:
        change, chosen = decided
        numbers = (change.seconds_before, change.seconds_after, change.moving)
        message = torch.tensor([*numbers, *positions_of(chosen)], dtype=torch.float64)
    group.broadcast([message]).wait()
    before, after, moving, *positions = message.tolist()
    if not before:
        return None
    by_position = {place.position: place for place in (*places.possible, *places.chosen)}
    chosen = tuple(by_position[int(one)] for one in positions)
    was, now = (tuple(place.module for place in some) for some in (places.chosen, chosen))
    return SplitChange(was, now, before, after, moving), chosen


def _durations(case: Case, stage: int, measured: Sequence[StageMeasurement]) -> tuple[float, float, float]:
    """Return the seconds of F, I and W, as medians of the last steps."""
    forward = median(one.forward or 0.0 for one in measured)
    backward = median(one.backward or 0.0 for one in measured)
    known = case.cost.input_grad[stage] + case.cost.weight_grad[stage]
    share = case.cost.input_grad[stage] / known if known > 0 else 0.5
    split = [one for one in measured if one.input_grad is not None and one.weight_grad is not None]
    if split:
        share = median((one.input_grad or 0.0) / (one.backward or 1.0) for one in split)
    return forward, share * backward, (1 - share) * backward
