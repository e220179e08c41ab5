"""Mail between the control threads of a pipeline's ranks: one queue per rank in the common store.

A thread of its own fetches a rank's mail, since each takes the way to the store and back, and the control thread takes what has
arrived. Sending is one request without an answer, so it never waits for another rank. A client of a TCPStore that waits holds
up all other users of the same client, so waiting has a client of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, Final

from torch.distributed import Store

from adaptra.runtime.measurement import StepMeasurement
from adaptra.runtime.schema import Fields, decode, encode
from adaptra.runtime.stores import Connection, clone, renewed

PATIENCE: Final = timedelta(days=30)
"""A rank without mail waits for so long; the end of a wait is mail, never a timeout."""

MAX_TEXT: Final = 10_000
"""The longest explanation that travels, in characters."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A rank has run a step."""

    measurement: StepMeasurement


@dataclass(frozen=True, slots=True)
class Proposed:
    """The coordinator proposes a plan: the JSON of a :class:`adaptra.runtime.plan.Plan`, unchecked."""

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
    """What a rank was given in a call: a number for each tensor, see :mod:`adaptra.runtime.same_rows`.

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


class Mailbox:
    """One rank's mail.

    Args:
        store: The pipeline's store. It is cloned, so that waiting here holds up nobody.
        rank: This rank.
    """

    def __init__(self, store: Store, rank: int) -> None:
        self._rank = rank
        self._sending = Connection(store)
        self._posting = Connection(store)
        self._waiting = clone(store)
        self._waiting.set_timeout(PATIENCE)
        self._arrived: SimpleQueue[bytes | Wake | Exception] = SimpleQueue()
        self._is_closed = threading.Event()
        self._fetching = self._fetch()

    @property
    def store(self) -> Connection:
        """The client that sends: what is written through it is there before mail sent after it by the same thread."""
        return self._sending

    def send(self, rank: int, mail: Mail) -> None:
        """Send mail to a rank, in order. Only the control thread may, whose other requests to the store this mail follows.

        If the connection breaks, mail sent before may be lost, and this mail may arrive twice.

        Raises:
            torch.distributed.DistError: The store is lost.
        """
        _push(self._sending, rank, encode(to_json(mail)))

    def post(self, rank: int, mail: Mail) -> None:
        """Send mail to a rank as :meth:`send` does, from any thread, without waiting for anything.

        It has a client of its own: another's requests wait for answers, and with a store that is out of reach for ever.
        """
        _push(self._posting, rank, encode(to_json(mail)))

    def wake(self) -> None:
        """Have :meth:`receive` return :class:`Wake`, without the store. Any thread may."""
        self._arrived.put(Wake())

    def receive(self) -> Mail | Wake:
        """Wait for the next mail. Only one thread may.

        Raises:
            ControlError: What arrived is not mail.
            torch.distributed.DistNetworkError: The connection broke; mail may be lost. See :meth:`reconnect`.
            torch.distributed.DistError: The store is lost.
        """
        match self._arrived.get():
            case Wake() as wake:
                return wake
            case bytes() as payload:
                return from_json(payload)
            case error:
                raise error

    def reconnect(self) -> None:
        """Receive through a new connection, once :meth:`receive` has raised.

        Raises:
            torch.distributed.DistError: The store can't be reached.
        """
        self._waiting = renewed(self._waiting)
        self._fetching = self._fetch()

    def close(self, timeout: float) -> None:
        """Fetch no more mail; what has arrived can still be received. Waits at most ``timeout`` seconds for what is under way.

        Raises:
            torch.distributed.DistError: The store is lost.
        """
        self._is_closed.set()
        if self._fetching.is_alive():
            _push(self._posting, self._rank, "")
            self._fetching.join(timeout)

    def _fetch(self) -> threading.Thread:
        """Begin to fetch mail, until the connection breaks."""
        thread = threading.Thread(target=self._run, args=(self._waiting,), name=f"adaptra-mail-{self._rank}", daemon=True)
        thread.start()
        return thread

    def _run(self, store: Store) -> None:
        try:
            while True:
                payload = store.queue_pop(f"mail/{self._rank}")
                if self._is_closed.is_set():
                    return
                self._arrived.put(payload)
        except Exception as error:
            self._arrived.put(error)


def _numbers(fields: Fields) -> dict[str, int]:
    found: dict[str, int] = {}
    for item in fields.items("numbers"):
        match item:
            case [str(name), int(number)]:
                found[name] = number
            case _:
                raise fields.refuse("numbers", "a name and a whole number", item)
    return found


def _push(connection: Connection, rank: int, text: str) -> None:
    connection.push(f"mail/{rank}", text)
    # HashStore's queue_push wakes one waiting thread, whichever queue that waits for; its set wakes all.
    connection.set("mail/bell", "")
