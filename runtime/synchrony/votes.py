"""The vote on who takes part in an exchange, where not all need to: one voter for each site, in the store of the job.

Exchanges are numbered. A voter writes its vote for the next one. Once a rule says that these are enough, any voter writes the
ballot of that number. The first one to do so decides, so all read the same ballots. Who is in none has missed that exchange.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Final, Protocol

from torch.distributed import DistError, Store

from adaptra.json_files import Fields
from adaptra.planning.synchrony.modes import Local
from adaptra.runtime.control_store.schema import decode, encode
from adaptra.runtime.control_store.stores import Connection

_ASK_SECONDS: Final = 0.005
"""Between two looks at the votes."""


@dataclass(frozen=True, slots=True)
class Vote:
    """A site's word that it is there for an exchange.

    Attributes:
        site: The site.
        number: The exchange, from 1.
        weight: What the site has trained on since it last took part in one of the same stage.
        updates: The number of exchanges of that stage whose update it has.
        is_last: Whether it goes on only once all sites have taken part, none of them in the midst of its steps.
        is_gone: Whether it takes part in no more.
        seconds: The seconds of the last step that it has reported, where updates depend on these.
    """

    site: int
    number: int = 0
    weight: float = 0.0
    updates: int = 0
    is_last: bool = False
    is_gone: bool = False
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Ballot:
    """Who takes part in an exchange.

    Attributes:
        number: The exchange.
        votes: Their votes, by site.
    """

    number: int
    votes: tuple[Vote, ...]

    @property
    def sites(self) -> tuple[int, ...]:
        """The sites that take part."""
        return tuple(vote.site for vote in self.votes)

    def to_json(self) -> dict[str, Any]:
        """Return all fields as JSON values."""
        return {"number": self.number, "votes": [asdict(vote) for vote in self.votes]}

    @staticmethod
    def read(fields: Fields) -> Ballot:
        """Return what :meth:`to_json` has written. Errors are those of the fields."""
        ballot = Ballot(fields.whole("number", at_least=1), tuple(map(_vote_of, fields.objects("votes"))))
        fields.end()
        return ballot

    @staticmethod
    def decode(payload: bytes) -> Ballot:
        """Return a ballot of the store.

        Raises:
            ControlError: It can't be read.
        """
        return Ballot.read(decode(payload, "exchange between sites"))


def _vote_of(fields: Fields) -> Vote:
    counts = fields.whole("site"), fields.whole("number"), fields.number("weight"), fields.whole("updates")
    vote = Vote(*counts, fields.flag("is_last"), fields.flag("is_gone"), fields.number("seconds", 0.0))
    fields.end()
    return vote


class Rule(Protocol):
    """Says which votes are enough."""

    def can_decide(self, own: Vote, others: Sequence[Vote]) -> bool:
        """Return whether enough sites are left for any exchange; ``others`` are the last votes of those that are."""
        ...

    def members(self, own: Vote, others: Sequence[Vote]) -> Sequence[Vote]:
        """Return the votes of those that take part; none as long as these aren't enough. It is asked again and again."""
        ...


class Quorum:
    """A number of sites suffices, once others have been waited for. It is more than half of them.

    So of any two ballots one site is in both.

    Args:
        local: The quorum and the grace.
        sites: The number of sites.
    """

    def __init__(self, local: Local, sites: int) -> None:
        self._quorum = local.quorum or sites
        self._grace = local.grace
        self._enough: tuple[int, float] | None = None  # the number of an exchange, and since when

    def can_decide(self, own: Vote, others: Sequence[Vote]) -> bool:
        """As of :class:`Rule`. The last exchange of all takes place with whoever is left."""
        return len(others) + 1 >= (1 if own.is_last else self._quorum)

    def members(self, own: Vote, others: Sequence[Vote]) -> Sequence[Vote]:
        """As of :class:`Rule`."""
        present = [vote for vote in others if vote.number == own.number]
        now = time.monotonic()
        if len(present) + 1 >= self._quorum and not own.is_last:
            if self._enough is None or self._enough[0] != own.number:
                self._enough = own.number, now
        else:
            self._enough = None
        is_over = self._enough is not None and now >= self._enough[1] + self._grace
        return [own, *present] if is_over or len(present) == len(others) else ()


class Votes:
    """One site's voter.

    Args:
        store: The keys of the vote, shared with the other sites.
        site: This site.
        sites: The number of sites.
        rule: Says which votes are enough.
        check: Raises the error that has ended this rank's waits, if there is one.

    Attributes:
        next: The number of the next exchange, as far as this voter knows.
    """

    def __init__(self, store: Store, site: int, sites: int, rule: Rule, check: Callable[[], None]) -> None:
        self.next = 1
        self._store = Connection(store)
        self._site = site
        self._others = [other for other in range(sites) if other != site]
        self._rule = rule
        self._check = check
        self._forgotten = 1
        self._seconds = 0.0  # of the last step that it has voted for: others expect as many of the one that is under way
        self._cast(Vote(site))

    def is_open(self) -> bool:
        """Return whether another site has voted for the next exchange. A site that has missed some finds the present one."""
        while self.is_decided():
            self.next += 1
        return any(vote.number == self.next for vote in self._found())

    def is_decided(self) -> bool:
        """Return whether the next exchange is decided, without this site, which has not voted for it."""
        return self._store.check([f"ballot/{self.next}"])

    def vote(self, weight: float, updates: int, *, is_last: bool = False, seconds: float = 0.0) -> Ballot | None:
        """Vote for the next exchange, and wait until it is decided who is in it.

        Args:
            weight: What this site has trained on since it last took part in one of the same stage.
            updates: The number of exchanges of that stage whose update it has.
            is_last: Whether to wait for all sites that are not gone, as for the last exchange.
            seconds: Those of its step. Of the last exchange they are those of the step before.

        Returns:
            Who takes part; None where this site has missed it, or too few sites are left for any.
        """
        self._seconds = self._seconds if is_last else seconds
        own = Vote(self._site, self.next, weight, updates, is_last, seconds=self._seconds)
        self._cast(own)
        while (ballot := self._decided()) is None:
            others = [vote for vote in self._found() if not vote.is_gone]
            if not self._rule.can_decide(own, others):
                return None
            members = self._rule.members(own, others)
            if members:
                self.decide(Ballot(self.next, tuple(sorted(members, key=lambda vote: vote.site))))
                self._forget(min((vote.number for vote in others), default=self.next) - 1)
                continue
            self._check()
            time.sleep(_ASK_SECONDS)
        self.next += 1
        return ballot if self._site in ballot.sites else None

    def have(self, update: int) -> None:
        """Tell that this site has an update, and votes for no other one yet."""
        self._cast(Vote(self._site, update, updates=update, seconds=self._seconds))

    def decide(self, ballot: Ballot) -> None:
        """Write a ballot, unless another voter has decided before."""
        self._store.compare_set(f"ballot/{ballot.number}", "", encode(ballot.to_json()))

    def ballot(self, number: int) -> Ballot:
        """Return a ballot that is decided. This site has voted for no later one but the next."""
        return Ballot.decode(self._store.get(f"ballot/{number}"))

    def close(self) -> None:
        """Tell the others that this site is gone, and end the connection to the store."""
        with suppress(DistError):  # nobody is left to hear of it
            self._cast(Vote(self._site, is_gone=True))
        self._store.close()

    def _decided(self) -> Ballot | None:
        return self.ballot(self.next) if self.is_decided() else None

    def _cast(self, vote: Vote) -> None:
        self._store.set(f"vote/{vote.site}", encode(asdict(vote)))

    def _found(self) -> list[Vote]:
        keys = [f"vote/{other}" for other in self._others]
        return [_vote_of(decode(payload, "vote of a site")) for payload in self._store.multi_get(keys)]

    def _forget(self, until: int) -> None:
        """Remove ballots that no site reads any more, as all have voted for later ones."""
        for number in range(self._forgotten, until):
            self._store.delete_key(f"ballot/{number}")
        self._forgotten = max(self._forgotten, until)
