"""Mail between the control threads of a pipeline's ranks: its kinds and their form on the wire."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
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
class BatchChecksums:
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
class BatchMismatch:
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


Mail = Measured | Proposed | Confirmed | Refused | Withdrawn | Joined | Term | LogGrew | BatchChecksums | BatchMismatch | Failed


_KINDS: Final[Mapping[str, type[Mail]]] = {
    "measured": Measured,
    "proposed": Proposed,
    "confirmed": Confirmed,
    "refused": Refused,
    "withdrawn": Withdrawn,
    "joined": Joined,
    "term": Term,
    "log": LogGrew,
    "given": BatchChecksums,
    "differed": BatchMismatch,
    "failed": Failed,
}
"""The kinds of mail by their names on the wire."""

_NAMES: Final = {kind: name for name, kind in _KINDS.items()}


def _as_it_is(value: object) -> object:
    return value


def _shortened(text: str) -> str:
    return text[:MAX_TEXT]


def _pairs(numbers: Mapping[str, int]) -> list[list[str | int]]:
    return [[name, number] for name, number in numbers.items()]


def _numbers(fields: Fields, name: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for item in fields.items(name):
        match item:
            case [str(tensor), int(number)]:
                found[tensor] = number
            case _:
                raise fields.refuse(name, "a name and a whole number", item)
    return found


_FIELDS: Final[Mapping[str, tuple[Callable[[Any], object], Callable[[Fields, str], object]]]] = {
    "measurement": (StepMeasurement.to_json, lambda fields, name: StepMeasurement.from_json(fields.raw(name))),
    "plan": (_as_it_is, Fields.raw),
    **dict.fromkeys(("rank", "version", "term", "position", "until", "number"), (_as_it_is, Fields.whole)),
    "reached": (_as_it_is, partial(Fields.whole, at_least=-1)),
    **dict.fromkeys(("digest", "call"), (_as_it_is, partial(Fields.text, at_most=64))),
    **dict.fromkeys(("why", "error"), (_shortened, partial(Fields.text, at_most=MAX_TEXT))),
    "numbers": (_pairs, _numbers),
}
"""How a field of mail is written as a JSON value, and how it is read and checked."""


def to_json(mail: Mail) -> dict[str, Any]:
    """Return the JSON object that :func:`from_json` reads back to equal mail."""
    written = {one.name: _FIELDS[one.name][0](getattr(mail, one.name)) for one in dataclasses.fields(mail)}
    return {"mail": _NAMES[type(mail)], **written}


def from_json(payload: bytes) -> Mail:
    """Read mail.

    Raises:
        ControlError: It is not mail, or a field is missing, unknown or invalid.
    """
    fields = decode(payload, "mail")
    name = fields.text("mail", at_most=16)
    if name not in _KINDS:
        raise fields.refuse("mail", f"one of {', '.join(_KINDS)}", name)
    kind: Any = _KINDS[name]
    mail = kind(**{one.name: _FIELDS[one.name][1](fields, one.name) for one in dataclasses.fields(kind)})
    fields.end()
    return mail
