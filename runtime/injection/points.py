"""The points of a step at which a worker can fail."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from adaptra.errors import CaseError, ScheduleError
from adaptra.program import Kind, Op
from adaptra.program.program import parse_op


class Moment(StrEnum):
    """A point of a step that is no op of a program."""

    BEGIN = "begin"
    """Before its first op; no text names it."""
    REDUCE = "REDUCE"
    """As the worker waits for the sum over replicas."""
    CERTIFICATE = "certificate"
    """Between the end of the step on this rank and the filling of ``grad``."""
    OPTIMIZER = "optimizer"
    """As the first call after the step begins."""
    CLIP = "clip"
    """As the norm of the step's gradients is computed."""


Point = Moment | Op
"""A moment, or an F, I, W or B of a microbatch of the worker's own replica."""

_NAMED: Final = {str(one): one for one in Moment if one is not Moment.BEGIN}
_OTHERS: Final = "REDUCE, certificate, optimizer or clip"
_FITTING: Final = {
    Kind.F: {Kind.F},
    Kind.I: {Kind.I, Kind.B},
    Kind.W: {Kind.W, Kind.B},
    Kind.B: {Kind.B, Kind.W},
}
"""The kinds of ops that each kind of a point fits: B is I and W at once, so a program has either."""


def parse_point(fault: str, text: str | None) -> Point:
    """Read the text of a point.

    Args:
        fault: The text of the fault, for errors.
        text: The text behind the step; None for the step's begin.

    Raises:
        CaseError: Shows the fault and the points expected.
    """
    if text is None:
        return Moment.BEGIN
    if text in _NAMED:
        return _NAMED[text]
    try:
        op = parse_op(text)
    except ScheduleError:
        op = None
    if op is None or op.kind not in _FITTING or op.lane is not None:
        raise CaseError(f"fault {fault!r}: no point {text!r}: expected an F, I, W or B such as 2W3, {_OTHERS}")
    return op


def fits(point: Point, now: Point) -> bool:
    """Return whether a worker that is at ``now`` is at a point."""
    if isinstance(point, Op):
        return (
            isinstance(now, Op)
            and (point.stage, point.microbatch) == (now.stage, now.microbatch)
            and (now.kind in _FITTING[point.kind])
        )
    return point is now
