"""Local steps: each site updates by itself, and at times all exchange what they have learnt, one fragment after the other.

A fragment is the parameters of one stage. Its exchanges are ``every`` steps apart, at an offset of its own, so that messages
between sites spread over the interval. An exchange comes at the begin of a step, when the optimizer's update of the step before
is in the parameters::

    learnt = parameters after the last exchange - parameters now
    parameters = outer optimizer's step by the mean of learnt over the sites, by what each has trained on

Each replica of a site exchanges a part of the parameters, and brings it to the others. So a stage crosses the link between two
sites once, however many replicas they have.

Without a quorum all sites take part, each after the same number of its steps. With one, exchanges are numbered over all stages,
which take turns. The first rank of a site votes for it, and tells the site's other ranks at the begin of each step. A site
opens an exchange after its share of ``every`` steps, others join it at the begin of their next one. Who comes too late goes on,
and is in a later exchange with all that it has learnt since. It then takes the updates that it has missed from a site that has
them.

A step adds to gradients of earlier ones where these are accumulated. An exchange would change the parameters under them, so one
that is due waits for the update.

If each stage had a vote of its own, two sites could each wait for the other's vote of another stage.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from torch import Tensor
from torch.distributed import Store

from adaptra.checks import is_whole
from adaptra.collectives.owners import balanced_owners
from adaptra.errors import StateError
from adaptra.planning.synchrony.modes import Local
from adaptra.runtime.control_store.signed_store import under
from adaptra.runtime.data_parallel.gradient_averaging import Replicas
from adaptra.runtime.data_parallel.held_gradients import HeldGradients
from adaptra.runtime.data_parallel.sites import Sites
from adaptra.runtime.synchrony.fragment import Fragment, check_saved
from adaptra.runtime.synchrony.logged_exchanges import LoggedExchanges
from adaptra.runtime.synchrony.site_ballots import Counts, SiteBallots, waits_too_long
from adaptra.runtime.synchrony.votes import Ballot, Quorum, Vote, Votes
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
        votes: Whether this rank votes for its site, of which one does.

    Attributes:
        log: This site's exchanges in order: after how many of its steps, of which stage, and who took part. Without a quorum
            only those of this rank's stages.
    """

    def __init__(
        self,
        local: Local,
        fragments: Mapping[int, Mapping[str, Tensor]],
        stages: int,
        replicas: Replicas,
        sites: Sites,
        store: Store,
        *,
        votes: bool,
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
        self._replicas = replicas
        self._sites = sites
        self._votes_here = votes
        self._store = store
        self._site: SiteBallots | None = None
        self._counts = Counts([0.0] * stages, [0] * stages)
        self._script: LoggedExchanges | None = None
        self._held = HeldGradients({name: one for named in fragments.values() for name, one in named.items()})
        self._waiting: set[int] = set()  # the stages whose exchange is due after the update
        self._has_exchanged_all = False
        self._loaded: Literal["", "loaded", "lost"] = ""  # since the last step
        self.log: list[dict[str, Any]] = []

    def __str__(self) -> str:
        """How this rank's site exchanges, and how far it is."""
        quorum, every = self._local.quorum, self._local.every
        done = [f"{self._counts.updates[stage]} of stage {stage}" for stage in self._fragments]
        who = "all sites" if quorum is None else f"at least {quorum} sites, {self._local.grace:g} s after these are there"
        return (
            f"site {self._sites.index} of {self._sites.count} updates by itself, and exchanges with {who} every {every} steps; "
            f"exchanges so far: {', '.join(done) or 'none'}"
        )

    def begin(self) -> list[Exchange]:
        """Exchange the fragments whose turn it is, at the begin of a step, and return their exchanges.

        Raises:
            PeerLostError: A rank of this site or of another one is lost.
            StateError: Without a quorum sites have made different steps. Or a log is replayed that has other steps. Or there
                are gradients of steps before an exchange, or have been for too long.
        """
        exchanges: list[Exchange] = []
        self._refuse_lost()
        self._loaded = ""
        if self._has_exchanged_all:
            self._held.refuse("a step after exchange()")
            self._has_exchanged_all = False
        if self._script is not None:
            logged = self._script.in_step(self._counts.steps)
            self._check_end(self._script, {stage for stage, _ in logged})
            for stage, ballot in logged:
                self._held.refuse(f"exchange {ballot.number}")
                self._waiting.discard(stage)
                exchanges += self._exchange_as_logged(stage, ballot)
        elif self._site is not None:
            began, ballot = time.monotonic(), self._site.at_step(self._counts, self._held.first)
            if ballot is not None:
                self._held.refuse(f"exchange {ballot.number}")
                exchanges += self._exchange(self._site.stage_of(ballot), ballot, began)
        else:
            for stage in self._due():
                exchanges += self._with_all(stage)
        return exchanges

    def exchange_all(self) -> list[Exchange]:
        """Exchange all fragments with all sites, of which all ranks call it between two steps, and return their exchanges.

        With a quorum a site may be in the midst of its steps when others call it. They exchange with it until it comes here.

        Raises:
            PeerLostError, StateError: As :meth:`begin`.
        """
        exchanges: list[Exchange] = []
        self._has_exchanged_all = True
        self._waiting.clear()
        if self._script is None and self._site is None:
            return [one for stage in self._fragments for one in self._with_all(stage, is_last=True)]
        in_a_row, stages = 0, len(self._counts.trained)
        while in_a_row < (stages if self._local.quorum is not None else len(self._fragments)):
            if self._script is not None:
                stage, ballot = self._script.in_exchange(self._counts.steps)
                exchanges += self._exchange_as_logged(stage, ballot)
            else:
                assert self._site is not None, "there is a quorum"
                began, ballot = time.monotonic(), self._site.at_the_end(self._counts)
                exchanges += self._exchange(self._site.stage_of(ballot), ballot, began)
            in_a_row = in_a_row + 1 if all(vote.is_last for vote in ballot.votes) else 0
        return exchanges

    def check_exchange(self) -> None:
        """Refuse an exchange of all at a point where the log that is replayed has none, or of a state that was lost.

        Raises:
            StateError: It has none, or it was.
        """
        self._refuse_lost()
        if self._script is not None:
            self._script.check_exchange(self._counts.steps)

    def replay(self, log: Sequence[Any]) -> None:
        """Exchange as a run did whose :attr:`log` this is, from the next step on. All ranks give their own.

        Raises:
            StateError: It is no such log. Nothing changes then.
        """
        stages = self._fragments if self._local.quorum is None else range(len(self._counts.trained))
        self._script = LoggedExchanges(log, stages, self._sites.index, self._sites.count, self._counts.steps)

    def count(self, weight: float) -> None:
        """Count a step, and what this rank's site has trained on in it."""
        self._counts.count(weight)

    def end_step(self) -> None:
        """End a step, which has filled ``grad``."""
        self._held.end_step()

    def restart(self, check: Callable[[], None]) -> None:
        """Take the parameters as they are for those after an exchange, since all sites have the same.

        All ranks of the job call it, between two steps.

        Args:
            check: Raises the error that has ended this rank's waits, if there is one.
        """
        self._counts.trained = [0.0] * len(self._counts.trained)
        self._waiting.clear()
        for fragment in self._fragments.values():
            fragment.begin()
        if self._local.quorum is not None and self._site is None:
            index, count = self._sites.index, self._sites.count
            voter = Votes(self._store, index, count, Quorum(self._local, count), check) if self._votes_here else None
            store = under(f"site {self._sites.index}", self._store)
            self._site = SiteBallots(voter, store, self._local, len(self._counts.trained), check)

    def state(self) -> dict[str, Any]:
        """Return what this rank needs to go on after a restart: the tensors themselves, by the fragments' stages."""
        stages = {stage: one.saved() for stage, one in self._fragments.items()}
        return {**self._counts.to_json(), "waiting": sorted(self._waiting), "site": self._sites.index, "stages": stages}

    def load(self, state: Any) -> int:
        """Go on from the :meth:`state` of this rank, and return the number of the training's step.

        That is saved beside it as ``step``; where it is not, all steps have been local ones.

        Raises:
            StateError: It is no such state, or of other stages or parameters. Nothing changes then.
        """
        counts = Counts.fitting(state, len(self._counts.trained))
        stages: Any = state["stages"] if counts is not None else None
        step: Any = state.get("step", counts.steps) if counts is not None else None
        if (
            counts is None
            or not isinstance(stages, Mapping)
            or {*stages} != {*self._fragments}
            or not (is_whole(step) and step >= 0)
        ):
            raise StateError(
                f"outer state: {state!r:.60}: expected that of this rank's pipe.outer_state_dict(), of stages "
                f"{', '.join(map(str, self._fragments))}"
            )
        if (site := state.get("site", self._sites.index)) != self._sites.index:
            raise StateError(
                f"outer state: of site {site}: expected that of site {self._sites.index}, as each has learnt something else"
            )
        for stage, fragment in self._fragments.items():
            check_saved(fragment, stages[stage])
        self._counts, self._loaded = counts, "loaded"
        self._waiting = {*state.get("waiting", ())}.intersection(self._fragments)
        for stage, fragment in self._fragments.items():
            fragment.load(stages[stage])
        return step

    def lose_loaded(self) -> None:
        """Take note that parameters are loaded, which are the same on all sites. A :meth:`state` has to come after them."""
        if self._loaded:
            self._loaded = "lost"

    def _refuse_lost(self) -> None:
        if self._loaded == "lost":
            raise StateError(
                "load_outer_state_dict before load_state_dict, which makes sites equal, so what it has loaded is lost: "
                "expected it after load_state_dict"
            )

    def close(self) -> None:
        """End the connections to the store."""
        if self._site is not None:
            self._site.close()

    def _exchange(self, stage: int, ballot: Ballot, began: float) -> list[Exchange]:
        total = sum(vote.weight for vote in ballot.votes)
        newest = max(vote.updates for vote in ballot.votes)
        self.log.append({"steps": self._counts.steps, "stage": stage, **ballot.to_json()})
        if not total:  # nobody has learnt anything
            return []
        self._counts.trained[stage], self._counts.updates[stage] = 0.0, newest + 1
        if stage not in self._fragments:
            return []
        fragment, members = self._fragments[stage], self._sites.among(ballot.sites)
        learnt = fragment.learnt()
        if any(vote.updates < newest for vote in ballot.votes):
            source = next(index for index, vote in enumerate(ballot.votes) if vote.updates == newest)
            fragment.take(members.values_of(source, fragment.state))
        own = ballot.votes[ballot.sites.index(self._sites.index)]
        for one in learnt:
            one.mul_(own.weight / total)
        if learnt:
            members.combine_gradients(learnt, learnt.__getitem__, mean=False)
        fragment.update(learnt)
        parameters, owners = fragment.parameters, self._owners[stage]
        self._replicas.bring_from_owners([one.detach() for one in parameters.values()], [owners[name] for name in parameters])
        return [Exchange(stage, ballot, self._sites.count, fragment.nbytes, time.monotonic() - began)]

    def _with_all(self, stage: int, *, is_last: bool = False) -> list[Exchange]:
        """Exchange a fragment with all sites, which tell each other what they have trained on.

        If one of them has gradients of earlier steps, all let it wait.

        Raises:
            StateError: Sites have come to different exchanges, as they have made different steps. Nothing is mixed then. Or
                it waits until the next one is due.
        """
        began, counts = time.monotonic(), self._counts
        held = None if is_last else self._held.first()
        told = self._sites.everyone.gather(
            [int(held is not None), _bits(counts.trained[stage]), counts.updates[stage], counts.steps, stage, int(is_last)]
        )
        for site, other in enumerate(told):
            if other[3:] != told[0][3:]:
                raise StateError(
                    f"exchange between sites: site 0 is at {_place(*told[0][3:])}, and site {site} at {_place(*other[3:])}: "
                    "expected the same number of steps before it on all sites, or Local(quorum=...), with which they may differ"
                )
        if any(is_held for is_held, *_ in told):
            if stage in self._waiting and self._is_in_turn(stage):
                raise waits_too_long(stage, self._local.every, held or "a parameter of another site", self._local.every)
            self._waiting.add(stage)
            return []
        self._waiting.discard(stage)
        votes = [Vote(site, updates + 1, _of_bits(bits), updates, is_last) for site, (_, bits, updates, *_) in enumerate(told)]
        return self._exchange(stage, Ballot(max(vote.number for vote in votes), tuple(votes)), began)

    def _due(self) -> list[int]:
        """Return the stages of this rank that are exchanged at the begin of a step without a quorum."""
        return [stage for stage in self._fragments if stage in self._waiting or self._is_in_turn(stage)]

    def _is_in_turn(self, stage: int) -> bool:
        steps, every = self._counts.steps, self._local.every
        return steps > 0 and (steps - stage * every // len(self._counts.trained)) % every == 0

    def _exchange_as_logged(self, stage: int, ballot: Ballot) -> list[Exchange]:
        """Exchange a fragment as a log has it.

        Raises:
            StateError: This site has trained on something else than in the run of the log.
        """
        trained, logged = self._counts.trained[stage], ballot.votes[ballot.sites.index(self._sites.index)].weight
        if trained != logged:
            raise StateError(
                f"exchange {ballot.number} of stage {stage}: this site has trained on {trained:g} since the one before, and by "
                f"the log that is replayed on {logged:g}: expected the batches and the site of that run"
            )
        return self._exchange(stage, ballot, time.monotonic())

    def _check_end(self, script: LoggedExchanges, logged: Collection[int]) -> None:
        """Refuse a step for which the log is too short. An exchange that waits for an update is in none.

        With a quorum a late site may lack the exchange that is due, so one is missed only after twice the interval.

        Raises:
            StateError: An exchange is due that the log does not have.
        """
        steps = self._counts.steps
        if self._local.quorum is None:
            lacking = {*self._due()}.difference(logged)
            is_due = bool(lacking) and self._held.first() is None
            self._waiting |= lacking
        else:
            is_due = steps - script.end >= 2 * self._local.every
        if is_due:
            raise StateError(
                f"a step after {steps} steps: an exchange is due, and the log that is replayed has its last one after "
                f"{script.end}: expected the steps and the Local(...) of that run"
            )


def _bits(number: float) -> int:
    """Return the bits of a number as a whole one, which ranks can gather."""
    (bits,) = struct.unpack("<q", struct.pack("<d", number))
    return bits


def _place(steps: int, stage: int, is_last: int) -> str:
    """Return in words what a site has come to."""
    return f"stage {stage} {'in exchange()' if is_last else 'in a step'} after {steps} steps"


def _of_bits(bits: int) -> float:
    (number,) = struct.unpack("<d", struct.pack("<q", bits))
    return number
