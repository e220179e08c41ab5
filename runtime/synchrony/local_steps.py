"""Local steps: each site updates by itself, and at times all exchange what they have learnt, one fragment after the other.

A fragment is the parameters of one stage. Its exchanges are ``every`` steps apart, at an offset of its own, so that messages
between sites spread over the interval. An exchange comes at the begin of a step, when the optimizer's update of the step before
is in the parameters::

    learnt = parameters after the last exchange - parameters now
    parameters = outer optimizer's step by the mean of learnt over the sites, by what each has trained on

Each replica of a site exchanges a part of the parameters, and brings it to the others. So a stage crosses the link between two
sites once, however many replicas they have.

Without a quorum all sites take part, each after the same number of its steps. With one, a site opens an exchange after
``every`` steps. Others join it at the begin of their next step. Who comes too late goes on, and is in a later exchange with all
that it has learnt since. It then takes the updates that it has missed from a site that has them.
"""

from __future__ import annotations

import itertools
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor
from torch.distributed import Store

from adaptra.collectives.owners import balanced_owners
from adaptra.errors import StateError
from adaptra.json_files import Fields
from adaptra.planning.synchrony.modes import Local
from adaptra.runtime.control_store.signed_store import under
from adaptra.runtime.data_parallel.gradient_averaging import Replicas
from adaptra.runtime.data_parallel.sites import Sites
from adaptra.runtime.synchrony.fragment import Fragment, check_saved
from adaptra.runtime.synchrony.votes import Ballot, Vote, Votes
from adaptra.sizes import size_text


@dataclass(frozen=True, slots=True)
class Exchange:
    """An exchange between sites.

    Attributes:
        stage: The stage whose parameters are its fragment.
        ballot: Who took part, each with its weight.
        sites: The number of sites.
        nbytes: The bytes that this rank and its counterparts each added.
        seconds: For how long this rank waited, from its vote on.
    """

    stage: int
    ballot: Ballot
    sites: int
    nbytes: int
    seconds: float

    def __str__(self) -> str:
        who = ", ".join(f"{vote.site} (weight {vote.weight:g})" for vote in self.ballot.votes)
        missing = sorted({*range(self.sites)}.difference(self.ballot.sites))
        missed = f"; missed by site {', '.join(map(str, missing))}" if missing else ""
        return (
            f"exchange {self.ballot.number} of stage {self.stage}: sites {who}{missed}; {size_text(self.nbytes)} in "
            f"{1e3 * self.seconds:.3g} ms"
        )


class LocalSteps:
    """One rank's part in the exchanges between sites. Used by the thread that runs the steps.

    Args:
        local: When sites exchange, and how many suffice.
        fragments: The parameters of each fragment that this rank has, by the fragment's stage and their names.
        stages: The number of stages.
        replicas: The workers of this site with the same stages.
        sites: The counterparts in other sites.
        store: The keys of exchanges, shared by all sites.

    Attributes:
        log: The exchanges at the begin of steps, in order: after how many steps, of which stage, and who took part.
    """

    def __init__(
        self,
        local: Local,
        fragments: Mapping[int, Mapping[str, Tensor]],
        stages: int,
        replicas: Replicas,
        sites: Sites,
        store: Store,
    ) -> None:
        self._local = local
        self._owners = {
            stage: balanced_owners({name: one.nbytes for name, one in named.items()}, replicas.count)
            for stage, named in sorted(fragments.items())
            if named
        }
        self._fragments: Final = {
            stage: Fragment(fragments[stage], [name for name, owner in owners.items() if owner == replicas.index], local.outer)
            for stage, owners in self._owners.items()
        }
        self._offsets = {stage: stage * local.every // stages for stage in self._fragments}
        self._replicas = replicas
        self._sites = sites
        self._store = store
        self._votes: dict[int, Votes] = {}
        self._steps = 0
        self._script: dict[tuple[int, int], list[Ballot]] | None = None
        self.log: list[dict[str, Any]] = []
        # Steps since an exchange was opened or joined; each fragment begins as if one had been at its offset.
        self._since = {stage: -offset % local.every for stage, offset in self._offsets.items()}

    def __str__(self) -> str:
        """How this rank's site exchanges, and how far it is."""
        quorum, every = self._local.quorum, self._local.every
        done = [f"{one.updates} of stage {stage}" for stage, one in self._fragments.items()]
        who = "all sites" if quorum is None else f"at least {quorum} sites, {self._local.grace:g} s after these are there"
        return (
            f"site {self._sites.index} of {self._sites.count} updates by itself, and exchanges with {who} every {every} steps; "
            f"exchanges so far: {', '.join(done) or 'none'}"
        )

    def begin(self, check: Callable[[], None]) -> list[Exchange]:
        """Exchange the fragments whose turn it is, at the begin of a step, and return their exchanges.

        Args:
            check: Raises the error that has ended this rank's waits, if there is one.

        Raises:
            PeerLostError: A rank of this site or of another one is lost.
        """
        exchanges: list[Exchange] = []
        for stage in self._fragments if self._steps else ():
            began = time.monotonic()
            if self._script is not None:
                ballot = self._logged(stage).pop(0) if self._is_next(stage, is_last=False) else None
            elif self._local.quorum is not None:
                ballot = self._by_quorum(stage, check)
            else:
                is_due = (self._steps - self._offsets[stage]) % self._local.every == 0
                ballot = self._of_all(stage) if is_due else None
            if ballot is not None:
                exchanges += self._exchange(stage, ballot, began)
        return exchanges

    def exchange_all(self, check: Callable[[], None]) -> list[Exchange]:
        """Exchange all fragments with all sites, of which all ranks call it between two steps, and return their exchanges.

        With a quorum a site may be in the midst of its steps when others call it. They exchange with it until it comes here.

        Raises:
            PeerLostError: As :meth:`begin`.
        """
        exchanges: list[Exchange] = []
        for stage in self._fragments:
            while True:
                began = time.monotonic()
                if self._script is not None:
                    self._require_last(stage)
                    ballot = self._logged(stage).pop(0)
                elif self._local.quorum is not None:
                    ballot = self._voted(stage, check, is_last=True)
                else:
                    ballot = self._of_all(stage)
                if ballot is not None:
                    exchanges += self._exchange(stage, ballot, began)
                    if all(vote.is_last for vote in ballot.votes):
                        break
        return exchanges

    def check_exchange(self) -> None:
        """Refuse an exchange of all at a point where the log that is replayed has none.

        Raises:
            StateError: It has none.
        """
        for stage in self._fragments if self._script is not None else ():
            self._require_last(stage)

    def replay(self, log: Sequence[Any]) -> None:
        """Exchange as a run did whose :attr:`log` this is, from the next step on. All ranks give their own.

        Raises:
            StateError: It is no such log. Nothing changes then.
        """
        script: dict[tuple[int, int], list[Ballot]] = {}
        for one in log:
            fields = Fields(one, "log of exchanges", StateError)
            script.setdefault((fields.whole("steps"), fields.whole("stage")), []).append(Ballot.read(fields))
        self._script = script

    def count(self, weight: float) -> None:
        """Count a step, and what this rank's replica has trained on in it."""
        self._steps += 1
        for stage, fragment in self._fragments.items():
            fragment.trained += weight
            self._since[stage] += 1

    def restart(self, check: Callable[[], None]) -> None:
        """Take the parameters as they are for those after an exchange, since all sites have the same.

        All ranks of the job call it, between two steps; ``check`` as of :meth:`begin`.
        """
        for stage, fragment in self._fragments.items():
            fragment.begin()
            if self._local.quorum is not None:
                self._voter(stage, check)  # who comes late to the first exchange has a vote that others can read

    def state(self) -> dict[str, Any]:
        """Return what this rank needs to go on after a restart: the tensors themselves, by the fragments' stages."""
        stages = {stage: {"since": self._since[stage], **one.saved()} for stage, one in self._fragments.items()}
        return {"steps": self._steps, "stages": stages}

    def load(self, state: Any) -> None:
        """Go on from the :meth:`state` of this rank.

        Raises:
            StateError: It is no such state, or of other stages or parameters. Nothing changes then.
        """
        match state:
            case {"steps": int(steps), "stages": {**stages}} if {*stages} == {*self._fragments}:
                since = [check_saved(self._fragments[stage], one) for stage, one in stages.items()]
            case _:
                raise StateError(
                    f"outer state: {state!r:.60}: expected that of this rank's pipe.outer_state_dict(), of stages "
                    f"{', '.join(map(str, self._fragments))}"
                )
        self._steps, self._since = steps, dict(zip(stages, since, strict=True))
        for stage, one in stages.items():
            self._fragments[stage].load(one)

    def close(self) -> None:
        """End the connections to the store."""
        for votes in self._votes.values():
            votes.close()

    def _exchange(self, stage: int, ballot: Ballot, began: float) -> list[Exchange]:
        fragment, total = self._fragments[stage], sum(vote.weight for vote in ballot.votes)
        self.log.append({"steps": self._steps, "stage": stage, **ballot.to_json()})
        members = self._sites.among(ballot.sites)
        if not total:  # nobody has learnt anything; but each has to know of this vote before the next one ends
            members.any_has(False)
            return []
        learnt = fragment.learnt()
        newest = max(vote.updates for vote in ballot.votes)
        if any(vote.updates < newest for vote in ballot.votes):
            source = next(index for index, vote in enumerate(ballot.votes) if vote.updates == newest)
            fragment.take(members.values_of(source, fragment.state), newest)
        own = ballot.votes[ballot.sites.index(self._sites.index)]
        for one in learnt:
            one.mul_(own.weight / total)
        if learnt:
            members.combine_gradients(learnt, learnt.__getitem__, mean=False)
        fragment.update(learnt)
        parameters, owners = fragment.parameters, self._owners[stage]
        self._replicas.bring_from_owners([one.detach() for one in parameters.values()], [owners[name] for name in parameters])
        return [Exchange(stage, ballot, self._sites.count, fragment.nbytes, time.monotonic() - began)]

    def _of_all(self, stage: int) -> Ballot:
        """Return that all take part, with what each has trained on."""
        fragment = self._fragments[stage]
        told = self._sites.everyone.gather([_bits(self._weight(fragment)), fragment.updates])
        votes = [Vote(site, updates + 1, _of_bits(bits), updates, True) for site, (bits, updates) in enumerate(told)]
        return Ballot(max(vote.number for vote in votes), tuple(votes))

    def _by_quorum(self, stage: int, check: Callable[[], None]) -> Ballot | None:
        """Return who takes part with this site in an exchange now; None if it takes part in none."""
        fragment, voter = self._fragments[stage], self._voter(stage, check)
        wants = voter is not None and fragment.trained > 0 and (self._since[stage] >= self._local.every or voter.is_open())
        return self._voted(stage, check) if self._replicas.any_has(wants) else None

    def _voted(self, stage: int, check: Callable[[], None], *, is_last: bool = False) -> Ballot | None:
        """Return who takes part with this site in the next exchange; None if it has missed it."""
        fragment, voter, ballot = self._fragments[stage], self._voter(stage, check), None
        weight = self._weight(fragment)
        if voter is not None:
            ballot = voter.vote(weight, fragment.updates, is_last=is_last)
        self._since[stage] = 0
        return self._told(ballot)

    def _told(self, ballot: Ballot | None) -> Ballot | None:
        """Return what the voter of this site knows, on all of its replicas."""
        if self._replicas.count == 1:
            return ballot
        rows = [[0] * 4 for _ in range(self._sites.count)]
        for vote in () if ballot is None else ballot.votes:
            rows[vote.site] = [1, _bits(vote.weight), vote.updates, int(vote.is_last)]
        number, *told = self._replicas.largest([0 if ballot is None else ballot.number, *itertools.chain(*rows)])
        votes = [
            Vote(site, number, _of_bits(weight), updates, bool(is_last))
            for site, (is_in, weight, updates, is_last) in enumerate(zip(*[iter(told)] * 4, strict=True))
            if is_in
        ]
        return Ballot(number, tuple(votes)) if number else None

    def _require_last(self, stage: int) -> None:
        if not self._is_next(stage, is_last=True):
            raise StateError(f"exchange() after {self._steps} steps: the log that is replayed has none of stage {stage} there")

    def _is_next(self, stage: int, *, is_last: bool) -> bool:
        own = [vote.is_last for one in self._logged(stage)[:1] for vote in one.votes if vote.site == self._sites.index]
        return own == [is_last]

    def _logged(self, stage: int) -> list[Ballot]:
        assert self._script is not None, "there is a log"
        return self._script.get((self._steps, stage), [])

    def _voter(self, stage: int, check: Callable[[], None]) -> Votes | None:
        """Return this site's voter for a fragment; None on other ranks than the first that has the fragment."""
        if self._replicas.index > 0:
            return None
        if stage not in self._votes:
            store = under(f"exchange of stage {stage}", self._store)
            self._votes[stage] = Votes(store, self._sites.index, self._sites.count, self._local, check)
        return self._votes[stage]

    def _weight(self, fragment: Fragment) -> float:
        """Return what this site has trained on, the same on all of its replicas."""
        if self._replicas.count == 1:
            return fragment.trained
        return sum(_of_bits(bits) for (bits,) in self._replicas.gather([_bits(fragment.trained)]))


def _bits(number: float) -> int:
    """Return the bits of a number as a whole one, which ranks can gather."""
    (bits,) = struct.unpack("<q", struct.pack("<d", number))
    return bits


def _of_bits(bits: int) -> float:
    (number,) = struct.unpack("<d", struct.pack("<q", bits))
    return number
