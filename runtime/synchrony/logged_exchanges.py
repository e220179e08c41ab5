"""The exchanges that the log of a run has, which another run makes again."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Final

from adaptra.errors import StateError
from adaptra.json_files import Fields
from adaptra.runtime.synchrony.votes import Ballot


class LoggedExchanges:
    """What is left of a rank's log.

    Args:
        log: The log.
        stages: Those whose exchanges a log of this rank has.
        site: This rank's site.
        sites: The number of sites.
        steps: The number of steps so far.

    Attributes:
        end: The number of steps before the last exchange that the log has had; that of now if there is none.

    Raises:
        StateError: It is no log of this rank.
    """

    def __init__(self, log: Sequence[Any], stages: Collection[int], site: int, sites: int, steps: int) -> None:
        self._site = site
        self._left: Final[dict[int, list[tuple[int, Ballot]]]] = {}
        for number, one in enumerate(log):
            fields = Fields(one, "log of exchanges", StateError)
            after, stage, ballot = fields.whole("steps"), fields.whole("stage"), Ballot.read(fields)
            if stage not in stages or not {site} <= {*ballot.sites} <= {*range(sites)}:
                raise StateError(
                    f"log of exchanges: entry {number} is of stage {stage} and sites {_listed(ballot.sites)}: expected this "
                    f"rank's pipe.exchange_log, of stages {_listed(stages)} and with site {site} of {sites} in each"
                )
            self._left.setdefault(after, []).append((stage, ballot))
        self.end: Final = max([steps, *self._left])

    def in_step(self, steps: int) -> list[tuple[int, Ballot]]:
        """Return the exchanges at the begin of the step after this number of them, each with its stage.

        Raises:
            StateError: The log has an exchange of all before that step.
        """
        logged, self._left[steps] = self._left.get(steps, []), []
        if any(self._is_last(ballot) for _, ballot in logged):
            raise StateError(f"a step after {steps} steps: the log that is replayed has none there")
        return logged

    def in_exchange(self, steps: int) -> tuple[int, Ballot]:
        """Return the next one of an exchange of all after this number of steps, and its stage.

        Raises:
            StateError: It has none.
        """
        self.check_exchange(steps)
        return self._left[steps].pop(0)

    def check_exchange(self, steps: int) -> None:
        """Refuse an exchange of all where the log has none.

        Raises:
            StateError: It has none after this number of steps.
        """
        logged = self._left.get(steps, [])
        if not logged or not self._is_last(logged[0][1]):
            raise StateError(f"exchange() after {steps} steps: the log that is replayed has none there")

    def _is_last(self, ballot: Ballot) -> bool:
        return any(vote.is_last for vote in ballot.votes if vote.site == self._site)


def _listed(numbers: Collection[int]) -> str:
    return ", ".join(map(str, sorted(numbers))) or "none"
