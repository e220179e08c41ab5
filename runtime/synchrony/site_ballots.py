"""One site in the vote on exchanges: its first rank votes, and tells all ranks of the site what has come of it.

All of them are told at the begin of each step, so they exchange at the same step or do not. What they count is the same on all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch.distributed import Store

from adaptra.errors import StateError
from adaptra.planning.synchrony.modes import Local
from adaptra.runtime.control_store.schema import encode
from adaptra.runtime.synchrony.told import Told
from adaptra.runtime.synchrony.votes import Ballot, Votes


@dataclass(slots=True)
class Counts:
    """What a site has done, the same on all of its ranks.

    Attributes:
        trained: By stage, what it has trained on since it last took part in one of its exchanges: its weight in the next.
        updates: By stage, the number of exchanges whose update it has.
        steps: The number of its steps.
        since: The steps since it opened or joined an exchange, of whatever stage. Its first rank alone knows.
    """

    trained: list[float]
    updates: list[int]
    steps: int = 0
    since: int = 0

    def count(self, weight: float) -> None:
        """Count a step."""
        self.steps += 1
        self.since += 1
        self.trained = [one + weight for one in self.trained]

    def to_json(self) -> dict[str, Any]:
        """Return all fields as JSON values."""
        return {"trained": [*self.trained], "updates": [*self.updates], "steps": self.steps, "since": self.since}

    @staticmethod
    def fitting(saved: Any, stages: int) -> Counts | None:
        """Return the counts that :meth:`to_json` has written for this number of stages; None if these are none."""
        match saved:
            case {"trained": [*trained], "updates": [*updates], "steps": int(steps), "since": int(since), "stages": Mapping()}:
                is_one = len(trained) == len(updates) == stages
                return Counts([*map(float, trained)], [*map(int, updates)], steps, since) if is_one else None
            case _:
                return None


def waits_too_long(stage: int, steps: int, name: str, every: int) -> StateError:
    """Return the error of an exchange that has waited for this parameter's update, and for how many steps."""
    return StateError(
        f"exchange of stage {stage}: it has waited {steps} steps, as {name} has a gradient of the ones before: expected "
        f"optimizer.step() and optimizer.zero_grad() at least once in every={every} steps"
    )


class SiteBallots:
    """One rank's part in what its site does about exchanges.

    Args:
        voter: Votes for the site, on its first rank; None on the others.
        store: The keys of this site.
        local: When sites exchange.
        stages: The number of stages.
        check: Raises the error that has ended this rank's waits, if there is one.
    """

    def __init__(self, voter: Votes | None, store: Store, local: Local, stages: int, check: Callable[[], None]) -> None:
        self._voter = voter
        # Within a site no rank is two steps behind another, nor by more than the last exchanges of all stages.
        self._told = Told(store, stages + 4, check, tells=voter is not None)
        self._interval = max(1, local.every // stages)
        self._every = local.every
        self._stages = stages

    def stage_of(self, ballot: Ballot) -> int:
        """Return the stage that an exchange is of: they take turns."""
        return (ballot.number - 1) % self._stages

    def at_step(self, counts: Counts, held: Callable[[], str | None]) -> Ballot | None:
        """Return who takes part with this site in an exchange at the begin of a step; None if it takes part in none.

        Args:
            counts: What the site has done.
            held: Returns the name of a parameter with a gradient of earlier steps. While there is one, the site takes part in
                none.

        Raises:
            StateError: There has been one for too long.
        """

        def ballot() -> Ballot | None:
            voter = self._voter
            if voter is None or not counts.steps or (counts.since < self._interval and not voter.is_open()):
                return None
            if (name := held()) is not None:
                waited = counts.since - self._interval
                if waited >= self._every:
                    raise waits_too_long((voter.next - 1) % self._stages, waited, name, self._every)
                return None
            counts.since = 0
            return self._vote(voter, counts)

        return self._tell(ballot)

    def at_the_end(self, counts: Counts) -> Ballot:
        """Return who takes part with this site in the next exchange, for which it waits, as for all others that are left."""
        ballot = None
        while ballot is None:
            ballot = self._tell(lambda: None if self._voter is None else self._vote(self._voter, counts, is_last=True))
        return ballot

    def close(self) -> None:
        """Tell other sites that this one is gone, and end the connections to the store."""
        if self._voter is not None:
            self._voter.close()
        self._told.close()

    def _vote(self, voter: Votes, counts: Counts, *, is_last: bool = False) -> Ballot | None:
        while voter.is_decided():  # of what this site has missed
            voter.next += 1
        stage = (voter.next - 1) % self._stages
        return voter.vote(counts.trained[stage], counts.updates[stage], is_last=is_last)

    def _tell(self, ballot: Callable[[], Ballot | None]) -> Ballot | None:
        """Tell the other ranks of the site what its first rank knows, and return that on all of them."""

        def text() -> str:
            told = ballot()
            return encode({} if told is None else told.to_json())

        told = self._told.next(text)
        return None if told == b"{}" else Ballot.decode(told)
