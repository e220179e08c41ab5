"""To and from the schedule CSV of torch.distributed.pipelining, as torch 2.13 reads and writes it.

One row per rank, one cell per action: ``0F0``, ``1SEND_F0``. An empty cell is an idle step of torch's grid and means nothing
here. torch knows two forms. "compute_only" holds compute actions, and torch adds the communication itself. "compute_comms"
holds every action that is run; there torch divides gradients by the number of microbatches only where the CSV says
``0REDUCE_GRAD``, so export writes it behind a stage's last backward, and import expects it nowhere else. torch's runtime loads
either with ``_PipelineScheduleRuntime._load_csv(path, format=…)``.

torch's own reader takes a cell that only starts like an action, takes an action twice, and doesn't check "compute_comms" at
all. This one refuses what it doesn't know, by row and column.
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
    """The program as torch's CSV: "compute_only", or "compute_comms" if the program holds its communication ops.

    Raises:
        ScheduleError: An op names a lane, which torch has no word for.
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
    """Read torch's CSV, either form. Whether ranks can execute it is :func:`adaptra.program.verify.verify`'s question.

    Args:
        text: The CSV.
        placement: The rank of each stage; by default, stages lie on the rank in whose row they occur.
        microbatches: How many microbatches a step has; by default one more than the largest that occurs.
        name: The name of the program.

    Raises:
        ScheduleError: Names row and column, counted from one, what stands there and what was expected; or the stage or
            microbatch that contradicts the arguments.
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
    return Program(name, tuple(placement), microbatches, tuple(orders))


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
    """Check a REDUCE_GRAD, whose place follows from the ops around it, and return its stage."""
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
