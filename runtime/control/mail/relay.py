"""The relay: by which hops mail of the control plane travels, and what travels together.

It lies below the protocol. A :class:`adaptra.runtime.control.agreement.participant.Participant` sends mail to ranks, and the
relay gives it to the mailbox. In a small job that is all. In a large one the ranks are a tree with the coordinator as its root:

- Mail for all ranks goes down the tree, each rank sending it on to its children.
- Reports of steps go up in every ``period``-th step. A rank waits for those of its children and sends one for all ranks below.
  It carries only what is news, see :mod:`adaptra.runtime.detection.news`.
- Confirmations of a plan go up once all ranks below have confirmed it, or with the next report.

Waiting costs nothing, because the log grows only with reports of all ranks, and a plan needs the confirmations of all.

Everything else is direct: questions to the coordinator and its answers, the broadcast of a term, refusals and failures. So a
rank whose mail was lost recovers as without a tree: it asks the coordinator, which learns its progress and answers. Until its
next report its confirmations are direct as well. What comes for another coordinator than a rank's own is sent to that one
directly. A rank that turns to another coordinator drops what it has gathered, since every rank then joins that one.

``tests/runtime/control/test_protocol.py`` runs the protocol with relays in between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

from adaptra.errors import ControlError
from adaptra.runtime.control.mail.mail import (
    Confirmed,
    Gathered,
    Joined,
    LogGrew,
    Mail,
    Proposed,
    Reports,
    Spread,
    TellAnew,
    Vote,
    Withdrawn,
)
from adaptra.runtime.control_store.digest_tree import FANOUT, children_of, parent_of, subtree_of
from adaptra.runtime.measuring.measurement import StepMeasurement


@dataclass(frozen=True, slots=True)
class RelayOptions:
    """How mail travels; equal on all ranks.

    Attributes:
        direct: The most ranks of a job whose mail is all direct, and who report every step at once.
        fan_out: The most children of a rank.
        period: The number of steps from one report to the next.
    """

    direct: int = 64
    fan_out: int = FANOUT
    period: int = 5


class Teller(Protocol):
    """Chooses news: :class:`adaptra.runtime.detection.news.NewsTeller`."""

    @property
    def told(self) -> int:
        """The step whose measurement was told last."""
        ...

    def tell(self, measurements: Sequence[StepMeasurement], /) -> tuple[StepMeasurement, ...]:
        """Return the measurements that are news."""
        ...

    def forget(self) -> None:
        """Tell the next measurement in full."""
        ...


class Reader(Protocol):
    """Restores measurements: :class:`adaptra.runtime.detection.news.NewsReader`."""

    def read(
        self,
        ranks: Sequence[int],
        step: int,
        told: int,
        seconds: Sequence[float],
        news: Sequence[StepMeasurement],
        /,
    ) -> tuple[StepMeasurement, ...] | None:
        """Return the measurements of the last steps, or None if earlier news were missed."""
        ...


class Relay:
    """One rank's relay, of a job with more than ``options.direct`` ranks. Only the control thread may use it.

    Args:
        rank: This rank.
        ranks: The number of ranks.
        options: How mail travels.
        coordinator: The rank that coordinates, as far as this one knows.
        push: Sends mail to a rank's mailbox.
        teller: Chooses what is news of this rank's measurements.
        reader: Restores the measurements while this rank coordinates.
    """

    def __init__(
        self,
        rank: int,
        ranks: int,
        options: RelayOptions,
        coordinator: Callable[[], int],
        push: Callable[[int, Mail], None],
        teller: Teller,
        reader: Reader,
    ) -> None:
        self._rank = rank
        self._ranks = ranks
        self._options = options
        self._coordinator = coordinator
        self._push = push
        self._teller = teller
        self._reader = reader
        self._root = 0
        self._has_asked = False
        self._asked_anew = -1
        self._outbox: list[tuple[Mail, list[int]]] = []
        self._steps: tuple[StepMeasurement, ...] = ()
        self._parts: dict[tuple[int, int], tuple[Gathered, ...]] = {}
        self._sent = -1
        self._votes: dict[tuple[int, str], frozenset[int]] = {}

    @property
    def period(self) -> int:
        """The number of steps from one report to the next, by which the log has to be further ahead."""
        return self._options.period

    def send(self, rank: int, mail: Mail) -> None:
        """Send mail to a rank, with the next :meth:`flush` or later."""
        self._turn()
        if isinstance(mail, Joined):
            self._has_asked = True
        if isinstance(mail, Confirmed) and rank == self._root != self._rank and not self._has_asked:
            self._vote(mail.version, mail.digest, (self._rank,))
        elif self._outbox and self._outbox[-1][0] == mail:
            self._outbox[-1][1].append(rank)
        else:
            self._outbox.append((mail, [rank]))

    def ran(self, measurement: StepMeasurement) -> list[Reports]:
        """Take the measurement of the next step that this rank has run.

        Returns:
            Reports for this rank itself, if it coordinates.
        """
        self._steps += (measurement,)
        step = measurement.step
        if (step + 1) % self._options.period:
            return []
        self._turn()
        self._has_asked = False
        steps, self._steps = self._steps, ()
        news = self._teller.tell(steps)
        seconds = tuple(round(one.seconds, 6) for one in steps)
        report = Gathered(self._root, self._rank, step, self._teller.told, seconds, news, ())
        if self._root == self._rank:
            return [self._reports((self._rank,), report)]
        self._gather(report)
        return []

    def take(self, mail: Gathered | Spread | TellAnew) -> list[Confirmed | Reports | Mail]:
        """Take mail that travels by the tree, and return the mail in it for this rank.

        Raises:
            ControlError: The mail names a rank that does not exist.
        """
        self._turn()
        match mail:
            case TellAnew():
                self._teller.forget()
                return []
            case Spread(root, mails):
                self._check(root)
                for child in self._children(root):
                    self._push(child, mail)
                return list(mails)
            case Gathered(root, sender, step):
                self._check(root, sender, *chain.from_iterable(ranks or () for _, _, ranks in mail.votes))
                if root != self._rank:
                    if root == self._root and sender in self._children(root):
                        self._gather(mail)
                    else:
                        self._push(root, mail)
                    return []
                ranks = self._below(root, sender)
                confirmed = [
                    Confirmed(rank, version, digest) for version, digest, voters in mail.votes for rank in voters or ranks
                ]
                return [*confirmed, *([self._reports(ranks, mail)] if step >= 0 else [])]

    def flush(self) -> None:
        """Send what is to be sent now. Called once all mail that one event brings about has been given to :meth:`send`."""
        self._turn()
        outbox, self._outbox = self._outbox, []
        spread: list[Mail] = []
        for mail, receivers in outbox:
            is_for_all = len(receivers) - (self._rank in receivers) == self._ranks - 1
            if is_for_all and isinstance(mail, (LogGrew, Proposed, Withdrawn, TellAnew)):
                spread.append(mail)
                receivers = [self._rank] if self._rank in receivers else []
            for rank in receivers:
                self._push(rank, mail)
        if spread:
            for child in self._children(self._rank):
                self._push(child, Spread(self._rank, tuple(spread)))
        if self._root != self._rank:
            self._send_up()

    def _turn(self) -> None:
        """Drop what was gathered for a former coordinator."""
        root = self._coordinator()
        if root != self._root:
            self._root = root
            self._parts, self._votes, self._sent = {}, {}, -1
            self._teller.forget()

    def _reports(self, ranks: tuple[int, ...], report: Gathered) -> Reports:
        """Restore the measurements of a report. If news were missed, have all ranks tell in full, once a step."""
        measurements = self._reader.read(ranks, report.step, report.told, report.seconds, report.news)
        if measurements is None and report.step > self._asked_anew:
            self._asked_anew = report.step
            self._teller.forget()
            for rank in range(self._ranks):
                if rank != self._rank:
                    self.send(rank, TellAnew())
        return Reports(ranks, report.step, measurements or ())

    def _gather(self, report: Gathered) -> None:
        for version, digest, ranks in report.votes:
            self._vote(version, digest, self._below(report.root, report.sender) if ranks is None else ranks)
        if report.step > self._sent:
            key = (report.step, len(report.seconds))
            others = tuple(part for part in self._parts.get(key, ()) if part.sender != report.sender)
            self._parts[key] = (*others, report)

    def _vote(self, version: int, digest: str, ranks: Sequence[int]) -> None:
        self._votes[version, digest] = self._votes.get((version, digest), frozenset()) | set(ranks)

    def _send_up(self) -> None:
        parent = (parent_of(self._place(self._root), self._options.fan_out) + self._root) % self._ranks
        expected = len(self._children(self._root)) + 1
        for key in sorted(key for key, parts in self._parts.items() if len(parts) == expected):
            parts = sorted(self._parts[key], key=lambda part: part.sender)
            seconds = tuple(map(max, zip(*(part.seconds for part in parts), strict=True)))
            news = tuple(chain.from_iterable(part.news for part in parts))
            votes = self._take_votes(is_partial=True)
            self._push(parent, Gathered(self._root, self._rank, key[0], sum(part.told for part in parts), seconds, news, votes))
            self._sent = key[0]
        self._parts = {key: parts for key, parts in self._parts.items() if key[0] > self._sent}
        if votes := self._take_votes(is_partial=False):
            self._push(parent, Gathered(self._root, self._rank, -1, 0, (), (), votes))

    def _take_votes(self, *, is_partial: bool) -> tuple[Vote, ...]:
        """Remove and return the confirmations by all ranks below, and those by some of them if they are wanted."""
        size = sum(map(len, subtree_of(self._place(self._root), self._ranks, self._options.fan_out)))
        taken: list[Vote] = []
        for (version, digest), ranks in sorted(self._votes.items()):
            if len(ranks) == size:
                taken.append((version, digest, None))
            elif is_partial:
                taken.append((version, digest, tuple(sorted(ranks))))
        for version, digest, _ in taken:
            del self._votes[version, digest]
        return tuple(taken)

    def _place(self, root: int, rank: int | None = None) -> int:
        """Return the number of a rank in the tree of a root, whose own is 0."""
        return ((self._rank if rank is None else rank) - root) % self._ranks

    def _children(self, root: int) -> list[int]:
        places = children_of(self._place(root), self._ranks, self._options.fan_out)
        return [(place + root) % self._ranks for place in places]

    def _below(self, root: int, rank: int) -> tuple[int, ...]:
        """Return a rank and all ranks below it in the tree of a root, or that rank alone if it is the root."""
        if rank == root:
            return (rank,)
        levels = subtree_of(self._place(root, rank), self._ranks, self._options.fan_out)
        return tuple((place + root) % self._ranks for place in chain.from_iterable(levels))

    def _check(self, *ranks: int) -> None:
        for rank in ranks:
            if rank >= self._ranks:
                raise ControlError(f"mail of rank {rank}: expected ranks 0..{self._ranks - 1}")
