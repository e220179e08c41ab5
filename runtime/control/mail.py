"""Mail between the control threads of a pipeline's ranks: its kinds and their form on the wire."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from adaptra.runtime.control_store.schema import Fields, decode
from adaptra.runtime.detection.measurement import StepMeasurement

MAX_TEXT: Final = 10_000
"""The longest explanation in mail, in characters."""


@dataclass(frozen=True, slots=True)
class Measured:
    """The measurement of a step that a rank has run."""

    measurement: StepMeasurement


@dataclass(frozen=True, slots=True)
class Proposed:
    """A proposal of the coordinator: the JSON of a :class:`adaptra.runtime.control.plan.Plan`, unchecked."""

    version: int
    plan: object


@dataclass(frozen=True, slots=True)
class Confirmed:
    """A rank's confirmation that it can run a plan; ``digest`` is that of its program."""

    rank: int
    version: int
    digest: str


@dataclass(frozen=True, slots=True)
class Refused:
    """A rank's refusal of a plan."""

    rank: int
    version: int
    why: str


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """The coordinator's withdrawal of a proposal: no rank need keep it."""

    version: int


@dataclass(frozen=True, slots=True)
class Joined:
    """A rank's message to the coordinator of a term, which takes over if it does not coordinate yet.

    ``reached`` is the last step that the rank has run.
    """

    rank: int
    term: int
    reached: int


@dataclass(frozen=True, slots=True)
class Term:
    """The latest term that a coordinator knows: its answer to :class:`Joined`, and its broadcast when it takes over."""

    term: int


@dataclass(frozen=True, slots=True)
class LogGrew:
    """A new entry of the plan log at this position: the steps up to ``until`` run ``version``."""

    position: int
    until: int
    version: int


@dataclass(frozen=True, slots=True)
class Given:
    """A checksum for each tensor that a rank was given in a call, see :mod:`adaptra.runtime.control.same_rows`.

    Attributes:
        rank: The rank.
        call: The name of the pipeline's method.
        number: The number of this call of that method, from 0.
        numbers: Checksums by the tensor's argument name and path.
    """

    rank: int
    call: str
    number: int
    numbers: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Differed:
    """The error that ranks were given different values where they must be equal."""

    error: str


@dataclass(frozen=True, slots=True)
class Failed:
    """The failure of a rank's control thread."""

    rank: int
    error: str


@dataclass(frozen=True, slots=True)
class Wake:
    """An event within this process, not from the store."""


Mail = Measured | Proposed | Confirmed | Refused | Withdrawn | Joined | Term | LogGrew | Given | Differed | Failed


def to_json(mail: Mail) -> dict[str, Any]:
    """Return the JSON object that :func:`from_json` reads back to equal mail."""
    data: dict[str, Any]
    match mail:
        case Measured(measurement):
            data = {"mail": "measured", "measurement": measurement.to_json()}
        case Proposed(version, plan):
            data = {"mail": "proposed", "version": version, "plan": plan}
        case Confirmed(rank, version, digest):
            data = {"mail": "confirmed", "rank": rank, "version": version, "digest": digest}
        case Refused(rank, version, why):
            data = {"mail": "refused", "rank": rank, "version": version, "why": why[:MAX_TEXT]}
        case Withdrawn(version):
            data = {"mail": "withdrawn", "version": version}
        case Joined(rank, term, reached):
            data = {"mail": "joined", "rank": rank, "term": term, "reached": reached}
        case Term(term):
            data = {"mail": "term", "term": term}
        case LogGrew(position, until, version):
            data = {"mail": "log", "position": position, "until": until, "version": version}
        case Given(rank, call, number, numbers):
            data = {"mail": "given", "rank": rank, "call": call, "number": number, "numbers": [*map(list, numbers.items())]}
        case Differed(error):
            data = {"mail": "differed", "error": error[:MAX_TEXT]}
        case Failed(rank, error):
            data = {"mail": "failed", "rank": rank, "error": error[:MAX_TEXT]}
    return data


def from_json(payload: bytes) -> Mail:
    """Read mail.

    Raises:
        ControlError: It is not mail, or a field is missing, unknown or invalid.
    """
    fields = decode(payload, "mail")
    mail: Mail
    match fields.text("mail", at_most=16):
        case "measured":
            mail = Measured(StepMeasurement.from_json(fields.raw("measurement")))
        case "proposed":
            mail = Proposed(fields.whole("version"), fields.raw("plan"))
        case "confirmed":
            mail = Confirmed(fields.whole("rank"), fields.whole("version"), fields.text("digest", at_most=64))
        case "refused":
            mail = Refused(fields.whole("rank"), fields.whole("version"), fields.text("why", at_most=MAX_TEXT))
        case "withdrawn":
            mail = Withdrawn(fields.whole("version"))
        case "joined":
            mail = Joined(fields.whole("rank"), fields.whole("term"), fields.whole("reached", at_least=-1))
        case "term":
            mail = Term(fields.whole("term"))
        case "log":
            mail = LogGrew(fields.whole("position"), fields.whole("until"), fields.whole("version"))
        case "given":
            mail = Given(fields.whole("rank"), fields.text("call", at_most=64), fields.whole("number"), _numbers(fields))
        case "differed":
            mail = Differed(fields.text("error", at_most=MAX_TEXT))
        case "failed":
            mail = Failed(fields.whole("rank"), fields.text("error", at_most=MAX_TEXT))
        case other:
            expected = "one of measured, proposed, confirmed, refused, withdrawn, joined, term, log, given, differed, failed"
            raise fields.refuse("mail", expected, other)
    fields.end()
    return mail


def _numbers(fields: Fields) -> dict[str, int]:
    found: dict[str, int] = {}
    for item in fields.items("numbers"):
        match item:
            case [str(name), int(number)]:
                found[name] = number
            case _:
                raise fields.refuse("numbers", "a name and a whole number", item)
    return found
