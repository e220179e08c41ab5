"""Who is silent, by times that the test gives."""

from __future__ import annotations

import dataclasses

import pytest

from adaptra.runtime.membership.direct_questions import UNKNOWN, Sign
from adaptra.runtime.membership.failure_detector import FailureDetector, Loss, is_store_lost
from adaptra.runtime.membership.timing import HeartbeatTiming

TIMING = HeartbeatTiming()
ANSWERED_EARLY = Sign(is_reachable=True, answered_at=0.5)
"""A rank that answered at the start and was not asked since."""


def watching(until: float, heard_at: float = 0.0, response: float = 0.0) -> FailureDetector:
    """A detector that began at 0, heard rank 1 once, and whose last answer came at ``until``."""
    detector = FailureDetector(TIMING, now=0.0)
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


def test_a_rank_that_never_answered_a_direct_question_is_lost_after_its_time() -> None:
    assert watching(until=14.0, heard_at=4.0).loss(1) is None
    assert watching(until=14.5, heard_at=4.0).loss(1) is Loss.SILENT


def test_a_process_that_is_gone_is_lost_as_soon_as_anything_is_certain() -> None:
    gone = dataclasses.replace(ANSWERED_EARLY, is_gone=True)
    assert watching(until=6.0, heard_at=4.0).loss(1, gone) is None
    assert watching(until=6.1, heard_at=4.0).loss(1, gone) is Loss.GONE


def test_a_process_that_does_not_answer_is_lost_once_several_questions_went_unanswered() -> None:
    silent = dataclasses.replace(ANSWERED_EARLY, unanswered=3)
    assert watching(until=6.75, heard_at=4.0).loss(1, silent) is None
    assert watching(until=7.0, heard_at=4.0).loss(1, silent) is Loss.FROZEN
    hardly_asked = dataclasses.replace(silent, unanswered=2)
    assert watching(until=14.0, heard_at=4.0).loss(1, hardly_asked) is None
    assert watching(until=14.1, heard_at=4.0).loss(1, hardly_asked) is Loss.SILENT
    answered_since = dataclasses.replace(silent, answered_at=6.0)
    assert watching(until=8.7, heard_at=4.0).loss(1, answered_since) is None
    assert watching(until=8.8, heard_at=4.0).loss(1, answered_since) is Loss.FROZEN


def test_a_process_that_answers_is_busy_for_as_long_as_a_message_may_take() -> None:
    assert watching(until=303.9, heard_at=4.0).loss(1, dataclasses.replace(ANSWERED_EARLY, answered_at=303.8)) is None
    assert watching(until=304.1, heard_at=4.0).loss(1, dataclasses.replace(ANSWERED_EARLY, answered_at=304.0)) is Loss.BUSY


@pytest.mark.parametrize(
    ("sign", "silence", "quiet"),
    [
        (UNKNOWN, 6.0, 6.0),
        (dataclasses.replace(ANSWERED_EARLY, is_gone=True), 2.0, 2.0),
        (dataclasses.replace(ANSWERED_EARLY, unanswered=3), 2.75, 2.75),
        (dataclasses.replace(ANSWERED_EARLY, unanswered=3), 8.0, 2.75),
        (ANSWERED_EARLY, 10.0, 0.5),
        (dataclasses.replace(ANSWERED_EARLY, is_held=True), 300.0, 0.5),
    ],
)
def test_a_store_is_lost_by_what_its_host_answers(sign: Sign, silence: float, quiet: float) -> None:
    assert not is_store_lost(silence, quiet, sign, TIMING)
    assert is_store_lost(silence + 0.1, quiet + 0.1, sign, TIMING)


def test_the_longest_of_the_last_response_times_is_added() -> None:
    detector = watching(until=12.0, response=1.5)
    assert detector.silence(1) == 10.5 and detector.loss(1) is None
    for answers in range(16):
        assert detector.loss(1) is None, answers
        detector.answered(10.5, 10.5)
    assert detector.loss(1) is Loss.SILENT


def test_a_rank_reported_lost_is_confirmed_after_three_heartbeats_or_a_moment() -> None:
    assert not watching(until=5.5, heard_at=4.0).is_quiet(1)
    assert watching(until=5.6, heard_at=4.0).is_quiet(1)
    slow = FailureDetector(HeartbeatTiming(interval=3.0), now=0.0)
    slow.answered(9.0, 9.0)
    assert not slow.is_quiet(1)
    slow.answered(9.1, 9.1)
    assert slow.is_quiet(1)


def test_a_rank_reported_lost_is_not_confirmed_while_its_process_answers() -> None:
    busy = dataclasses.replace(ANSWERED_EARLY, answered_at=5.0)
    assert not watching(until=6.4, heard_at=4.0).is_quiet(1, busy)
    assert watching(until=6.6, heard_at=4.0).is_quiet(1, busy)
    assert watching(until=6.4, heard_at=4.0).is_quiet(1, dataclasses.replace(busy, is_gone=True))


def test_a_rank_that_never_comes_is_overdue_once_it_would_be_lost() -> None:
    detector = FailureDetector(TIMING, now=100.0)
    assert not detector.is_overdue(110.0) and detector.is_overdue(110.5)
