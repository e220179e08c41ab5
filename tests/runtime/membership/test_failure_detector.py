"""Who is silent, by times that the test gives."""

from __future__ import annotations

from adaptra.runtime.membership.failure_detector import FailureDetector


def watching(until: float, heard_at: float = 0.0, response: float = 0.0) -> FailureDetector:
    """A detector that began at 0, heard rank 1 once, and whose last answer came at ``until``."""
    detector = FailureDetector(interval=0.5, lost_after=10.0, now=0.0)
    if heard_at:
        detector.answered(heard_at - response, heard_at)
        detector.heard(1, heard_at)
    detector.answered(until - response, until)
    return detector


def test_silence_lasts_from_the_last_heartbeat_or_from_the_beginning() -> None:
    detector = watching(until=7.0, heard_at=4.0)
    assert (detector.silence(1), detector.silence(2)) == (3.0, 7.0)


def test_silence_lasts_until_the_last_question_and_not_until_its_answer() -> None:
    assert watching(until=7.0, heard_at=4.0, response=2.0).silence(1) == 1.0


def test_a_rank_is_lost_after_its_time() -> None:
    assert not watching(until=14.0, heard_at=4.0).is_lost(1)
    assert watching(until=14.5, heard_at=4.0).is_lost(1)


def test_the_longest_of_the_last_response_times_is_added() -> None:
    detector = watching(until=12.0, response=1.5)
    assert detector.silence(1) == 10.5 and not detector.is_lost(1)
    for answers in range(16):
        assert not detector.is_lost(1), answers
        detector.answered(10.5, 10.5)
    assert detector.is_lost(1)


def test_a_rank_reported_lost_is_confirmed_after_three_heartbeats_or_a_moment() -> None:
    assert not watching(until=5.5, heard_at=4.0).is_quiet(1)
    assert watching(until=5.6, heard_at=4.0).is_quiet(1)
    slow = FailureDetector(interval=3.0, lost_after=10.0, now=0.0)
    slow.answered(9.0, 9.0)
    assert not slow.is_quiet(1)
    slow.answered(9.1, 9.1)
    assert slow.is_quiet(1)


def test_a_rank_that_never_comes_is_overdue_once_it_would_be_lost() -> None:
    detector = FailureDetector(interval=0.5, lost_after=10.0, now=100.0)
    assert not detector.is_overdue(110.0) and detector.is_overdue(110.5)
