"""One pipeline's reports for updates in x-order: its first rank votes, and tells the others what has come of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed import Store

from adaptra.errors import StateError
from adaptra.json_files import Fields
from adaptra.planning.synchrony.modes import XOrder
from adaptra.runtime.control_store.schema import decode, encode
from adaptra.runtime.control_store.signed_store import under
from adaptra.runtime.data_parallel.sites import Sites
from adaptra.runtime.synchrony.reported_votes import Reported
from adaptra.runtime.synchrony.told import Told
from adaptra.runtime.synchrony.votes import Ballot, Vote, Votes


@dataclass(frozen=True, slots=True)
class Update:
    """An update, as the ranks of one pipeline know it.

    Attributes:
        ballot: Which replicas are in it. Their number of updates is that of the parameters that they have computed with.
        replicas: The number of all replicas.
        source: The replica whose state this one takes first; None where it has that state.
    """

    ballot: Ballot
    replicas: int
    source: int | None

    @property
    def number(self) -> int:
        """The number of the update, from 1."""
        return self.ballot.number

    def to_json(self) -> dict[str, Any]:
        """Return what a replay needs, as JSON values."""
        return {"source": self.source, **self.ballot.to_json()}

    @staticmethod
    def read(fields: Fields, sites: Sites) -> Update:
        """Return what :meth:`to_json` has written. Errors are those of the fields."""
        source = fields.whole_or_none("source")
        return Update(Ballot.read(fields), sites.count, source)

    def __str__(self) -> str:
        parts = [
            f"{vote.site}{f' ({age} old)' if (age := self.number - 1 - vote.updates) else ''}" for vote in self.ballot.votes
        ]
        taken = "" if self.source is None else f"; state before it from replica {self.source}"
        return f"update {self.number}: replicas {', '.join(parts)} of {self.replicas}{taken}"


class UpdateReports:
    """One rank's end of it.

    Args:
        order: Which reports are enough.
        sites: The ranks with the same stages in other replicas.
        store: The keys of updates, shared by all replicas.
        rank: This rank in its pipeline.
    """

    def __init__(self, order: XOrder, sites: Sites, store: Store, rank: int) -> None:
        self._order = order
        self._sites = sites
        self._store = store
        self._rank = rank
        self._rounds = 0
        self._voter: Votes | None = None
        self._told: Told | None = None
        self._script: deque[Update] | None = None

    def restart(self, check: Callable[[], None]) -> None:
        """Begin again at update 1. All ranks of the job call it."""
        self.close()
        self._rounds += 1
        store, own = under(f"round {self._rounds}", self._store), self._sites.index
        if self._rank == 0:
            self._voter = Votes(store, own, self._sites.count, Reported(self._order), check)
        # Ranks of a pipeline meet in each step.
        self._told = Told(under(f"replica {own}", store), 4, check, tells=self._rank == 0)

    def report(self, weight: float, updates: int, seconds: float) -> Update:
        """Return the update that a step's gradients are in, once it is decided.

        Args:
            weight: What this replica has trained on in the step.
            updates: The number of the update whose parameters it has computed with.
            seconds: Those of the step.

        Raises:
            StateError: The log that is replayed has no update here, or one of a step with another weight.
            PeerLostError: A rank is lost.
        """
        if self._script is not None:
            self.check_next(is_last=False)
            update = self._script.popleft()
            logged = self._own(update).weight
            if logged != weight:
                raise StateError(
                    f"update {update.number}: replica {self._sites.index} has trained on a weight of {weight} in this step, "
                    f"and the log that is replayed has {logged}: expected the batches of that run, as gradients count by weight"
                )
            return update
        return self._next(weight, updates, seconds=seconds)

    def meet(self, updates: int) -> Update:
        """Wait for all replicas that are left; raises as :meth:`report`.

        Args:
            updates: The number of the last update that this replica has.
        """
        if self._script is not None:
            self.check_next(is_last=True)
            return self._script.popleft()
        return self._next(0.0, updates, is_last=True)

    def have(self, update: int) -> None:
        """Tell the other replicas that this one has an update, or will have it before its next step."""
        if self._voter is not None:
            self._voter.have(update)

    def replay(self, log: Sequence[Any], updates: int) -> None:
        """Make the updates of a log from now on.

        Args:
            log: What :meth:`Update.to_json` has returned of each.
            updates: The number of the last update that this replica has, behind which they are.

        Raises:
            StateError: It is no such log. Nothing changes then.
        """
        script = deque(Update.read(Fields(one, "log of updates", StateError), self._sites) for one in log)
        own, count = self._sites.index, self._sites.count
        for update in script:
            sites = update.ballot.sites
            if own not in sites or not {*sites, own if update.source is None else update.source} <= {*range(count)}:
                raise StateError(
                    f"replay: update {update.number} of the log has replicas {', '.join(map(str, sites))}: expected the log of "
                    f"replica {own} of {count}"
                )
            has = self._own(update).updates
            begins_anew = update is not script[0] and update.number == 1  # as it does with a loaded state
            if has != (0 if begins_anew else updates):
                raise StateError(
                    f"replay: update {update.number} of the log follows update {has} of replica {own}, which has update "
                    f"{updates} there: expected the whole log of a run, before the first step"
                )
            updates = update.number
        self._script = script

    def check_next(self, *, is_last: bool) -> None:
        """Refuse a step, or an exchange of all, where a log that is replayed has none.

        Raises:
            StateError: It has none.
        """
        if self._script is None:
            return
        votes = self._script[0].ballot.votes if self._script else ()
        if [vote.is_last for vote in votes if vote.site == self._sites.index] != [is_last]:
            what = "exchange()" if is_last else "a step"
            raise StateError(f"{what} with {len(self._script)} updates to come: the log that is replayed has none there")

    def close(self) -> None:
        """Tell the other replicas that this one makes no more reports."""
        for one in (self._voter, self._told):
            if one is not None:
                one.close()

    def _own(self, update: Update) -> Vote:
        """Return this replica's vote in an update that it is in."""
        return update.ballot.votes[update.ballot.sites.index(self._sites.index)]

    def _next(self, weight: float, updates: int, *, is_last: bool = False, seconds: float = 0.0) -> Update:
        def text() -> str:
            assert self._voter is not None, "the first rank has a voter"
            ballot = None
            while ballot is None:  # as long as others make updates without this replica
                ballot = self._voter.vote(weight, updates, is_last=is_last, seconds=seconds)
            return encode(Update(ballot, self._sites.count, self._source(ballot, updates)).to_json())

        assert self._told is not None, "updates have begun"
        return Update.read(decode(self._told.next(text), "update of some replicas"), self._sites)

    def _source(self, ballot: Ballot, updates: int) -> int | None:
        """Return the replica from which this one takes the state before an update; None if it has that."""
        before = ballot.number - 1
        if before == 0:
            return None if self._sites.index == 0 else 0
        if updates == before:
            return None
        present = [vote.site for vote in ballot.votes if vote.updates == before]
        assert self._voter is not None, "the first rank has a voter"
        return present[0] if present else self._voter.ballot(before).sites[0]
