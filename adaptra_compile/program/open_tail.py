"""Programs with an open tail: a pipeline may run fewer microbatches than its program has, or some of other replicas too.

Where replicas take microbatches that others have not begun, nobody knows before the step how many a pipeline runs. So its
program has *slots* instead of microbatches: as many as the replica has microbatches, and some more. What a slot holds is
decided as the step runs, in ascending order. From some slot on all are empty, and ranks skip their ops. What is left is a
program of fewer microbatches: no op needs one of a later slot, so no rank waits for what is skipped.

With all extra slots empty the program is the one that it was made of, op by op.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from adaptra.errors import ScheduleError
from adaptra.program.dependencies import INPUT_GRADIENT, WEIGHT_GRADIENT
from adaptra.program.program import Kind, Op, Program


def open_tail(program: Program, extra: int) -> Program:
    """Return a program with more slots, whose ops stand where they delay no op before them and hold no more activations.

    On each rank, behind the last F each op that ends a microbatch lets the F of an extra one follow. So a rank never holds more
    than at that F. An extra F also stands behind the input gradients that it stands behind on the stage before. Else the two
    could wait for each other. The backwards of extra ones follow behind all others.

    Args:
        program: Compute ops of one pipeline with one stage per rank.
        extra: The number of extra slots.

    Raises:
        ScheduleError: The program has several replicas, messages or no backwards, or several stages share a rank.
    """
    program.require_one_pipeline("open tail")
    if program.is_lowered or program.is_forward_only or program.stages != program.ranks:
        raise ScheduleError(
            f"open tail: {program.name}: expected compute ops of a training step without messages, and one stage per rank"
        )
    microbatches = program.microbatches
    orders: dict[int, tuple[Op, ...]] = {}
    behind = [-1] * extra
    for stage, rank in enumerate(program.placement):
        orders[rank], behind = _opened(program.orders[rank], microbatches, behind, stage)
    by_rank = tuple(orders[rank] for rank in range(program.ranks))
    return Program.of_pipeline(f"{program.name}-open", program.placement, microbatches + extra, by_rank)


def closed_after(program: Program, slots: int) -> Program:
    """Return what is left of a program with an open tail where all slots from this number on are empty."""
    orders = tuple(tuple(op for op in order if op.microbatch < slots) for order in program.orders)
    routing = Program.of_pipeline(program.name, program.placement, slots, orders).routing
    return replace(program, routing=routing, orders=orders)


def _opened(order: Sequence[Op], microbatches: int, behind: Sequence[int], stage: int) -> tuple[tuple[Op, ...], list[int]]:
    """Return a rank's order with extra slots.

    Args:
        order: The order without them.
        microbatches: The number of other slots.
        behind: The last input gradient before each extra F on the stage before; -1 for none.
        stage: The rank's stage.

    Returns:
        The order, and ``behind`` of this stage.
    """
    last = max(number for number, op in enumerate(order) if op.kind is Kind.F)
    kinds = (Kind.I, Kind.W) if any(op.kind is Kind.I for op in order) else (Kind.B,)
    extra = range(microbatches, microbatches + len(behind))
    opened, stands_behind = list[Op](), list[int]()
    ended, latest = 0, -1
    for number, op in enumerate([*order, *(Op(stage, kind, slot) for slot in extra for kind in kinds)]):
        opened.append(op)
        if op.kind in INPUT_GRADIENT:
            latest = op.microbatch
        if number > last and op.kind in WEIGHT_GRADIENT:
            ended += 1
        while number > last and len(stands_behind) < min(ended, len(behind)) and latest >= behind[len(stands_behind)]:
            opened.append(Op(stage, Kind.F, microbatches + len(stands_behind)))
            stands_behind.append(latest)
    return tuple(opened), stands_behind
