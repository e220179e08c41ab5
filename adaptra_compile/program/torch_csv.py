"""Conversion to and from the schedule CSV of torch.distributed.pipelining, as torch 2.13 reads and writes it.

The CSV has one row per rank and one cell per action: ``0F0``, ``1SEND_F0``. An empty cell is an idle step of torch's grid and
is ignored here. Torch has two forms. "compute_only" contains compute actions, and torch adds the communication itself.
"compute_comms" contains every action that is run. In that form torch divides gradients by the number of microbatches only at
``0REDUCE_GRAD``. So export writes it after a stage's last backward, and import accepts it only there. Torch's runtime loads
either form with ``_PipelineScheduleRuntime._load_csv(path, format=…)``.

Torch's own reader accepts a cell that only starts like an action, accepts an action twice, and doesn't check "compute_comms" at
all. This reader refuses every unknown cell, with its row and column.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Sequence
from typing import Final

from adaptra.errors import ScheduleError
from adaptra.program import Kind, Op, Program, parse_op


def to_csv(program: Program) -> str:
    """Return the program as torch's CSV: "compute_only", or "compute_comms" if the program has communication ops.

    Raises:
        ScheduleError: An op has a lane, which torch's form can't express.
    """
    rows = io.StringIO()
    writer = csv.writer(rows, lineterminator="\n")
    for rank, order in enumerate(program.orders):
        for op in order:
            if op.lane is not None:
                raise ScheduleError(f"{program.name}: rank {rank}: {op}: torch's CSV has no lanes: export before lower-comm")
        writer.writerow(_with_reductions(order) if program.is_lowered else map(str, order))
    return rows.getvalue()


def from_csv(
    text: str, *, placement: Sequence[int] | None = None, microbatches: int | None = None, name: str = "csv"
) -> Program:
    """Parse torch's CSV in either form. :func:`adaptra.program.verify.verify` checks whether ranks can execute it.

    Args:
        text: The CSV.
        placement: The rank of each stage. By default a stage is on the rank in whose row it occurs.
        microbatches: The number of microbatches of a step. By default one more than the largest that occurs.
        name: The name of the program.

    Raises:
        ScheduleError: A cell is invalid, or contradicts the arguments. The text names row and column, counted from one, the
            cell and the expected form; or the stage or microbatch.
    """
    seen: dict[Op, str] = {}
    rank_of: dict[int, int] = {}
    orders: list[tuple[Op, ...]] = []
    for rank, row in enumerate(_rows(text)):
        order: list[Op] = []
        reduced: set[int] = set()
        for column, cell in enumerate(row, 1):
            where = f"row {rank + 1}, column {column}"
            token = cell.strip()
            if not token:
                continue
            reduction = _REDUCTION.fullmatch(token)
            if reduction is not None:
                reduced.add(_reduction(int(reduction[1]), token, where, order, reduced))
                continue
            op = _op(token, where)
            if op in seen:
                raise ScheduleError(f"{where}: {token} stands twice, first in {seen[op]}: expected each action once")
            if op.stage in reduced and op.kind in _LAST_BACKWARD:
                raise ScheduleError(f"{where}: {token} stands behind {op.stage}REDUCE_GRAD: expected it before")
            if rank_of.setdefault(op.stage, rank) != rank:
                raise ScheduleError(f"{where}: {token}: stage {op.stage} already stands in row {rank_of[op.stage] + 1}")
            if microbatches is not None and op.microbatch >= microbatches:
                raise ScheduleError(f"{where}: {token}: expected microbatches 0..{microbatches - 1}")
            if placement is not None and not (op.stage < len(placement) and placement[op.stage] == rank):
                raise ScheduleError(
                    f"{where}: {token}: placement {','.join(map(str, placement))} puts no stage {op.stage} here"
                )
            seen[op] = where
            order.append(op)
        orders.append(tuple(order))
    if not seen:
        raise ScheduleError("empty CSV: expected one row of actions per rank")
    if placement is None:
        placement = _placement(rank_of, len(orders))
    if microbatches is None:
        microbatches = max(op.microbatch for op in seen) + 1
    return Program.of_pipeline(name, tuple(placement), microbatches, tuple(orders))


_REDUCTION: Final = re.compile(r"(0|[1-9][0-9]{0,8})REDUCE_GRAD")
_LAST_BACKWARD: Final = frozenset({Kind.W, Kind.B})


def _with_reductions(order: Sequence[Op]) -> Iterator[str]:
    last = {op.stage: op for op in order if op.kind in _LAST_BACKWARD}
    for op in order:
        yield str(op)
        if last.get(op.stage) is op:
            yield f"{op.stage}REDUCE_GRAD"


def _rows(text: str) -> list[list[str]]:
    try:
        return list(csv.reader(io.StringIO(text, newline=""), strict=True))
    except csv.Error as error:
        raise ScheduleError(f"not CSV: {error}") from None


def _reduction(stage: int, token: str, where: str, order: Sequence[Op], reduced: set[int]) -> int:
    """Check a REDUCE_GRAD, whose position follows from the ops around it, and return its stage."""
    if stage in reduced:
        raise ScheduleError(f"{where}: {token} stands twice: expected it once, behind the stage's last W or B")
    if not any(op.stage == stage and op.kind in _LAST_BACKWARD for op in order):
        raise ScheduleError(f"{where}: {token}: no W or B of stage {stage} stands before it: expected it behind the last one")
    return stage


def _op(token: str, where: str) -> Op:
    if token.startswith("(") or token.endswith(_UNSUPPORTED):
        raise ScheduleError(
            f"{where}: {token}: adaptra has no such action: expected F, I, W, B, SEND_F, RECV_F, SEND_B, RECV_B or "
            f"REDUCE_GRAD; let torch write the CSV as format='compute_only', without overlapping actions"
        )
    try:
        op = parse_op(token)
    except ScheduleError:
        op = None
    if op is None or op.lane is not None:
        raise ScheduleError(f"{where}: {token!r}: expected STAGE ACTION MICROBATCH such as 2F0 or 1SEND_F3")
    return op


_UNSUPPORTED: Final = ("UNSHARD", "RESHARD", "OVERLAP_F_B")


def _placement(rank_of: dict[int, int], ranks: int) -> tuple[int, ...]:
    stages = max(rank_of) + 1
    for stage in range(stages):
        if stage not in rank_of:
            raise ScheduleError(f"stage {stage} occurs in no row, but stage {stages - 1} does: expected all of 0..{stages - 1}")
    for rank in range(ranks):
        if rank not in rank_of.values():
            raise ScheduleError(f"row {rank + 1} holds no action: expected every rank to hold a stage")
    return tuple(rank_of[stage] for stage in range(stages))
