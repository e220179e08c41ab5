"""A rank's record in the control store, and its meaning to the others.

A record is JSON, read field by field. Failures are numbered by the store, and one failure soon looks like many, so
:func:`cause_of` finds the one that came first.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import Enum
from typing import TYPE_CHECKING, Final

from adaptra.errors import ControlError, PeerLostError
from adaptra.runtime.control_store.schema import Fields, decode, encode

if TYPE_CHECKING:
    from adaptra.runtime.transports.base import Identity

VERSION: Final = 1
TEXT_LIMIT: Final = 4000


class State(Enum):
    """The state of a rank in its own record."""

    RUNNING = "running"
    FAILED = "failed"
    LEFT = "left"


@dataclass(frozen=True, slots=True)
class Failure:
    """The failure of a rank.

    Attributes:
        ordinal: Sequence number of the failure in the job, from 1.
        message: The error's text.
        lost: The rank whose loss it reports, None if it is the rank's own failure.
        edge: The directed edge of stages where it was noticed, if known.
        op: The op at that time, if known.
    """

    ordinal: int
    message: str
    lost: int | None
    edge: tuple[int, int] | None
    op: str | None


@dataclass(frozen=True, slots=True)
class RankRecord:
    """A rank's record in the store.

    Attributes:
        beat: Counts the rank's heartbeats.
        state: The rank's state.
        failure: The failure, if it failed.
        seen: The ranks of which it has read that they failed or left.
        is_settled: True if it knows of no failure or has found the first one; False while it waits for more reports.
    """

    beat: int
    state: State
    failure: Failure | None
    seen: tuple[int, ...]
    is_settled: bool


def placed(error: PeerLostError, failure: Failure) -> PeerLostError:
    """Add the edge and the op of this rank's own ``failure`` to ``error``, if that has none."""
    if error.edge is not None or failure.edge is None:
        return error
    message = f"{error}, noticed at {failure.op} on edge {failure.edge[0]}→{failure.edge[1]}"
    return PeerLostError(message, rank=error.rank, edge=failure.edge, op=failure.op)


def lost_error(rank: int | None, message: str, awaited: Identity | None) -> PeerLostError:
    """Return the error for a lost rank (or the store, rank None), with the message that this rank waits for from it."""
    if awaited is None:
        return PeerLostError(message, rank=rank)
    message = f"{message}, while edge {awaited.source}→{awaited.destination} waits for {awaited.op} of step {awaited.step}"
    return PeerLostError(message, rank=rank, edge=awaited.edge, op=awaited.op)


def cause_of(failures: dict[int, Failure]) -> int:
    """Return the rank whose failure caused the others.

    That is the first failure's rank. If it reports the loss of a rank that failed by itself, that rank is the cause.
    """
    rank = min(failures, key=lambda rank: failures[rank].ordinal)
    passed = {rank}
    while (lost := failures[rank].lost) is not None and lost in failures and lost not in passed:
        rank = lost
        passed.add(rank)
    return rank


def failure_error(rank: int, failure: Failure, reader: int) -> PeerLostError:
    """Return the error for the failure of ``rank``."""
    where = "".join(
        [
            f" at {failure.op}" if failure.op else "",
            f" on edge {failure.edge[0]}→{failure.edge[1]}" if failure.edge else "",
        ]
    )
    if failure.lost is None or failure.lost == reader:
        message, who = f"rank {rank} failed{where}: {failure.message}", rank
    else:
        message, who = f"rank {failure.lost} is lost, as rank {rank} noticed{where}: {failure.message}", failure.lost
    return PeerLostError(message, rank=who, edge=failure.edge, op=failure.op)


def key_of(rank: int) -> str:
    """Return the store key of a rank's record."""
    return f"rank {rank}"


def write_record(record: RankRecord) -> str:
    """Return a record in its stored form."""
    failure = None if record.failure is None else asdict(record.failure)
    return encode(
        {
            "version": VERSION,
            "beat": record.beat,
            "state": record.state.value,
            "failure": failure,
            "seen": list(record.seen),
            "settled": record.is_settled,
        }
    )


def parse_record(payload: bytes, rank: int) -> RankRecord:
    """Read a rank's record.

    Raises:
        ControlError: The payload is not a record.
    """
    where = f"membership record of rank {rank}"
    fields = decode(payload, where)
    if fields.whole("version") != VERSION:
        raise ControlError(f"{where}: field 'version': expected {VERSION}")
    state = fields.text("state", 16)
    if state not in {each.value for each in State}:
        raise ControlError(f"{where}: field 'state': expected running, failed or left, got {state!r}")
    failure = fields.raw("failure")
    record = RankRecord(
        beat=fields.whole("beat"),
        state=State(state),
        failure=None if failure is None else _parse_failure(failure, f"{where}: failure"),
        seen=tuple(_whole_numbers(fields.items("seen"), f"{where}: field 'seen'")),
        is_settled=fields.flag("settled"),
    )
    fields.end()
    return record


def _parse_failure(data: object, where: str) -> Failure:
    fields = Fields(data, where)
    lost, edge, op = fields.raw("lost"), fields.raw("edge"), fields.raw("op")
    if lost is not None:
        (lost,) = _whole_numbers([lost], f"{where}: field 'lost'")
    if edge is not None:
        ends = _whole_numbers(edge if isinstance(edge, list) else [edge], f"{where}: field 'edge'")
        if len(ends) != 2:
            raise ControlError(f"{where}: field 'edge': expected two stages, got {edge!r}")
        edge = (ends[0], ends[1])
    if op is not None and (not isinstance(op, str) or len(op) > TEXT_LIMIT):
        raise ControlError(f"{where}: field 'op': expected a short text, got {op!r:.80}")
    failure = Failure(fields.whole("ordinal"), fields.text("message", TEXT_LIMIT * 2), lost, edge, op)
    fields.end()
    return failure


def _whole_numbers(values: list[object], where: str) -> list[int]:
    numbers = [value for value in values if isinstance(value, int) and not isinstance(value, bool) and value >= 0]
    if len(numbers) != len(values):
        raise ControlError(f"{where}: expected whole numbers, got {values!r:.80}")
    return numbers
