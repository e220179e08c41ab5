"""Mail between the control threads of a pipeline's ranks: what each kind says, and its form on the wire."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from adaptra.runtime.control_store.schema import Fields, decode
from adaptra.runtime.detection.measurement import StepMeasurement

MAX_TEXT: Final = 10_000
"""The longest explanation that travels, in characters."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A rank has run a step."""

    measurement: StepMeasurement


@dataclass(frozen=True, slots=True)
class Proposed:
    """The coordinator proposes a plan: the JSON of a :class:`adaptra.runtime.control.plan.Plan`, unchecked."""

    version: int
    plan: object


@dataclass(frozen=True, slots=True)
class Confirmed:
    """A rank is ready to run a plan whose program has this digest."""

    rank: int
    version: int
    digest: str


@dataclass(frozen=True, slots=True)
class Refused:
    """A rank can't run a plan."""

    rank: int
    version: int
    why: str


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """The coordinator has given up what it proposed under this version: no rank need keep it."""

    version: int


@dataclass(frozen=True, slots=True)
class Joined:
    """A rank turns to the coordinator of a term, which takes over if it does not coordinate yet.

    ``reached`` is the last step that the rank has run.
    """

    rank: int
    term: int
    reached: int


@dataclass(frozen=True, slots=True)
class Term:
    """The answer to :class:`Joined`, and what a coordinator tells all when it takes over: the latest term it knows of."""

    term: int


@dataclass(frozen=True, slots=True)
class LogGrew:
    """There is a new entry in the plan log, at this position: the steps up to ``until`` run ``version``."""

    position: int
    until: int
    version: int


@dataclass(frozen=True, slots=True)
class Given:
    """What a rank was given in a call: a number for each tensor, see :mod:`adaptra.runtime.control.same_rows`.

    Attributes:
        rank: The rank.
        call: Which of the pipeline's methods was called.
        number: The how manieth call of it, from 0.
        numbers: By the tensor's place in the call.
    """

    rank: int
    call: str
    number: int
    numbers: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Differed:
    """Ranks were given what must be the same, and is not."""

    error: str


@dataclass(frozen=True, slots=True)
class Failed:
    """The control thread of a rank has failed."""

    rank: int
    error: str


@dataclass(frozen=True, slots=True)
class Wake:
    """Not from the store: something happened in this process."""


Mail = Measured | Proposed | Confirmed | Refused | Withdrawn | Joined | Term | LogGrew | Given | Differed | Failed


def to_json(mail: Mail) -> dict[str, Any]:
    """The JSON object that :func:`from_json` reads back to equal mail."""
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
        ControlError: It is not mail, or a field is missing, unknown or not what it should be.
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
