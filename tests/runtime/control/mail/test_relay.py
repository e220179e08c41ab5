"""The relay: what travels by the tree, what directly, and what the coordinator knows after mail was lost."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from relayed_ranks import PLAN, RelayedRanks

from adaptra.errors import ControlError
from adaptra.runtime.control.mail.mail import (
    Confirmed,
    Gathered,
    Joined,
    LogGrew,
    Mail,
    Proposed,
    Refused,
    Reports,
    Spread,
    TellAnew,
    Term,
    Withdrawn,
)
from adaptra.runtime.control.mail.relay import Relay, RelayOptions
from adaptra.runtime.detection.news import NewsReader, NewsTeller
from adaptra.runtime.measuring.measurement import StepMeasurement

EVERY_STEP = RelayOptions(direct=0, fan_out=2, period=1)
WARM = 20
"""Steps after which a rank knows its scatter and tells only news."""


class Wires:
    """Relays of some ranks, and what they have pushed: receiver and mail."""

    def __init__(self, ranks: int, options: RelayOptions = EVERY_STEP) -> None:
        self.coordinator = 0
        self.pushed: list[tuple[int, Mail]] = []
        self.relays = [
            Relay(
                rank,
                ranks,
                options,
                lambda: self.coordinator,
                lambda to, mail: self.pushed.append((to, mail)),
                NewsTeller(),
                NewsReader(),
            )
            for rank in range(ranks)
        ]

    def flushed(self, rank: int) -> list[tuple[int, Mail]]:
        """What a rank pushes when it flushes."""
        self.pushed.clear()
        self.relays[rank].flush()
        return list(self.pushed)

    def arrived(self, rank: int) -> dict[int, list[Mail | Reports]]:
        """What each rank gets of all that a rank pushes, by the hops of the tree."""
        found: dict[int, list[Mail | Reports]] = {}
        waiting = self.flushed(rank)
        while waiting:
            to, mail = waiting.pop(0)
            if isinstance(mail, Spread):
                self.pushed.clear()
                found.setdefault(to, []).extend(self.relays[to].take(mail))
                waiting += self.pushed
            else:
                found.setdefault(to, []).append(mail)
        return found


def measured(rank: int, step: int, seconds: float = 0.5) -> StepMeasurement:
    return StepMeasurement(rank, step, seconds, (), ())


@pytest.mark.parametrize(("ranks", "fan_out", "root"), [(7, 2, 0), (13, 3, 5), (100, 8, 99), (3, 1, 1)])
def test_what_is_for_all_ranks_goes_down_the_tree_and_reaches_each_once(ranks: int, fan_out: int, root: int) -> None:
    wires = Wires(ranks, RelayOptions(0, fan_out, 1))
    wires.coordinator = root
    sent: Sequence[Mail] = (LogGrew(3, 9, 1), Proposed(2, {"any": "plan"}), Withdrawn(2))
    for mail in sent:
        for rank in range(ranks):
            if rank != root or not isinstance(mail, LogGrew):
                wires.relays[root].send(rank, mail)
    own = list(sent[1:])
    assert wires.arrived(root) == {rank: own if rank == root else list(sent) for rank in range(ranks)}


def test_no_rank_sends_to_more_than_its_children() -> None:
    wires = Wires(50, RelayOptions(0, 8, 1))
    for rank in range(1, 50):
        wires.relays[0].send(rank, LogGrew(0, 2, 0))
    assert [to for to, _ in wires.flushed(0)] == [*range(1, 9)]


def test_questions_answers_terms_and_refusals_are_direct() -> None:
    wires = Wires(7)
    for mail in (Term(1), TellAnew()):
        for rank in range(1, 7):
            wires.relays[0].send(rank, mail)
    pushed = wires.flushed(0)
    assert [to for to, mail in pushed if mail == Term(1)] == [*range(1, 7)]
    assert [to for to, mail in pushed if mail == Spread(0, (TellAnew(),))] == [1, 2]
    wires.relays[0].send(6, Proposed(1, {}))
    assert wires.flushed(0) == [(6, Proposed(1, {}))]
    for mail in (Joined(6, 0, 4), Refused(6, 1, "no room")):
        wires.relays[6].send(0, mail)
        assert wires.flushed(6) == [(0, mail)]


def test_a_report_waits_for_those_below_and_has_the_longest_seconds() -> None:
    wires = Wires(7)
    for rank, seconds in ((3, 0.7), (4, 0.5)):
        wires.relays[rank].ran(measured(rank, 0, seconds))
        ((parent, report),) = wires.flushed(rank)
        assert parent == 1 and isinstance(report, Gathered)
        assert wires.relays[1].take(report) == []
        assert wires.flushed(1) == []
    wires.relays[1].ran(measured(1, 0, 0.6))
    ((root, report),) = wires.flushed(1)
    assert root == 0 and isinstance(report, Gathered)
    assert (report.sender, report.step, report.seconds, len(report.news)) == (1, 0, (0.7,), 3)
    (reports,) = wires.relays[0].take(report)
    assert isinstance(reports, Reports)
    assert (reports.ranks, reports.step) == ((1, 3, 4), 0)
    assert reports.measurements == (measured(1, 0, 0.6), measured(3, 0, 0.7), measured(4, 0, 0.5))


def test_a_later_report_is_sent_though_an_earlier_one_was_lost() -> None:
    wires = Wires(4, RelayOptions(0, 1, 1))
    for step in (0, 1):
        wires.relays[2].ran(measured(2, step))
        wires.flushed(2)
        wires.relays[3].ran(measured(3, step))
        ((_, report),) = wires.flushed(3)
        if step > 0:
            assert isinstance(report, Gathered)
            wires.relays[2].take(report)
    ((_, report),) = wires.flushed(2)
    assert isinstance(report, Gathered) and report.step == 1


def test_confirmations_go_up_once_all_below_have_confirmed_or_with_a_report() -> None:
    wires = Wires(7)
    for rank in (3, 4, 1):
        wires.relays[rank].send(0, Confirmed(rank, 1, "ab"))
    ((_, first),) = wires.flushed(3)
    assert isinstance(first, Gathered) and first.votes == ((1, "ab", None),)
    wires.relays[1].take(first)
    assert wires.flushed(1) == []
    ((_, second),) = wires.flushed(4)
    assert isinstance(second, Gathered)
    wires.relays[1].take(second)
    ((_, third),) = wires.flushed(1)
    assert isinstance(third, Gathered)
    assert wires.relays[0].take(third) == [Confirmed(rank, 1, "ab") for rank in (1, 3, 4)]
    # A rank that confirms another program is not counted among those that agree.
    wires.relays[3].send(0, Confirmed(3, 2, "cd"))
    wires.relays[3].ran(measured(3, 0))
    wires.relays[4].ran(measured(4, 0))
    wires.relays[1].ran(measured(1, 0))
    for rank in (3, 4):
        for _, mail in wires.flushed(rank):
            assert isinstance(mail, Gathered)
            wires.relays[1].take(mail)
    ((_, report),) = wires.flushed(1)
    assert isinstance(report, Gathered) and report.votes == ((2, "cd", (3,)),)


def test_a_rank_that_has_asked_confirms_directly_until_its_next_report() -> None:
    wires = Wires(7)
    wires.relays[6].send(0, Joined(6, 0, -1))
    wires.relays[6].send(0, Confirmed(6, 1, "ab"))
    assert wires.flushed(6) == [(0, Joined(6, 0, -1)), (0, Confirmed(6, 1, "ab"))]
    wires.relays[6].ran(measured(6, 0))
    wires.relays[6].send(0, Confirmed(6, 2, "cd"))
    assert [to for to, _ in wires.flushed(6)] == [2]


def test_reports_for_another_coordinator_are_sent_to_it_directly() -> None:
    wires = Wires(7)
    report = Gathered(3, 4, 0, 0, (0.5,), (measured(4, 0),), ())
    assert wires.relays[1].take(report) == []
    assert wires.pushed == [(3, report)]


def test_who_turns_to_another_coordinator_drops_what_was_for_the_former() -> None:
    wires = Wires(7)
    wires.relays[1].send(0, Confirmed(1, 1, "ab"))
    wires.coordinator = 2
    wires.relays[1].ran(measured(1, 0))
    assert all(not mail.votes for _, mail in wires.flushed(1) if isinstance(mail, Gathered))


@pytest.mark.parametrize(
    "mail",
    [
        Spread(7, ()),
        Gathered(7, 1, -1, 0, (), (), ()),
        Gathered(0, 7, -1, 0, (), (), ()),
        Gathered(0, 1, -1, 0, (), (), ((1, "ab", (7,)),)),
    ],
)
def test_mail_of_a_rank_that_does_not_exist_is_refused(mail: Spread | Gathered) -> None:
    with pytest.raises(ControlError, match=r"mail of rank 7: expected ranks 0\.\.6"):
        Wires(7).relays[0].take(mail)


def started(count: int, options: RelayOptions | None = None, noise: float = 0.01) -> RelayedRanks:
    """Ranks that have agreed on the first plan and know how their measurements scatter."""
    job = RelayedRanks(count, options or RelayOptions(direct=0), noise)
    while job.deliver():
        pass
    job.run(WARM)
    return job


def test_what_a_rank_asks_of_the_store_does_not_grow_with_the_ranks() -> None:
    most: list[int] = []
    for count in (80, 320):
        job = started(count)
        job.store.forget()
        job.run(10)
        most.append(job.store.most_requests())
    assert most == [36, 36], "in 10 steps: one mail up and one down, and the same from and to eight children, twice"


def test_the_coordinator_knows_the_steps_of_a_slow_rank_exactly_at_first_and_others_nearly() -> None:
    job = started(80)
    job.slow[37] = 1.2
    job.run(10)
    for step in range(WARM, WARM + 10):
        for rank in range(80):
            taken, true = job.restored[step, rank], job.measured[step, rank]
            if rank == 37 and step < WARM + 8:
                assert taken == true
            forward, measured_forward = taken.stages[0].forward, true.stages[0].forward
            assert forward is not None and measured_forward is not None
            assert forward == pytest.approx(measured_forward, rel=0.1)
        slowest = max(job.measured[step, rank].seconds for rank in range(80))
        assert max(job.restored[step, rank].seconds for rank in range(80)) == pytest.approx(slowest, abs=1e-6)


def test_after_lost_news_nothing_is_taken_for_measured_until_all_is_told_anew() -> None:
    job = started(80)
    job.slow[37] = 1.5
    job.lost = lambda rank, mail: isinstance(mail, Gathered) and mail.sender == 37 and bool(mail.news)
    job.run(5)
    job.lost = lambda rank, mail: False
    assert min(job.steps) == WARM + 5, "the coordinator was asked, and the log went on"
    assert not any((step, 37) in job.restored for step in range(WARM, WARM + 5))
    job.slow.clear()
    job.run(15)
    for step in range(WARM + 5, WARM + 20):
        if (step, 37) in job.restored:
            taken, true = job.restored[step, 37].stages[0].forward, job.measured[step, 37].stages[0].forward
            assert taken == pytest.approx(true, rel=0.1)
    assert (WARM + 19, 37) in job.restored and (WARM + 19, 5) in job.restored


def test_a_plan_is_agreed_on_though_a_relay_gets_nothing_by_the_tree_for_a_while() -> None:
    job = started(80)
    job.lost = lambda rank, mail: rank == 1 and isinstance(mail, (Spread, Gathered))
    version = job.propose()
    job.run(10)
    job.lost = lambda rank, mail: False
    job.run(10)
    assert job.steps == [WARM + 20] * 80
    assert job.known == [version] * 80
    assert PLAN.version < version
