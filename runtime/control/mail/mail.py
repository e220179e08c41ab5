"""Mail between the control threads of a pipeline's ranks: its kinds and their form on the wire."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from adaptra.checks import is_finite, is_whole
from adaptra.json_files import Fields
from adaptra.runtime.control_store.schema import decode
from adaptra.runtime.measuring.measurement import StepMeasurement

MAX_TEXT: Final = 10_000
"""The longest explanation in mail, in characters."""


@dataclass(frozen=True, slots=True)
class Measured:
    """The measurement of a step that a rank has run."""

    measurement: StepMeasurement


@dataclass(frozen=True, slots=True)
class Proposed:
    """A proposal of the coordinator: the JSON of a :class:`adaptra.runtime.control.plans.plan.Plan`, unchecked."""

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
    """A checksum for each tensor that a rank was given in a call, see :mod:`adaptra.runtime.control.agreement.same_rows`.

    Attributes:
        rank: The rank.
        call: The name of the pipeline's method.
        number: The number of this call of that method, from 0.
        numbers: Checksums by the tensor's argument name and path.
        step: The number of the next step in the whole training.
    """

    rank: int
    call: str
    number: int
    numbers: Mapping[str, int]
    step: int


@dataclass(frozen=True, slots=True)
class BatchMismatch:
    """The error that ranks were given different values where they must be equal."""

    error: str


@dataclass(frozen=True, slots=True)
class Failed:
    """The failure of a rank's control thread."""

    rank: int
    error: str


Vote = tuple[int, str, tuple[int, ...] | None]
"""A version, a digest and the ranks that confirm it; None for the sender of the mail and all ranks below it in the tree."""


@dataclass(frozen=True, slots=True)
class Gathered:
    """What a rank and all ranks below it in the tree say to the coordinator, see :mod:`adaptra.runtime.control.mail.relay`.

    Attributes:
        root: The coordinator that it is for, the root of the tree.
        sender: The rank.
        step: The last step that they have run, or -1 if this is no report of steps.
        told: The sum over them of the step whose measurement each of them told last.
        seconds: For each of the reported steps, of which ``step`` is the last, the most seconds that it took one of them.
        news: Those measurements of these steps that are news.
        votes: Their confirmations.
    """

    root: int
    sender: int
    step: int
    told: int
    seconds: tuple[float, ...]
    news: tuple[StepMeasurement, ...]
    votes: tuple[Vote, ...]


@dataclass(frozen=True, slots=True)
class Spread:
    """Mail of the coordinator ``root`` for all other ranks, on its way down the tree."""

    root: int
    mails: tuple[Mail, ...]


@dataclass(frozen=True, slots=True)
class TellAnew:
    """The coordinator's request that every rank tell its next measurement in full, because it has missed news."""


@dataclass(frozen=True, slots=True)
class Wake:
    """An event within this process, not from the store."""


@dataclass(frozen=True, slots=True)
class Ran:
    """The measurement of a step that this rank has run. It goes from the training thread to the control thread."""

    measurement: StepMeasurement


@dataclass(frozen=True, slots=True)
class Reports:
    """What several ranks have reported, made from :class:`Gathered` by the coordinator's relay.

    All of ``ranks`` have run ``step``. There are no measurements if news were lost on the way.
    """

    ranks: tuple[int, ...]
    step: int
    measurements: tuple[StepMeasurement, ...]


Mail = (
    Measured
    | Proposed
    | Confirmed
    | Refused
    | Withdrawn
    | Joined
    | Term
    | LogGrew
    | BatchChecksums
    | BatchMismatch
    | Failed
    | Gathered
    | Spread
    | TellAnew
)


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
    "gathered": Gathered,
    "spread": Spread,
    "anew": TellAnew,
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
    numbers: dict[str, int] = {}
    for item in fields.items(name):
        match item:
            case [str(tensor), int(number)]:
                numbers[tensor] = number
            case _:
                raise fields.refuse(name, "a name and a whole number", item)
    return numbers


def _list(values: Sequence[Any]) -> list[Any]:
    return list(values)


def _seconds(fields: Fields, name: str) -> tuple[float, ...]:
    seconds: list[float] = []
    for item in fields.items(name):
        if not is_finite(item) or item < 0:
            raise fields.refuse(name, "seconds", item)
        seconds.append(float(item))
    return tuple(seconds)


def _measurements_json(news: Sequence[StepMeasurement]) -> list[object]:
    return [measurement.to_json() for measurement in news]


def _measurements(fields: Fields, name: str) -> tuple[StepMeasurement, ...]:
    return tuple(map(StepMeasurement.from_json, fields.items(name)))


def _votes(fields: Fields, name: str) -> tuple[Vote, ...]:
    votes: list[Vote] = []
    for item in fields.items(name):
        match item:
            case [int(version), str(digest), None]:
                votes.append((version, digest, None))
            case [int(version), str(digest), [*ranks]] if all(is_whole(rank) and rank >= 0 for rank in ranks):
                votes.append((version, digest, tuple(ranks)))
            case _:
                raise fields.refuse(name, "a version, a digest and ranks or null", item)
    return tuple(votes)


def _mails_json(mails: Sequence[Mail]) -> list[object]:
    return [to_json(mail) for mail in mails]


def _mails(fields: Fields, name: str) -> tuple[Mail, ...]:
    mails = tuple(map(_read, fields.objects(name)))
    for mail in mails:
        if not isinstance(mail, (LogGrew, Proposed, Withdrawn, TellAnew)):
            raise fields.refuse(name, "mail that goes to all ranks", _NAMES[type(mail)])
    return mails


_FIELDS: Final[Mapping[str, tuple[Callable[[Any], object], Callable[[Fields, str], object]]]] = {
    "measurement": (StepMeasurement.to_json, lambda fields, name: StepMeasurement.from_json(fields.raw(name))),
    "plan": (_as_it_is, Fields.raw),
    **dict.fromkeys(
        ("rank", "version", "term", "position", "until", "number", "root", "sender", "told"), (_as_it_is, Fields.whole)
    ),
    **dict.fromkeys(("reached", "step"), (_as_it_is, partial(Fields.whole, at_least=-1))),
    **dict.fromkeys(("digest", "call"), (_as_it_is, partial(Fields.text, at_most=64))),
    **dict.fromkeys(("why", "error"), (_shortened, partial(Fields.text, at_most=MAX_TEXT))),
    "numbers": (_pairs, _numbers),
    "seconds": (_list, _seconds),
    "news": (_measurements_json, _measurements),
    "votes": (_list, _votes),
    "mails": (_mails_json, _mails),
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
    return _read(decode(payload, "mail"))


def _read(fields: Fields) -> Mail:
    name = fields.text("mail", at_most=16)
    if name not in _KINDS:
        raise fields.refuse("mail", f"one of {', '.join(_KINDS)}", name)
    kind: Any = _KINDS[name]
    mail = kind(**{one.name: _FIELDS[one.name][1](fields, one.name) for one in dataclasses.fields(kind)})
    fields.end()
    return mail
