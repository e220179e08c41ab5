"""The controller: all ranks run every step under one plan, switch together or not at all, and train on while planning.

Ranks are threads over a HashStore; one test runs processes over a TCPStore. What a rank would measure follows from the plan
that it runs. So a switch brings about the next change, and a run ends at a plan version, not after a time.
"""

from __future__ import annotations

import json
import multiprocessing
import queue
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import islice

import pytest
import torch.distributed as dist
from controller_world import (
    HEALTHY,
    HEALTHY_PROGRAM,
    MICROBATCHES,
    RANKS,
    SLOW,
    SLOW_PROGRAM,
    best,
    measurement,
    plan_zero,
    predict,
)
from errors_table import check_documented
from proxy import Proxy

from adaptra.errors import ControlError, PeerLostError, PlanError
from adaptra.passes.insert_comm import Channel, InsertComm
from adaptra.program import Program
from adaptra.program.schedules import one_f_one_b
from adaptra.runtime.control.agreeing_ranks import AgreeingRanks
from adaptra.runtime.control.callbacks import ControlCallbacks
from adaptra.runtime.control.controller import Controller
from adaptra.runtime.control.deciding.policy import ControllerOptions
from adaptra.runtime.control.deciding.replanning import Planning, nothing_ahead
from adaptra.runtime.control.mail.mail import Confirmed, Measured, Proposed
from adaptra.runtime.control.mail.mailbox import Mailbox
from adaptra.runtime.control.mail.relay import RelayOptions
from adaptra.runtime.control.plans.events import ControlEvent, EventKind
from adaptra.runtime.control.plans.plan import Plan
from adaptra.runtime.control_store.signed_store import under
from adaptra.runtime.detection.level_shift import DetectorOptions
from adaptra.runtime.world.world import FIRST_ATTEMPT, Attempt
from adaptra.simulation.case import Case
from adaptra.simulation.cost import CostModel

TREE = RelayOptions(direct=0, fan_out=2, period=2)
"""A tree of four ranks."""

SILENT = "step … has no plan: rank … lost the control channel: the store has not answered for … s"


def against(plan: Plan) -> CostModel:
    """The costs that make the other program the better one."""
    return SLOW if str(plan.program) == str(HEALTHY_PROGRAM) else HEALTHY


def slow_after_ten(step: int, plan: Plan) -> CostModel:
    return SLOW if step > 10 else HEALTHY


class Journal:
    """What all ranks did, in one order."""

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self.events: list[ControlEvent] = []
        self.runs: list[tuple[int, int, int]] = []

    def event(self, event: ControlEvent) -> None:
        with self._lock:
            self.events.append(event)
            self._lock.notify_all()

    def run(self, rank: int, step: int, version: int) -> None:
        with self._lock:
            self.runs.append((rank, step, version))

    def wait_for(self, *kinds: EventKind, count: int = 1) -> ControlEvent:
        """Wait until so many events of these kinds have been told; the last of them."""

        def found() -> ControlEvent | None:
            return next(islice((event for event in self.events if event.kind in kinds), count - 1, None), None)

        with self._lock:
            event = self._lock.wait_for(found, 30.0)
            assert event is not None, f"no {kinds} within 30 s, only {self.events}"
            return event

    def of(self, kind: EventKind) -> list[ControlEvent]:
        with self._lock:
            return [event for event in self.events if event.kind is kind]

    def agreed(self) -> list[ControlEvent]:
        """The agreements on plans that ran. After the last step the control threads may agree on one that never does."""
        last = max(self.versions())
        return [event for event in self.of(EventKind.AGREED) if event.step <= last]

    def versions(self) -> dict[int, set[int]]:
        """Per step, the versions that any rank ran it under."""
        with self._lock:
            found: dict[int, set[int]] = {}
            for _, step, version in self.runs:
                found.setdefault(step, set()).add(version)
            return found


@contextmanager
def controllers(
    journal: Journal,
    *,
    ranks: Sequence[int] = range(RANKS),
    store: dist.Store | None = None,
    planner: Callable[[Case, Program], Program] = best,
    options: ControllerOptions | None = None,
    initial: Callable[[int], Plan] = lambda rank: plan_zero(),
    prepare: Callable[[int, Plan], None] = lambda rank, plan: None,
    on_error: Callable[[Exception], None] | None = None,
    first_step: int = 0,
    ahead_of_need: Callable[[Program, CostModel], Mapping[Channel, int]] = nothing_ahead,
    relaying: RelayOptions | None = None,
    attempt: Attempt = FIRST_ATTEMPT,
) -> Generator[list[Controller], None, None]:
    common = store or dist.HashStore()
    started = [
        Controller(
            AgreeingRanks(rank, RANKS),
            common,
            initial(rank),
            Planning(planner, ahead_of_need=ahead_of_need),
            options=options,
            callbacks=ControlCallbacks(lambda plan, rank=rank: prepare(rank, plan), journal.event, on_error=on_error),
            first_step=first_step,
            relaying=relaying,
            attempt=attempt,
        )
        for rank in ranks
    ]
    try:
        yield started
    finally:
        for controller in started:
            controller.close()


def train(
    started: Sequence[Controller],
    journal: Journal,
    until: Callable[[int, Plan], object],
    cost: Callable[[int, Plan], CostModel] = lambda step, plan: against(plan),
    ranks: Sequence[int] = range(RANKS),
    first_step: int = 0,
    ahead: int = 2,
) -> list[BaseException]:
    """Every rank runs steps of random length on its own thread; returns what they raised.

    All ranks end at the same step: ``ahead`` after the one for which ``until(step, plan)`` holds on the first rank. No rank can
    have begun that one, since the log covers no more steps than these beyond what the first rank has reported.
    """
    raised: list[BaseException] = []
    end: list[int] = []

    def work(rank: int, controller: Controller) -> None:
        noise = random.Random(rank)
        step = first_step
        try:
            while True:
                plan = controller.plan_for(step)
                if rank == ranks[0] and not end and until(step, plan):
                    end.append(step + ahead)
                if end and step == end[0]:
                    return
                journal.run(rank, step, plan.version)
                # The step's work: one rank is slow now and then, so that ranks are steps apart.
                time.sleep(noise.choice((0.0, 0.0, 0.0005, 0.003)))
                controller.report(measurement(rank, step, cost(step, plan)))
                step += 1
        except Exception as error:
            raised.append(error)

    threads = [threading.Thread(target=work, args=pair) for pair in zip(ranks, started, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert not any(thread.is_alive() for thread in threads)
    return raised


def assert_agreed(journal: Journal) -> None:
    """No step ran under two versions, and no version ran before every rank had confirmed it."""
    assert all(len(versions) == 1 for versions in journal.versions().values())
    order = journal.events
    for agreed in journal.of(EventKind.AGREED):
        confirmed = [
            event
            for event in order[: order.index(agreed)]
            if (event.kind, event.version) == (EventKind.CONFIRMED, agreed.version)
        ]
        assert sorted(event.rank for event in confirmed) == list(range(RANKS))
        switched = [event for event in order if (event.kind, event.version) == (EventKind.SWITCHED, agreed.version)]
        assert {event.step for event in switched} <= {agreed.step}
    assert {event.version for event in journal.of(EventKind.SWITCHED)} <= {
        event.version for event in journal.of(EventKind.AGREED)
    }


def test_many_switches_and_every_step_ran_under_one_plan_on_all_ranks() -> None:
    journal, last = Journal(), 12
    with controllers(journal) as started:
        assert train(started, journal, lambda step, plan: plan.version == last) == []
    assert_agreed(journal)
    versions = journal.versions()
    assert {version for found in versions.values() for version in found} == set(range(last + 1))
    assert Counter(event.version for event in journal.of(EventKind.SWITCHED)) == dict.fromkeys(range(1, last + 1), RANKS)
    first = {version: min(step for step, found in versions.items() if version in found) for version in range(last + 1)}
    assert {event.version: event.step for event in journal.agreed()} == {
        version: step for version, step in first.items() if version > 0
    }
    for proposed in journal.of(EventKind.PROPOSED):
        assert proposed.predicted is not None and proposed.predicted_before is not None
        assert proposed.predicted < 0.97 * proposed.predicted_before


@pytest.mark.parametrize("period", [1, 3])
@pytest.mark.parametrize("fan_out", [1, 2])
def test_ranks_whose_mail_goes_by_a_tree_switch_together(fan_out: int, period: int) -> None:
    journal, last = Journal(), 6
    with controllers(journal, relaying=RelayOptions(0, fan_out, period)) as started:
        assert train(started, journal, lambda step, plan: plan.version >= last, ahead=2 + period) == []
    assert_agreed(journal)
    assert {version for found in journal.versions().values() for version in found} >= set(range(last + 1))


def test_a_coordinator_that_gives_up_is_replaced_though_mail_goes_by_a_tree() -> None:
    """The planner fails once, on whichever rank coordinates then."""
    journal, failures = Journal(), [IndexError("once")]

    def planner(case: Case, incumbent: Program) -> Program:
        if failures:
            raise failures.pop()
        return best(case, incumbent)

    options = ControllerOptions(answer_seconds=0.2)
    with controllers(journal, planner=planner, options=options, relaying=TREE) as started:
        assert train(started, journal, lambda step, plan: plan.version > 2, ahead=2 + TREE.period) == []
    assert_agreed(journal)
    assert journal.of(EventKind.RESIGNED) and journal.of(EventKind.COORDINATES)


def test_a_failure_of_a_rank_reaches_all_though_mail_goes_by_a_tree() -> None:
    journal, store = Journal(), dist.HashStore()
    with controllers(journal, store=store, relaying=TREE) as started:
        under(str(FIRST_ATTEMPT), store).queue_push("mail/3", "no mail")
        raised = train(started, journal, lambda step, plan: False)
    assert len(raised) == RANKS
    assert all("mail: not JSON" in str(error) for error in raised)


def test_relayed_mail_is_refused_where_all_mail_is_direct() -> None:
    journal, store = Journal(), dist.HashStore()
    with controllers(journal, store=store) as started:
        under(str(FIRST_ATTEMPT), store).queue_push("mail/2", '{"mail":"anew"}')
        raised = train(started, journal, lambda step, plan: False)
    assert len(raised) == RANKS
    assert all("relayed mail: expected none among 4 ranks, whose mail is direct" in str(error) for error in raised)


def test_training_goes_on_while_the_planner_plans() -> None:
    """The planner returns only after every rank has run twenty more steps than when it began."""
    journal = Journal()
    started_planning, enough = threading.Event(), threading.Event()
    began: list[int] = []

    def slow_planner(case: Case, incumbent: Program) -> Program:
        began.append(max(journal.versions(), default=0))
        started_planning.set()
        assert enough.wait(100)
        return best(case, incumbent)

    def until(step: int, plan: Plan) -> bool:
        if started_planning.is_set() and step > began[0] + 20:
            enough.set()
        return plan.version == 1

    with controllers(journal, planner=slow_planner) as started:
        assert train(started, journal, until) == []
    assert_agreed(journal)
    (agreed,) = journal.agreed()
    assert agreed.step > began[0] + 20


def test_a_rank_that_lags_delays_the_switch_and_not_the_steps() -> None:
    """Rank 2 takes its time to get ready for a plan: until every rank has run twenty more steps."""
    journal = Journal()
    is_asked, enough = threading.Event(), threading.Event()
    began: list[int] = []

    def prepare(rank: int, plan: Plan) -> None:
        if rank == 2 and not enough.is_set():
            began.append(max(journal.versions(), default=0))
            is_asked.set()
            assert enough.wait(100)

    def until(step: int, plan: Plan) -> bool:
        if is_asked.is_set() and step > began[0] + 20:
            enough.set()
        return plan.version == 1

    with controllers(journal, prepare=prepare) as started:
        assert train(started, journal, until) == []
    assert_agreed(journal)
    (agreed,) = journal.agreed()
    assert agreed.step > began[0] + 20


def test_a_coordinator_that_fails_is_replaced() -> None:
    """The planner fails on ranks 0 and 1; rank 2 takes over, measures anew, and all switch to its plan."""
    journal = Journal()
    calls: list[str] = []

    def broken_at_first(case: Case, incumbent: Program) -> Program:
        calls.append(case.name)
        if len(calls) <= 2:
            raise IndexError(len(calls))
        return best(case, incumbent)

    with controllers(journal, planner=broken_at_first) as started:
        assert train(started, journal, lambda step, plan: plan.version == 2) == []
    assert_agreed(journal)
    assert [(event.rank, event.text) for event in journal.of(EventKind.RESIGNED)] == [
        (0, "IndexError: 1"),
        (1, "IndexError: 2"),
    ]
    took_over = journal.of(EventKind.COORDINATES)
    assert [(event.rank, event.text) for event in took_over] == [(1, "in place of rank 0"), (2, "in place of rank 1")]
    assert {event.rank for event in journal.of(EventKind.AGREED)} == {2}


def test_a_coordinator_that_does_not_answer_is_replaced() -> None:
    """Rank 0 begins after the others have lost patience with it; it joins the one that they turned to."""
    journal, store = Journal(), dist.HashStore()
    options = ControllerOptions(answer_seconds=0.05)
    with controllers(journal, ranks=range(1, RANKS), store=store, options=options) as others:
        waiting = [threading.Thread(target=controller.plan_for, args=(0,)) for controller in others]
        for thread in waiting:
            thread.start()
        assert journal.wait_for(EventKind.COORDINATES).rank == 1
        with controllers(journal, ranks=[0], store=store, options=ControllerOptions()) as late:
            assert train([*late, *others], journal, lambda step, plan: plan.version > 0) == []
            for thread in waiting:
                thread.join(100)
    assert_agreed(journal)
    assert {event.rank for event in journal.of(EventKind.SWITCHED)} == set(range(RANKS))


def test_a_suggested_program_is_proposed_whatever_it_gains() -> None:
    journal = Journal()

    def until(step: int, plan: Plan) -> bool:
        if step == 5:
            started[0].suggest(SLOW_PROGRAM, "a user's wish")
            started[3].suggest(HEALTHY_PROGRAM, "of a rank that does not coordinate")
        return plan.version == 1

    with controllers(journal) as started:
        assert train(started, journal, until, cost=lambda step, plan: HEALTHY) == []
    assert_agreed(journal)
    (agreed,) = journal.agreed()
    assert agreed.text == "a user's wish" and agreed.predicted == pytest.approx(predict(SLOW_PROGRAM, HEALTHY))


def test_a_rank_that_refuses_keeps_all_on_the_old_plan() -> None:
    journal = Journal()

    def prepare(rank: int, plan: Plan) -> None:
        if rank == 2:
            raise ValueError("no room for it")

    def until(step: int, plan: Plan) -> bool:
        return step == 60

    with controllers(journal, prepare=prepare) as started:
        assert train(started, journal, until, cost=slow_after_ten) == []
        withdrawn = journal.wait_for(EventKind.WITHDRAWN)
        assert withdrawn.text == "refused by rank 2: no room for it"
        ends = time.monotonic() + 100
        while any(withdrawn.version in one._participant._plans for one in started):
            assert time.monotonic() < ends, "what was withdrawn is kept"
            time.sleep(0.01)
    assert journal.of(EventKind.AGREED) == journal.of(EventKind.SWITCHED) == []
    assert {version for found in journal.versions().values() for version in found} == {0}


def test_mail_and_log_of_an_earlier_attempt_are_of_no_account_in_the_next_one() -> None:
    """Two attempts over one store from the same step on, the second while the control threads of the first still run. The first
    one's log then grows, and its ranks report steps that the second's log does not cover.
    """
    store, before, after = dist.HashStore(), Journal(), Journal()
    with controllers(before, store=store) as old:
        assert not train(old, before, lambda step, plan: plan.version > 0)
        with controllers(after, store=store, attempt=Attempt(0, 1)) as new:
            for rank, controller in enumerate(old):
                controller.report(measurement(rank, max(before.versions()) + 1, HEALTHY))
            assert not train(new, after, lambda step, plan: step == 3, lambda step, plan: HEALTHY)
    assert max(max(versions) for versions in before.versions().values()) > 0
    assert {step: versions for step, versions in after.versions().items() if step <= 3} == {step: {0} for step in range(4)}
    assert not after.of(EventKind.SWITCHED)


def run_with_one_by_hand(answer: Callable[[Mailbox, Proposed], None], options: ControllerOptions | None = None) -> Journal:
    """Three controllers, and rank 3 by hand: it confirms plan 0, measures, and answers proposals as told."""
    journal = Journal()
    store, by_hand = dist.HashStore(), RANKS - 1
    mailbox = Mailbox(under(str(FIRST_ATTEMPT), store), by_hand)
    mailbox.send(0, Confirmed(by_hand, 0, plan_zero().digest))
    ended = threading.Event()

    def serve() -> None:
        while not ended.is_set():
            mail = mailbox.receive()
            if isinstance(mail, Proposed):
                answer(mailbox, mail)

    server = threading.Thread(target=serve)
    server.start()

    def until(step: int, plan: Plan) -> bool:
        mailbox.send(0, Measured(measurement(by_hand, step, slow_after_ten(step, plan))))
        return plan.version > 0 or (step > 60 and bool(journal.of(EventKind.WITHDRAWN)))

    try:
        with controllers(journal, ranks=range(by_hand), store=store, options=options) as started:
            assert train(started, journal, until, slow_after_ten, ranks=range(by_hand)) == []
    finally:
        ended.set()
        mailbox.wake()
        server.join(100)
        mailbox.close(10.0)
    return journal


def test_a_rank_that_holds_another_program_keeps_all_on_the_old_plan() -> None:
    def other_digest(mailbox: Mailbox, proposed: Proposed) -> None:
        mailbox.send(0, Confirmed(RANKS - 1, proposed.version, "0" * 64))

    journal = run_with_one_by_hand(other_digest)
    assert journal.of(EventKind.WITHDRAWN)[0].text.startswith("rank 3 holds program 000000000000 as plan 1: expected")
    assert journal.of(EventKind.AGREED) == []
    assert {version for found in journal.versions().values() for version in found} == {0}


def test_a_rank_that_never_answers_delays_the_switch_and_not_the_steps() -> None:
    journal = run_with_one_by_hand(lambda mailbox, proposed: None, ControllerOptions(confirm_seconds=0.05))
    # On a busy machine others may be as late.
    assert re.fullmatch(r"not confirmed by rank (\d, )*3 within 0\.05 s", journal.of(EventKind.WITHDRAWN)[0].text)
    assert journal.of(EventKind.AGREED) == []
    assert {version for found in journal.versions().values() for version in found} == {0}


def test_a_plan_that_gains_too_little_is_kept_from_running() -> None:
    journal = Journal()
    with controllers(journal, options=ControllerOptions(switch_gain=0.5)) as started:

        def until(step: int, plan: Plan) -> bool:
            return len(journal.of(EventKind.KEPT)) >= 1 and step > 30

        assert train(started, journal, until, cost=lambda step, plan: HEALTHY) == []
    (kept,) = journal.of(EventKind.KEPT)
    assert kept.text == "no plan is shorter than the running one's 492.4 ms"
    assert kept.predicted_before == pytest.approx(predict(HEALTHY_PROGRAM, HEALTHY))
    assert journal.of(EventKind.PROPOSED) == []


def test_the_plan_for_the_recovery_of_a_flapping_edge_waits() -> None:
    """Slow, healthy, slow again: the next recovery is planned for, but proposed some steps later."""
    journal, hold_off = Journal(), 2
    begun: dict[int, int] = {}

    def cost(step: int, plan: Plan) -> CostModel:
        age = step - begun.setdefault(plan.version, step)
        is_slow = {0: age >= 10, 1: age < 5, 2: age >= 5, 3: age < 5, 4: False}
        return SLOW if is_slow[plan.version] else HEALTHY

    options = ControllerOptions(detector=DetectorOptions(relapse=10_000))
    with controllers(journal, options=options) as started:
        assert train(started, journal, lambda step, plan: plan.version == 4, cost) == []
    assert_agreed(journal)
    healed = begun[3] + 5 + 1
    said = [
        event.text
        for event in journal.of(EventKind.KEPT)
        if event.text.startswith("a flapping edge or stage may turn slow again")
    ]
    assert said[-1].endswith(f"waits until {hold_off} steps after step {healed}")
    assert begun[4] > healed + hold_off


def test_an_order_that_stays_the_best_has_its_receives_posted_in_time_for_a_slower_link() -> None:
    """Where a send waits for its receiver, receives posted for the latency that was would be what a longer one waits for.

    The coordinator's rank begins the second slow step when all are ready for what the first one lets suspect.
    """
    journal = Journal()
    begun: dict[int, int] = {}
    found: dict[int, Plan] = {}

    def cost(step: int, plan: Plan) -> CostModel:
        found[plan.version] = plan
        age = step - begun.setdefault(plan.version, step)
        return SLOW if (age >= 10 if plan.version == 0 else age < 10) else HEALTHY

    ahead = InsertComm("ahead").ahead_of_need
    initial = plan_zero(SLOW_PROGRAM)
    with controllers(
        journal, planner=lambda case, incumbent: incumbent, initial=lambda rank: initial, ahead_of_need=ahead
    ) as started:

        def until(step: int, plan: Plan) -> bool:
            if step == 11:
                journal.wait_for(EventKind.CONFIRMED, count=RANKS)
            return (
                any("healed" in event.text for event in journal.of(EventKind.DETECTED)) and len(journal.of(EventKind.KEPT)) > 2
            )

        assert train(started, journal, until, cost) == []
    assert_agreed(journal)
    assert set(found) == {0, 1}, "a healed link needs no receive sooner"
    assert found[1].program == SLOW_PROGRAM and found[1].case.cost.latency(1, 2) == pytest.approx(0.06)
    (proposed,) = journal.of(EventKind.PROPOSED)
    assert proposed.text.startswith("in case of edge") and "the same order, receives sooner" in proposed.text
    assert any(ahead(SLOW_PROGRAM, SLOW)[channel] > count for channel, count in ahead(SLOW_PROGRAM, HEALTHY).items())


def test_without_adapting_it_measures_detects_and_predicts_but_never_switches() -> None:
    journal = Journal()

    def until(step: int, plan: Plan) -> bool:
        return any(
            kept.predicted_before == pytest.approx(predict(HEALTHY_PROGRAM, SLOW)) for kept in journal.of(EventKind.KEPT)
        )

    with controllers(journal, options=ControllerOptions(adapt=False)) as started:
        assert train(started, journal, until, cost=lambda step, plan: SLOW if step > 20 else HEALTHY) == []
    calibrated, slow, *others = [event.text for event in journal.of(EventKind.DETECTED)]
    assert (calibrated, others) == ("calibrated by measurement", [])
    assert sorted(slow.split("; ")) == ["edge 1→2 slow: 60.0 ms (was 0.2 ms)", "edge 2→1 slow: 60.0 ms (was 0.2 ms)"]
    assert journal.of(EventKind.PROPOSED) == journal.of(EventKind.SWITCHED) == []


def test_ranks_that_start_with_different_programs_are_told_at_the_first_step() -> None:
    other = one_f_one_b(RANKS, MICROBATCHES)
    journal = Journal()
    with controllers(journal, initial=lambda rank: plan_zero(other if rank == 3 else HEALTHY_PROGRAM)) as started:
        raised = train(started, journal, lambda step, plan: True)
    assert len(raised) == RANKS
    assert all(
        "rank 3 holds program" in str(error) and "every rank must compile the same program" in str(error) for error in raised
    )


def test_a_planner_without_a_plan_keeps_the_old_one() -> None:
    journal = Journal()

    def no_plan(case: Case, incumbent: Program) -> Program:
        raise PlanError("12 microbatches fit nowhere")

    with controllers(journal, planner=no_plan) as started:
        assert train(started, journal, lambda step, plan: bool(journal.of(EventKind.KEPT)) and step > 20) == []
    assert journal.of(EventKind.KEPT)[0].text == "no other plan: 12 microbatches fit nowhere"


def test_a_bug_in_the_planner_ends_training_on_all_ranks_with_its_error() -> None:
    journal = Journal()
    errors: list[Exception] = []

    def broken(case: Case, incumbent: Program) -> Program:
        return [][len(case.name)]

    with controllers(journal, planner=broken, on_error=errors.append) as started:
        raised = train(started, journal, lambda step, plan: False)
        with pytest.raises(ControlError, match="list index out of range"):
            started[3].plan_for(0)
    assert len(raised) == RANKS
    assert all(isinstance(error, ControlError) and "list index out of range" in str(error) for error in raised)
    assert len(errors) == RANKS
    assert any(isinstance(error, IndexError) for error in errors)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\x80\x04K\x01.", "mail: not JSON"),
        (
            '{"mail": "run"}',
            "expected one of measured, proposed, confirmed, refused, withdrawn, joined, term, log, given, differed, failed, "
            "gathered, spread, anew, got 'run'",
        ),
        ('{"mail": "term", "term": 1, "more": 1}', "mail: unknown field 'more'"),
        ('{"mail": "refused", "rank": 9, "version": 0, "why": ""}', "mail of rank 9: expected ranks 0..3"),
    ],
)
def test_mail_that_is_none_ends_the_control_plane_everywhere(text: str, message: str) -> None:
    journal, store = Journal(), dist.HashStore()
    with controllers(journal, store=store) as started:
        under(str(FIRST_ATTEMPT), store).queue_push("mail/0", text)
        raised = train(started, journal, lambda step, plan: False)
    assert len(raised) == RANKS
    assert all(message in str(error) for error in raised)


def test_closing_wakes_a_rank_that_waits_for_its_plan_and_ends_the_thread() -> None:
    """Rank 3 never starts, so plan 0 is never agreed."""
    journal = Journal()
    raised: list[Exception] = []
    before = {*threading.enumerate()}  # a test before this one may have left some that still end

    def wait(controller: Controller) -> None:
        try:
            controller.plan_for(0)
        except ControlError as error:
            raised.append(error)

    with controllers(journal, ranks=range(3)) as started:
        thread = threading.Thread(target=wait, args=(started[1],))
        thread.start()
        started[1].close()
        started[1].close()
        thread.join(100)
    assert [str(error) for error in raised] == ["step 0 has no plan: the controller of rank 1 is closed"]
    left = {*threading.enumerate()} - before
    assert not any(thread.name.startswith(("adaptra-controller", "adaptra-mail")) for thread in left)


def test_a_failure_of_training_reaches_a_rank_that_waits_for_its_plan() -> None:
    with controllers(Journal(), ranks=range(3)) as started:
        started[1].abort(PeerLostError("rank 3 died"))
        with pytest.raises(PeerLostError, match=r"^rank 3 died$"):
            started[1].plan_for(0)


def test_a_lost_store_ends_training_with_an_error() -> None:
    """The store's server goes away while all ranks wait for a fourth one."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
    told: queue.Queue[Exception] = queue.Queue()
    journal = Journal()
    with controllers(journal, ranks=range(3), store=client, on_error=told.put) as started:
        del server
        raised = train(started, journal, lambda step, plan: False, ranks=range(3))
        # Training may meet the lost store before the control thread does, which a controller that is closed does not tell.
        errors = [told.get(timeout=100) for _ in range(3)]
    assert len(raised) == 3
    assert all(isinstance(error, ControlError) for error in raised)
    assert all(isinstance(error, dist.DistError) for error in errors)


def test_a_store_that_falls_silent_ends_training_with_an_error() -> None:
    """Nothing that the ranks send arrives, and no connection ends: none of them waits for ever."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    proxy = Proxy(server.port)
    client = dist.TCPStore("127.0.0.1", proxy.port, is_master=False, wait_for_workers=False)
    journal = Journal()
    with controllers(journal, store=client, options=ControllerOptions(answer_seconds=0.05)) as started:
        raised = train(started, journal, lambda step, plan: proxy.stall() if step == 5 else False)
        # Closing wakes the control threads, which then see what came meanwhile.
        proxy.go_on()
    assert len(raised) == RANKS
    for error in raised:
        check_documented(type(error).__name__, str(error), SILENT)


def test_a_store_that_answers_late_delays_training_and_ends_it_not() -> None:
    """Questions that came as often as at first would keep it, and who coordinates, from any answer."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    proxy = Proxy(server.port)
    client = dist.TCPStore("127.0.0.1", proxy.port, is_master=False, wait_for_workers=False)
    journal = Journal()
    with controllers(journal, store=client, options=ControllerOptions(answer_seconds=0.1, plan_seconds=60)) as started:
        assert train(started, journal, lambda step, plan: step == 8 or (step == 2 and proxy.delay(0.05))) == []
        proxy.delay(0)
    assert_agreed(journal)


def test_a_step_without_a_plan_in_time_says_so() -> None:
    with (
        controllers(Journal(), ranks=range(3), options=ControllerOptions(plan_seconds=0.05)) as started,
        pytest.raises(ControlError, match=r"step 0 has no plan after 0\.05 s: a rank has not reported its last step"),
    ):
        started[1].plan_for(0)


def test_a_later_first_step_and_a_store_that_stays_small() -> None:
    journal, store = Journal(), dist.HashStore()
    with controllers(journal, store=store, first_step=1000) as started:
        assert train(started, journal, lambda step, plan: step == 1200, first_step=1000) == []
        assert store.num_keys() < 10
    assert_agreed(journal)
    assert min(journal.versions()) == 1000


def test_events_are_plain_data() -> None:
    event = ControlEvent(EventKind.AGREED, 0, 7, 2, "edge 1→2 slow", 0.5, 0.9)
    assert json.loads(json.dumps(event.to_json()))["kind"] == "agreed"
    assert str(event) == "step 7: agreed plan 2: edge 1→2 slow"


def rank_process(rank: int, port: int) -> None:
    """One rank of the test below: trains until plan 2, and puts what it ran into the store."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=30))
    controller = Controller(AgreeingRanks(rank, RANKS), dist.PrefixStore("control", store), plan_zero(), Planning(best))
    ran: list[int] = []
    while (plan := controller.plan_for(len(ran))).version < 2:
        controller.report(measurement(rank, len(ran), against(plan)))
        ran.append(plan.version)
    controller.close()
    store.set(f"ran/{rank}", json.dumps(ran))


@pytest.mark.processes
def test_processes_switch_at_the_same_step() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=45))
    spawn = multiprocessing.get_context("spawn")
    processes = [spawn.Process(target=rank_process, args=(rank, store.port)) for rank in range(RANKS)]
    for process in processes:
        process.start()
    try:
        keys = [f"ran/{rank}" for rank in range(RANKS)]
        store.wait(keys, timedelta(seconds=45))
        ran = [json.loads(store.get(key)) for key in keys]
    finally:
        for process in processes:
            process.join(100)
            if process.is_alive():
                process.kill()
    assert [process.exitcode for process in processes] == [0] * RANKS
    assert ran[0] == sorted(ran[0])
    assert set(ran[0]) == {0, 1}
    assert ran == [ran[0]] * RANKS
