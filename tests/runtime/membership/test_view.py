"""The states of a rank's view of the job, event by event."""

from __future__ import annotations

import pytest

from adaptra.errors import PeerLostError
from adaptra.runtime.membership.record import Failure, RankRecord, State
from adaptra.runtime.membership.view import Inquiry, Phase, View

FAILURE = Failure(0, "ValueError: no", None, None, None)


def record(beat: int, state: State = State.RUNNING, seen: tuple[int, ...] = (), is_settled: bool = True) -> RankRecord:
    failure = Failure(1, "ValueError: no", None, None, None) if state is State.FAILED else None
    return RankRecord(beat, state, failure, seen, is_settled)


def nobody_is_quiet(_: int) -> bool:
    return False


def test_a_new_view_knows_of_no_end() -> None:
    view = View(1, 3)
    assert view.others == (0, 2)
    assert (view.state, view.phase, view.inquiry) == (State.RUNNING, Phase.MEMBER, Inquiry.NONE)
    assert view.is_settled and not view.is_cause and not view.gone() and not view.failures()


def test_only_a_newer_record_or_bulletin_is_a_sign_of_life() -> None:
    view = View(1, 3)
    assert view.read_record(2, record(5))
    assert not view.read_record(2, record(5, State.LEFT)) and not view.read_record(2, record(4, State.LEFT))
    assert not view.has_left(2)
    assert view.read_record(2, record(6, State.LEFT)) and view.has_left(2) and view.gone() == (2,)
    assert [view.read_bulletin(number) for number in (3, 3, 2, 4)] == [True, False, False, True]


def test_a_rank_fails_once_and_counts_as_failed_once_the_store_has_numbered_it() -> None:
    view = View(1, 3)
    assert view.fail(FAILURE) and not view.fail(FAILURE)
    assert (view.state, view.inquiry) == (State.FAILED, Inquiry.OPEN)
    assert not view.failures() and not view.leave()
    said = view.next_record()
    assert (said.beat, said.state, said.failure, said.is_settled) == (1, State.FAILED, FAILURE, False)
    view.failure = Failure(4, "ValueError: no", None, None, None)
    assert view.failures() == {1: view.failure}


def test_a_rank_that_left_may_still_fail_before_its_end() -> None:
    view = View(1, 3)
    assert view.leave() and not view.leave()
    assert view.fail(FAILURE) and view.state is State.FAILED


@pytest.mark.parametrize("end", [View.cut_off, View.end])
def test_no_failure_is_reported_without_the_store_or_after_the_end(end: object) -> None:
    view = View(1, 3)
    assert callable(end)
    end(view)
    assert not view.fail(FAILURE) and view.state is State.RUNNING


def test_the_cause_may_be_in_doubt_again_until_a_loss_is_raised() -> None:
    view = View(1, 3)
    view.fail(FAILURE)
    assert view.find(1, is_final=True) and view.is_cause
    assert not view.find(2, is_final=False) and not view.is_settled
    assert view.find(2, is_final=True) and not view.is_cause
    first = PeerLostError("rank 2 failed", rank=2)
    assert view.lose(first) and not view.lose(PeerLostError("another")) and view.lost is first
    assert view.find(0, is_final=False), "the job has ended already"


def test_a_rank_that_leaves_is_known_to_those_that_saw_it_left_or_are_silent() -> None:
    view = View(1, 5)
    view.leave()
    written = view.next_record()
    view.read_record(0, record(1, seen=(1,)))
    view.read_record(2, record(1, State.LEFT))
    view.read_record(3, record(1))
    view.note_known(written, lambda rank: rank == 4)
    assert view.phase is Phase.MEMBER, "rank 3 has not seen it"
    view.read_record(3, record(2, seen=(1,)))
    view.note_known(written, nobody_is_quiet)
    assert view.phase is Phase.MEMBER, "of rank 4 no record was read"
    view.note_known(written, lambda rank: rank == 4)
    assert view.phase is Phase.KNOWN
    view.note_known(written, nobody_is_quiet)
    assert view.phase is Phase.MEMBER, "rank 4 lives after all"


def test_a_failure_is_known_once_it_is_settled_here_and_there() -> None:
    view = View(0, 2)
    view.fail(FAILURE)
    unsettled = view.next_record()
    view.read_record(1, record(1, seen=(0,), is_settled=False))
    view.note_known(unsettled, nobody_is_quiet)
    view.find(0, is_final=True)
    settled = view.next_record()
    view.note_known(settled, nobody_is_quiet)
    assert view.phase is Phase.MEMBER
    view.read_record(1, record(2, seen=(0,)))
    view.note_known(unsettled, nobody_is_quiet)
    assert view.phase is Phase.MEMBER, "the others have not read that it is settled"
    view.note_known(settled, nobody_is_quiet)
    assert view.phase is Phase.KNOWN


def test_a_lost_store_ends_nothing_that_has_ended() -> None:
    view = View(0, 2)
    view.cut_off()
    view.note_known(record(1, State.LEFT), nobody_is_quiet)
    assert view.phase is Phase.CUT_OFF
    view.end()
    view.cut_off()
    assert view.phase is Phase.ENDED and not view.lose(PeerLostError("late"))


def test_the_end_is_expected_once_a_rank_left() -> None:
    view = View(0, 2)
    assert not view.expects_the_end
    view.read_record(1, record(1, State.FAILED))
    assert not view.expects_the_end
    view.read_record(1, record(2, State.LEFT))
    assert view.expects_the_end
    own = View(0, 2)
    own.leave()
    assert own.expects_the_end
