"""Heartbeats of many ranks, stepped in one thread on a clock of the test's."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import pytest
from errors_table import check_documented
from stepped_ranks import SteppedRanks
from transport_bodies import backward

from adaptra.errors import PeerLostError, TransportError
from adaptra.runtime.membership.cause import failure_of
from adaptra.runtime.membership.direct_questions import UNKNOWN, Sign
from adaptra.runtime.membership.heartbeat import HeartbeatProtocol
from adaptra.runtime.membership.record import State
from adaptra.runtime.membership.timing import HeartbeatTiming
from adaptra.runtime.membership.view import Phase

DOCUMENTED = {
    "frozen": "rank … gave no sign of life for … s: its process does not answer, so it is frozen or cut off…",
    "gone": "rank … gave no sign of life for … s: its process has ended…",
    "busy": "rank … gave no sign of life for … s: its process answers, but its Python does not run…",
}


def fail(job: SteppedRanks, rank: int, error: BaseException) -> BaseException:
    """What a rank raises for an error, right after it was reported."""
    failure = failure_of(error, None, None)
    job.ranks[rank].fail(failure, error)
    return job.ranks[rank].error_for(error, failure)


def test_at_rest_a_heartbeat_is_one_write_and_one_question_however_many_ranks_there_are() -> None:
    job = SteppedRanks(200)
    for _ in range(3):
        job.beat()
    job.store.forget()
    for _ in range(10):
        job.beat()
    assert job.store.requests[0] == Counter(multi_set=10, multi_get=10)
    assert all(job.store.requests[rank] == Counter(multi_set=10, compare_set=10) for rank in range(1, 200))
    assert not job.told


def test_a_failure_is_known_to_a_hundred_ranks_after_three_heartbeats() -> None:
    """The leader's next bulletin may replace the call once; the rank then repeats it."""
    job = SteppedRanks(100)
    for _ in range(3):
        job.beat()
    error = ZeroDivisionError("by zero")
    assert fail(job, 7, error) is error
    assert job.ranks[7].pause() == 0, "its record is out of date"
    for _ in range(3):
        job.beat()
    assert {str(lost) for lost in job.told.values()} == {"rank 7 failed: ZeroDivisionError: by zero"}
    assert set(job.told) == set(range(100)) - {7}
    assert not any(rank.view.has_lost_a_process for rank in job.ranks)
    job.beat()
    job.beat()
    assert job.ranks[7].view.phase is Phase.KNOWN and job.ranks[7].view.is_cause


def test_a_silent_rank_is_named_to_all_once_its_time_is_over() -> None:
    job = SteppedRanks(6, waiting_for=lambda rank, other: backward(4) if (rank, other) == (0, 1) else None)
    for _ in range(4):
        job.beat()
    living = [rank for rank in range(6) if rank != 4]
    for _ in range(20):
        job.beat(living)
    assert not job.told
    for _ in range(3):
        job.beat(living)
    assert set(job.told) == {0}
    # The others read rank 4's record for the first time now, and confirm that it is silent.
    for _ in range(4):
        job.beat(living)
    assert set(job.told) == set(living)
    assert str(job.told[0]) == "rank 4 gave no sign of life for 10.5 s, while edge 1→0 waits for 1SEND_B4 of step 0"
    assert str(job.told[5]).startswith("rank 4 is lost, as rank 0 noticed at 1SEND_B4 on edge 1→0: rank 4 gave no sign")
    assert job.ranks[0].view.state is State.FAILED


def test_the_leader_that_falls_silent_is_named_by_those_that_read_its_bulletin() -> None:
    job = SteppedRanks(5)
    for _ in range(4):
        job.beat()
    for _ in range(25):
        job.beat(range(1, 5))
    assert set(job.told) == {1, 2, 3, 4} and {lost.rank for lost in job.told.values()} == {0}


def frozen(now: float) -> Sign:
    """What is known of a process that answered at the start and does not answer now."""
    return Sign(is_reachable=True, answered_at=now, unanswered=5)


@pytest.mark.parametrize("victim", [4, 0])
def test_a_frozen_rank_is_named_to_all_within_five_seconds_and_not_before_two(victim: int) -> None:
    job = SteppedRanks(6, sign_of=lambda rank: frozen(0.5))
    for _ in range(4):
        job.beat()
    froze_at = job.now
    living = [rank for rank in range(6) if rank != victim]
    while len(job.told) < 5:
        job.beat(living)
        assert job.now - froze_at <= 4.5, "not all know"
        assert not job.told or job.now - froze_at > 2.0
    assert {lost.rank for lost in job.told.values()} == {victim}
    assert all(job.ranks[rank].view.has_lost_a_process for rank in living)
    check_documented("PeerLostError", str(job.told[1]).partition("noticed: ")[2] or str(job.told[1]), DOCUMENTED["frozen"])
    assert all(
        f"rank {victim} gave no sign of life for 3.0 s: its process does not answer" in str(lost) for lost in job.told.values()
    )


def test_a_rank_whose_process_answers_is_not_lost_before_its_message_is() -> None:
    job = SteppedRanks(4, sign_of=lambda rank: Sign(is_reachable=True, answered_at=job.now))
    for _ in range(4):
        job.beat()
    for _ in range(580):
        job.beat([0, 1, 3])
    assert not job.told
    for _ in range(40):
        job.beat([0, 1, 3])
    assert {lost.rank for lost in job.told.values()} == {2} and len(job.told) == 3
    check_documented("PeerLostError", str(job.told[0]), DOCUMENTED["busy"])
    assert "gave no sign of life for 300.5 s: its process answers, but its Python does not run" in str(job.told[0])


def test_a_busy_rank_that_runs_again_stays_in_the_job() -> None:
    job = SteppedRanks(4, sign_of=lambda rank: Sign(is_reachable=True, answered_at=job.now))
    for _ in range(4):
        job.beat()
    for busy in ([0, 1, 3], [1, 2, 3]):  # rank 2 for 30 s, then the leader
        for _ in range(60):
            job.beat(busy)
        for _ in range(4):
            job.beat()
    assert not job.told


def test_a_rank_whose_process_is_gone_is_named_after_two_seconds() -> None:
    job = SteppedRanks(4, sign_of=lambda rank: Sign(is_reachable=True, answered_at=0.5, is_gone=rank == 2))
    for _ in range(4):
        job.beat()
    for _ in range(4):
        job.beat([0, 1, 3])
    assert not job.told
    assert [job.ranks[rank].pause() for rank in (0, 1, 3)] == [0.01, 0.5, 0.5], "the leader, who judges it, waits no longer"
    for _ in range(3):
        job.beat([0, 1, 3])
    assert {lost.rank for lost in job.told.values()} == {2} and len(job.told) == 3
    check_documented("PeerLostError", str(job.told[0]), DOCUMENTED["gone"])
    assert "gave no sign of life for 2.5 s: its process has ended" in str(job.told[0])


def test_only_the_leader_and_the_stores_host_are_known_to_all_and_only_the_silent_are_asked() -> None:
    job = SteppedRanks(200, sign_of=lambda rank: Sign(is_reachable=True, answered_at=job.now), store_host=7)
    for _ in range(5):
        job.beat()
    known = [set() if asker is None else asker.known for asker in job.askers]
    assert known[0] == set(range(1, 200))
    assert known[7] == {0} and all(known[rank] == {0, 7} for rank in range(1, 200) if rank != 7)
    assert not any(rank.to_be_asked() for rank in job.ranks)
    assert {rank.pause() for rank in job.ranks} == {0.5}
    job.store.forget()
    for _ in range(10):
        job.beat()
    assert job.store.requests[0] == Counter(multi_set=10, multi_get=10)
    assert all(job.store.requests[rank] == Counter(multi_set=10, compare_set=10) for rank in range(1, 200))
    for _ in range(3):
        job.beat([rank for rank in range(200) if rank != 9])
    assert [rank.to_be_asked() for rank in job.ranks[:3]] == [{9}, set(), set()]


def test_a_silent_stores_host_is_asked_and_lost_once_it_does_not_answer() -> None:
    signs = {0: Sign(is_reachable=True, answered_at=0.5)}
    job = SteppedRanks(3, sign_of=lambda rank: signs.get(rank, UNKNOWN), store_host=0)
    for _ in range(4):
        job.beat()
    rank = job.ranks[2]
    assert not rank.to_be_asked()
    job.now += 1.5
    assert rank.to_be_asked() == {0} and not rank.is_stuck()
    job.now += 5.0
    signs[0] = Sign(is_reachable=True, answered_at=job.now)
    assert not rank.is_stuck(), "its process answers"
    job.now += 1.0
    signs[0] = Sign(is_reachable=True, answered_at=job.now - 3.5, unanswered=5)
    assert rank.is_stuck()
    lost = rank.lose_store("no answer for 7.5 s")
    assert lost is not None and lost.rank == 0 and not rank.is_stuck()


def test_a_rank_hurries_until_it_knows_where_the_stores_host_answers() -> None:
    """A host that freezes in its first second could not be asked otherwise, since the store freezes with it."""
    job = SteppedRanks(3, sign_of=lambda rank: UNKNOWN, store_host=0)
    job.beat([1])
    assert job.ranks[1].pause() == 0.01
    job.beat([0, 1])
    assert job.ranks[1].pause() == job.ranks[0].pause() == 0.5
    job.beat([2])
    assert job.ranks[2].pause() == 0.5


def test_a_rank_that_never_comes_is_found_and_named() -> None:
    job = SteppedRanks(9)
    for _ in range(25):
        job.beat(range(8))
    assert {lost.rank for lost in job.told.values()} == {8} and len(job.told) == 8


def test_a_reported_rank_that_lives_has_half_the_time_to_say_why() -> None:
    """Rank 2 reports rank 1, which reports itself a moment later: nobody blames a lost connection."""
    job = SteppedRanks(4)
    for _ in range(3):
        job.beat()
    fail(job, 2, PeerLostError("connection closed", rank=1, edge=(1, 2), op="1SEND_F0"))
    for _ in range(4):
        job.beat()
    assert not job.told
    assert [rank.view.is_settled for rank in job.ranks] == [False] * 4
    fail(job, 1, MemoryError("no memory"))
    job.beat()
    job.beat()
    assert {rank: str(lost) for rank, lost in job.told.items()} == dict.fromkeys(
        (0, 2, 3), "rank 1 failed: MemoryError: no memory"
    )
    # What follows from a loss is no failure of one's own: the rank leaves.
    followed = fail(job, 3, TransportError("connection closed"))
    assert followed is job.told[3] and job.ranks[3].view.state is State.LEFT


def test_a_reported_rank_that_says_nothing_is_lost_after_that_time() -> None:
    job = SteppedRanks(3)
    for _ in range(3):
        job.beat()
    fail(job, 2, PeerLostError("no message", rank=1))
    for _ in range(10):
        job.beat()
    assert not job.told
    for _ in range(4):
        job.beat()
    assert {rank: lost.rank for rank, lost in job.told.items()} == {0: 1, 1: 2}


def test_all_leave_and_nobody_is_lost() -> None:
    job = SteppedRanks(4)
    for _ in range(3):
        job.beat()
    for rank in job.ranks:
        rank.leave()
        job.beat()
    job.beat()
    assert [rank.view.phase for rank in job.ranks] == [Phase.KNOWN] * 4
    for rank in job.ranks:
        rank.view.end()
    for _ in range(40):
        job.beat([0])
    assert not job.told


def test_a_rank_hurries_while_others_must_learn_why_it_goes() -> None:
    job = SteppedRanks(16)
    for _ in range(3):
        job.beat()
    assert {rank.pause() for rank in job.ranks} == {0.5}
    job.ranks[3].leave()
    job.beat([3])
    assert job.ranks[3].pause() == 0.02
    job.now += HeartbeatTiming().farewell_seconds
    assert job.ranks[3].pause() == 0.5


class Gone:
    """A store that can't be reached."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("connection closed")


@pytest.mark.parametrize("has_left", [False, True])
def test_a_store_that_fails_ends_the_heartbeats_with_a_loss_unless_a_rank_has_left(has_left: bool) -> None:
    job = SteppedRanks(2)
    job.beat()
    job.beat()
    if has_left:
        job.ranks[1].leave()
        job.beat()
        job.beat()
    gone: Any = Gone()
    rank: HeartbeatProtocol = job.ranks[0]
    rank._store = rank._board._store = gone
    outcome = rank.beat()
    assert outcome.is_last
    if has_left:
        assert outcome.lost is None and rank.view.phase is Phase.ENDED
    else:
        assert str(outcome.lost) == (
            "the control store is lost: the process that hosts it died or can't be reached: connection closed"
        )
        assert rank.view.phase is Phase.CUT_OFF and rank.view.lost is outcome.lost


def test_a_store_that_does_not_answer_is_noticed_from_outside() -> None:
    job = SteppedRanks(2)
    job.beat()
    assert not job.ranks[0].is_stuck()
    job.now += 10.5
    assert job.ranks[0].is_stuck()
    lost = job.ranks[0].lose_store("no answer for 10 s")
    assert lost is not None and "no answer for 10 s" in str(lost) and not job.ranks[0].is_stuck()


@pytest.mark.parametrize(
    ("host", "has_reported", "named"), [(0, True, 0), (0, False, 0), (None, False, None), (None, True, "")]
)
def test_the_rank_that_has_the_lost_store_is_named_also_by_who_has_blamed_another(
    host: int | None, has_reported: bool, named: int | str | None
) -> None:
    """Without a known host a rank that has reported a loss stays with it: its report may have ended the store's process."""
    store = SteppedRanks(3).store
    rank = HeartbeatProtocol(
        store.of(1), 1, 3, lambda _: None, HeartbeatTiming(), lambda: 0.0, threading.RLock(), store_host=host
    )
    if has_reported:
        error = PeerLostError("connection closed", rank=2)
        rank.fail(failure_of(error, None, None), error)
    lost = rank.lose_store("no answer")
    assert ("" if lost is None else lost.rank) == named
    if lost is not None:
        assert ("rank 0 is lost: " if host == 0 else "") + "the control store is lost: the process" in str(lost)
