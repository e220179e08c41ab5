"""A rank's record in the control store: JSON, read field by field."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import Enum
from typing import Final

from adaptra.checks import is_whole
from adaptra.errors import ControlError
from adaptra.json_files import Fields
from adaptra.runtime.control_store.schema import decode, encode

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
        is_certain: True if it reports a loss that no report of the lost rank can change, because that can make none.
    """

    ordinal: int
    message: str
    lost: int | None
    edge: tuple[int, int] | None
    op: str | None
    is_certain: bool = False


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
    message, is_certain = fields.text("message", TEXT_LIMIT * 2), fields.flag("is_certain")
    failure = Failure(fields.whole("ordinal"), message, lost, edge, op, is_certain)
    fields.end()
    return failure


def _whole_numbers(values: list[object], where: str) -> list[int]:
    numbers = [value for value in values if is_whole(value) and value >= 0]
    if len(numbers) != len(values):
        raise ControlError(f"{where}: expected whole numbers, got {values!r:.80}")
    return numbers
