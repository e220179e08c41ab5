"""Agreement on a role change or a cut change between two steps: all ranks measure, rank 0 chooses, and all apply its choice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import median
from typing import Final

from torch.distributed import ProcessGroup

from adaptra.collectives.seconds import SumPlan
from adaptra.graph.ops.specs import tensor_bytes
from adaptra.graph.stages.stages import TrainStage
from adaptra.json_files import Fields
from adaptra.planning.layouts.choose_roles import JobModel, StageLoad, choose_roles
from adaptra.planning.layouts.layout_change import RoleChange, SplitChange
from adaptra.program.placement import stages_of
from adaptra.program.roles import Roles
from adaptra.runtime.control_store.schema import decode_all, encode
from adaptra.runtime.detection.job_detector import MEASURED
from adaptra.runtime.exchange.state_transfer import VALUE, Handover
from adaptra.runtime.measuring.measurement import StageMeasurement
from adaptra.runtime.transports.link_probe import measure_links
from adaptra.simulation.case import Case
from adaptra.simulation.cost import CostModel
from adaptra.simulation.cut_points import CutPoint, CutPoints, positions_of

RESTART_SECONDS: Final = 1.0
"""Seconds of a change besides the state transfer: ending the workers, starting others, and calibrating again."""


Tell = Callable[[str], list[str]]
"""Tells all ranks of the job a text, and returns that of each, by rank."""


def agree_on_roles(
    tell: Tell,
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
        tell: Tells all ranks.
        group: All ranks of the job, by rank, whose links are measured.
        roles: The present roles.
        stages: The stages' graphs, which give the size of each message.
        case: The first plan's case: memory, and the shares of I and W where only B ran. It says whether ranks meet between
            steps now.
        measured: The measurements of this rank's stages in the last steps.
        held: The state that this rank would hand over.
        horizon: The number of steps over which a change must pay.
        sums: How gradients are added up.

    Returns:
        The change, or None if none pays.

    Raises:
        RuntimeError: A rank is lost.
        As ``tell``.
    """
    trained = sum(tensor_bytes(held.tensors[name, VALUE]) for name in held.owners | held.groups)
    took = [
        [stage, *_durations(case, stage, [one for one in measured if one.stage == stage])]
        for stage in stages_of(roles.of(group.rank())[1], case.placement)
    ]
    facts = _told(tell, "times and sizes", trained=trained, held=held.nbytes, took=took)
    links = measure_links(group)
    change = None
    if group.rank() == 0:
        sizes = [(one.whole("trained"), one.whole("held")) for one in facts]
        times: list[list[list[float]]] = [[] for _ in stages]
        for one in facts:
            for stage, *durations in one.rows("took"):
                times[int(stage)].append(durations)
        forward, input_grad, weight_grad = zip(*(map(max, zip(*of_stage, strict=True)) for of_stage in times), strict=True)
        cost = replace(case.cost, forward=forward, input_grad=input_grad, weight_grad=weight_grad)
        messages = [(one.output_bytes, other.grad_input_bytes) for one, other in pairwise(stages)]
        columns = [[sizes[rank] for rank in roles.column(one)] for one in range(roles.stages)]
        loads = [StageLoad(*map(max, zip(*column, strict=True))) for column in columns]
        job = JobModel(cost, case.microbatches, messages, loads, links, RESTART_SECONDS, case.placement, sums, case.barrier)
        change = choose_roles(job, roles, horizon)
    seconds, ranks = _of_first(tell, "role change", change, () if change is None else change.after.ranks)
    if not seconds:
        return None
    before, after, moving = seconds
    return RoleChange(roles, Roles(roles.stages, tuple(ranks)), before, after, moving, case.placement)


def gather_costs(
    tell: Tell, planned: CostModel, measured: CostModel | None, held: Sequence[Handover]
) -> tuple[CostModel | None, float]:
    """Gather the measured costs, the same on every rank. All ranks of the job call it.

    Args:
        tell: Tells all ranks.
        planned: The costs that the running plan is made for: memory, and whether the directions share an edge.
        measured: The costs that this rank has measured, if it coordinates its pipeline.
        held: The state of each stage of this process.

    Returns:
        The costs, of several replicas the largest, or None if no rank coordinates at present. And the bytes that move per byte
        of parameters, including gradients and optimizer state.

    Raises:
        As ``tell``.
    """
    facts = _told(
        tell,
        "measured costs",
        moves=sum(state.nbytes for state in held),
        values=sum(tensor_bytes(one) for state in held for (_, what), one in state.tensors.items() if what == VALUE),
        known=[] if measured is None else [getattr(measured, name) for name in MEASURED],
    )
    moves, values = (sum(one.whole(name) for one in facts) for name in ("moves", "values"))
    ratio = moves / values if values else 1.0
    known = [rows for one in facts if (rows := one.rows("known"))]
    if not known:
        return None, ratio
    largest = [tuple(map(max, zip(*rows, strict=True))) for rows in zip(*known, strict=True)]
    return replace(planned, **dict(zip(MEASURED, largest, strict=True))), ratio


def share_split(
    tell: Tell, decided: tuple[SplitChange, tuple[CutPoint, ...]] | None, places: CutPoints
) -> tuple[SplitChange, tuple[CutPoint, ...]] | None:
    """Tell all ranks rank 0's decision on a cut change. All ranks of the job call it.

    Args:
        tell: Tells all ranks.
        decided: On rank 0, the change and where stages 1, 2, … then begin.
        places: The chosen and the possible cut points.

    Returns:
        The change and its cut points, or None if there is no change.

    Raises:
        As ``tell``.
    """
    change, chosen = decided or (None, ())
    seconds, positions = _of_first(tell, "cut change", change, positions_of(chosen))
    if not seconds:
        return None
    by_position = {place.position: place for place in (*places.possible, *places.chosen)}
    chosen = tuple(by_position[one] for one in positions)
    was, now = (tuple(place.module for place in some) for some in (places.chosen, chosen))
    return SplitChange(was, now, *seconds), chosen


def _told(tell: Tell, what: str, **facts: object) -> list[Fields]:
    """Tell all ranks this rank's facts, and return those of each."""
    return decode_all(tell(encode(facts)), what)


def _of_first(
    tell: Tell, what: str, change: RoleChange | SplitChange | None, numbers: Sequence[int]
) -> tuple[list[float], list[int]]:
    """Return the seconds of rank 0's change, none without one, and the numbers that say which it is."""
    seconds = [] if change is None else [change.seconds_before, change.seconds_after, change.moving]
    first, *_ = _told(tell, what, seconds=[seconds], numbers=[numbers])
    (seconds,), (chosen,) = first.rows("seconds"), first.rows("numbers")
    return seconds, [int(one) for one in chosen]


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
