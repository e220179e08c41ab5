"""The vote on who takes part in an exchange, where a quorum suffices: one voter for each site, in the store of the job.

Exchanges are numbered. A voter writes its vote for the next one. Once all have, or a quorum has and the grace is over, any
voter writes the ballot of that number. The first one to do so decides, so all read the same ballots. Who is in none has missed
that exchange. A quorum is more than half of the sites, so of any two ballots one site is in both.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Final

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
    """

    site: int
    number: int = 0
    weight: float = 0.0
    updates: int = 0
    is_last: bool = False
    is_gone: bool = False


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
    vote = Vote(*counts, fields.flag("is_last"), fields.flag("is_gone"))
    fields.end()
    return vote


class Votes:
    """One site's voter.

    Args:
        store: The keys of the vote, shared with the other sites.
        site: This site.
        sites: The number of sites.
        local: The quorum and the grace.
        check: Raises the error that has ended this rank's waits, if there is one.

    Attributes:
        next: The number of the next exchange, as far as this voter knows.
    """

    def __init__(self, store: Store, site: int, sites: int, local: Local, check: Callable[[], None]) -> None:
        self.next = 1
        self._store = Connection(store)
        self._site = site
        self._others = [other for other in range(sites) if other != site]
        self._quorum = local.quorum or sites
        self._grace = local.grace
        self._check = check
        self._forgotten = 1
        self._cast(Vote(site))

    def is_open(self) -> bool:
        """Return whether another site has voted for the next exchange. A site that has missed some finds the present one."""
        while self.is_decided():
            self.next += 1
        return any(vote.number == self.next for vote in self._found())

    def is_decided(self) -> bool:
        """Return whether the next exchange is decided, without this site, which has not voted for it."""
        return self._store.check([self._key])

    def vote(self, weight: float, updates: int, *, is_last: bool = False) -> Ballot | None:
        """Vote for the next exchange, and wait until it is decided who is in it.

        Args:
            weight: What this site has trained on since it last took part in one of the same stage.
            updates: The number of exchanges of that stage whose update it has.
            is_last: Whether to wait for all sites that are not gone, as for the last exchange.

        Returns:
            Who takes part; None where this site has missed it, or too few sites are left for any.
        """
        own = Vote(self._site, self.next, weight, updates, is_last)
        self._cast(own)
        enough: float | None = None
        while (ballot := self._decided()) is None:
            others = [vote for vote in self._found() if not vote.is_gone]
            present = [vote for vote in others if vote.number == self.next]
            if len(others) + 1 < (1 if is_last else self._quorum):
                return None
            now = time.monotonic()
            if enough is None and len(present) + 1 >= self._quorum and not is_last:
                enough = now
            if len(present) == len(others) or (enough is not None and now >= enough + self._grace):
                votes = tuple(sorted([own, *present], key=lambda vote: vote.site))
                self._store.compare_set(self._key, "", encode(Ballot(self.next, votes).to_json()))
                self._forget(min((vote.number for vote in others), default=self.next))
                continue
            self._check()
            time.sleep(_ASK_SECONDS)
        self.next += 1
        return ballot if self._site in ballot.sites else None

    def close(self) -> None:
        """Tell the others that this site is gone, and end the connection to the store."""
        with suppress(DistError):  # nobody is left to hear of it
            self._cast(Vote(self._site, is_gone=True))
        self._store.close()

    @property
    def _key(self) -> str:
        return f"ballot/{self.next}"

    def _decided(self) -> Ballot | None:
        return Ballot.decode(self._store.get(self._key)) if self.is_decided() else None

    def _cast(self, vote: Vote) -> None:
        self._store.set(f"vote/{vote.site}", encode(asdict(vote)))

    def _found(self) -> list[Vote]:
        keys = [f"vote/{other}" for other in self._others]
        return [_vote_of(decode(payload, "vote of a site")) for payload in self._store.multi_get(keys)]

    def _forget(self, until: int) -> None:
        """Remove ballots that all sites have read, as they have voted for later ones."""
        for number in range(self._forgotten, until):
            self._store.delete_key(f"ballot/{number}")
        self._forgotten = max(self._forgotten, until)
