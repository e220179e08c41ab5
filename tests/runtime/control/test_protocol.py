"""The switching protocol, model-checked: every order of events of a few ranks, and planted errors that the checker must find.

See :mod:`protocol_model`, which steps the code that runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from exploring import ViolationError
from protocol_model import Model
from protocol_world import Bounds, Faults

from adaptra.runtime.control.agreement.participant import Participant
from adaptra.runtime.control.mail.mail import Confirmed, Gathered, Joined
from adaptra.runtime.control.mail.relay import Relay, RelayOptions
from adaptra.runtime.control.plans.plan_log import Agreement, Entry, Log

CHAIN, TREE = RelayOptions(direct=0, fan_out=1, period=1), RelayOptions(direct=0, fan_out=2, period=1)
"""A rank sends on what comes for one other rank, or for two."""

RUNS = {
    "two ranks, two plans": Bounds(2, steps=4, proposals=2, ahead=2),
    "three ranks": Bounds(3, steps=3, proposals=1),
    "four ranks": Bounds(4, steps=2, proposals=1, eager=True),
    "two ranks, one lags": Bounds(2, steps=3, proposals=1, faults=Faults(early=2)),
    "three ranks, one lags": Bounds(3, steps=2, proposals=1, eager=True, faults=Faults(early=1)),
    "two ranks, mail is lost": Bounds(2, steps=3, proposals=1, eager=True, faults=Faults(lost=2)),
    "three ranks, mail is lost": Bounds(3, steps=2, proposals=1, eager=True, faults=Faults(lost=1)),
    "mail is told twice and plans are refused": Bounds(
        2, steps=3, proposals=2, eager=True, faults=Faults(repeated=1, refused=1)
    ),
    "two ranks, connections break": Bounds(2, steps=3, proposals=1, eager=True, faults=Faults(broken=2)),
    "three ranks, a connection breaks": Bounds(3, steps=2, proposals=1, eager=True, faults=Faults(broken=1)),
    "a connection breaks and mail is lost": Bounds(2, steps=2, proposals=1, eager=True, faults=Faults(broken=1, lost=1)),
    "a connection breaks and a process dies": Bounds(2, steps=2, proposals=1, faults=Faults(broken=1, crashes=1)),
    "two ranks, plans are speculative": Bounds(2, steps=3, proposals=2, ahead=2, speculative=True),
    "three ranks, plans are speculative": Bounds(3, steps=2, proposals=1, speculative=True),
    "plans are speculative, one lags and mail is lost": Bounds(
        2, steps=3, proposals=1, eager=True, faults=Faults(early=1, lost=1), speculative=True
    ),
    "plans are speculative and a connection breaks": Bounds(
        2, steps=3, proposals=1, eager=True, faults=Faults(broken=1), speculative=True
    ),
    "three ranks, a process dies": Bounds(3, steps=2, proposals=1, eager=True, faults=Faults(crashes=1)),
    "two ranks with relays": Bounds(2, steps=4, proposals=2, ahead=2, relaying=CHAIN),
    "three ranks in a chain": Bounds(3, steps=3, proposals=1, eager=True, relaying=CHAIN),
    "a chain, one lags": Bounds(3, steps=2, proposals=1, eager=True, faults=Faults(early=1), relaying=CHAIN),
    "a chain, mail is lost": Bounds(3, steps=2, proposals=1, eager=True, faults=Faults(lost=1), relaying=CHAIN),
    "a chain of late ranks, mail is lost": Bounds(3, steps=3, proposals=0, faults=Faults(lost=1), relaying=CHAIN),
    "a chain, mail is told twice and plans are refused": Bounds(
        3, steps=2, proposals=1, eager=True, faults=Faults(repeated=1, refused=1), relaying=CHAIN
    ),
    "a chain, a connection breaks": Bounds(3, steps=2, proposals=0, eager=True, faults=Faults(broken=1), relaying=CHAIN),
    "a chain, a process dies": Bounds(3, steps=2, proposals=1, eager=True, faults=Faults(crashes=1), relaying=CHAIN),
    "a chain, plans are speculative": Bounds(3, steps=2, proposals=1, eager=True, speculative=True, relaying=CHAIN),
    "a chain that reports every second step, mail is lost": Bounds(
        3, steps=5, proposals=1, ahead=3, eager=True, faults=Faults(lost=1), relaying=RelayOptions(0, 1, 2)
    ),
    "a tree of four ranks": Bounds(4, steps=2, proposals=1, eager=True, relaying=TREE),
    "a tree, mail is lost": Bounds(4, steps=2, proposals=0, eager=True, faults=Faults(lost=1), relaying=TREE),
    "a tree, a connection breaks": Bounds(4, steps=2, proposals=0, eager=True, faults=Faults(broken=1), relaying=TREE),
}


@pytest.mark.parametrize("bounds", RUNS.values(), ids=RUNS.keys())
def test_no_step_runs_under_two_plans_and_nothing_stands_still(bounds: Bounds) -> None:
    states, histories = Model(bounds).explore()
    assert states > 100
    assert (0,) * bounds.steps in histories


def test_both_ranks_can_switch_at_every_step_that_is_not_yet_covered() -> None:
    """The model reaches what it is there for: plans that end after a step or two, one after the other."""
    _, histories = Model(Bounds(2, steps=4, proposals=2, ahead=2)).explore()
    assert {(0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 1, 1), (0, 0, 1, 2)} <= histories
    assert all(history[:2] == (0, 0) and list(history) == sorted(history) for history in histories)


def first_confirmation_is_enough(self: Agreement, rank: int, version: int, digest: str) -> bool:
    if self._proposal is None or version != self._proposal.version:
        return False
    self._current, self._proposal = self._proposal, None
    return True


def switch_once_ready(self: Participant, plan: Any) -> None:
    ready(self, plan)
    self._around.cover(self._agreement.until + 1 if self._agreement else self._reached + 2, plan)


def forget_what_is_not_run_yet(self: Log, step: int) -> None:
    forget(self, step + 2)


def take_what_is_told_wherever_it_stands(self: Log, position: int, entry: Entry) -> Iterator[Entry]:
    self._pass(entry)
    yield entry


def never_ask(self: Participant) -> None:
    self._follow()


def welcome_without_asking_again(self: Participant, rank: int, reached: int) -> None:
    self._measured((rank,), reached)


def keep_what_was_reached(self: Participant, term: int) -> None:
    if term > self._term:
        self._term = term
        self._stop_leading()
    self._around.send(self.coordinator, Joined(self._rank, term, -1))


def answer_only_the_first_coordinator(self: Participant, plan: Any) -> None:
    self._around.send(0, Confirmed(self._rank, plan.version, plan.digest))


def lead_without_reading_the_log(self: Participant) -> None:
    self._agreement = Agreement(self._ranks, self._first_step, self._ahead)
    self._agreement.propose(self._initial)


def forget_that_it_is_speculative(self: Agreement, plan: Any, is_speculative: bool = False) -> None:
    propose(self, plan)


def release_unconfirmed(self: Agreement) -> bool:
    self._current, self._proposal = self._proposal, None
    return True


def keep_what_was_withdrawn(self: Participant, version: int) -> None:
    pass


def claim_that_all_below_confirm(self: Relay, *, is_partial: bool) -> Any:
    return tuple((version, digest, None) for version, digest, _ in take_votes(self, is_partial=True))


def send_reports_without_waiting_for_those_below(self: Relay, report: Gathered) -> None:
    gather(self, report)
    self._parts = {key: parts * 2 for key, parts in self._parts.items() if len(parts) == 1}


take_votes, gather = Relay._take_votes, Relay._gather
append, forget, lead, propose, ready = Log.append, Log.forget, Participant._lead, Agreement.propose, Participant.ready

MUTATIONS: list[tuple[type, str, Callable[..., Any], Bounds, str]] = [
    (Agreement, "confirm", first_confirmation_is_enough, RUNS["three ranks"], "which not all ranks have confirmed"),
    (Agreement, "propose", forget_that_it_is_speculative, RUNS["two ranks, plans are speculative"], "has not been released"),
    (Agreement, "release", release_unconfirmed, RUNS["two ranks, plans are speculative"], "which not all ranks have confirmed"),
    (Participant, "ready", switch_once_ready, RUNS["three ranks"], "ends at|runs step"),
    (Log, "forget", forget_what_is_not_run_yet, RUNS["two ranks, mail is lost"], "where the log ends"),
    (Log, "hear", take_what_is_told_wherever_it_stands, RUNS["two ranks, mail is lost"], "ends at|runs step"),
    (Participant, "impatient", never_ask, RUNS["two ranks, mail is lost"], "no end can be reached"),
    (Participant, "_welcome", welcome_without_asking_again, RUNS["two ranks, mail is lost"], "no end can be reached"),
    (Participant, "_join", keep_what_was_reached, RUNS["two ranks, mail is lost"], "no end can be reached"),
    (Participant, "_confirm", answer_only_the_first_coordinator, RUNS["two ranks, connections break"], "no end can be reached"),
    (Participant, "_forget", keep_what_was_withdrawn, RUNS["two ranks, plans are speculative"], "still holds plans"),
    (Participant, "_lead", lead_without_reading_the_log, RUNS["two ranks, connections break"], "Error"),
    (Relay, "_take_votes", claim_that_all_below_confirm, RUNS["a tree of four ranks"], "which not all ranks have confirmed"),
    (Relay, "_gather", send_reports_without_waiting_for_those_below, RUNS["a chain of late ranks, mail is lost"], "no end"),
]


@pytest.mark.parametrize(("where", "name", "wrong", "bounds", "message"), MUTATIONS, ids=[m[2].__name__ for m in MUTATIONS])
def test_the_checker_finds_planted_errors(
    where: type, name: str, wrong: Callable[..., Any], bounds: Bounds, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(where, name, wrong)
    with pytest.raises(ViolationError, match=message):
        Model(bounds).explore()


def lead_without_asking_who_has_reached_what(self: Participant) -> None:
    lead(self)
    assert self._agreement is not None
    for rank in range(self._ranks):
        self._agreement.report(rank, self._reached)


def append_over_others(self: Log, entry: Entry) -> bool:
    self._store.delete_key(f"log/{self._position}")
    return append(self, entry)


def test_two_coordinators_at_once_still_write_one_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """That a new one waits for all ranks, the former one too, and that the store appends only at the end, each is enough."""
    bounds = Bounds(2, steps=3, proposals=1, faults=Faults(early=2))
    monkeypatch.setattr(Log, "append", append_over_others)
    Model(bounds).explore()
    monkeypatch.setattr(Participant, "_lead", lead_without_asking_who_has_reached_what)
    with pytest.raises(ViolationError, match="the log only grows"):
        Model(bounds).explore()
    monkeypatch.setattr(Log, "append", append)
    monkeypatch.setattr(Log, "forget", lambda self, step: None)  # which relies on what was reached
    Model(bounds).explore()
