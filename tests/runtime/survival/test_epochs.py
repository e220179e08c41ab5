"""What the processes of a broken epoch have said, and what follows from it."""

from __future__ import annotations

import pytest

from adaptra.runtime.survival.epochs import (
    FAILED,
    LOST,
    Census,
    End,
    Epoch,
    Progress,
    census_of,
    decide,
    follower_of,
    leader,
    text_of,
)
from adaptra.runtime.world.world import World

FOUR = World.of_fewer(4, places=2, replicas=2)


def test_a_call_that_one_has_not_completed_runs_again() -> None:
    said = {process: Census(7) for process in range(3)} | {3: Census(6)}
    assert decide(FOUR, said, {}) == Epoch(FOUR.followed_by(), 6)


def test_a_lost_process_is_not_waited_for_and_its_worker_gets_another_host() -> None:
    said = {0: Census(7), 2: Census(7), 3: Census(7)}
    assert decide(FOUR, said, {}) is None
    after = decide(FOUR, said, {1: "was ended by SIGKILL"})
    assert isinstance(after, Epoch)
    assert (after.world.epoch, after.world.hosts, after.world.processes, after.call) == (1, (0, 3, 2, 3), (0, 2, 3), 7)


def test_the_last_process_of_a_place_and_of_a_replica_end_the_job() -> None:
    end = decide(FOUR, {0: Census(7), 2: Census(7)}, {1: "was ended by SIGKILL", 3: "does not answer"})
    assert end == End(
        LOST,
        "all processes with the stages of place 1 are lost: rank 1, 3 (rank 1 was ended by SIGKILL; rank 3 does not answer)",
        call=7,
    )
    end = decide(FOUR, {0: Census(7), 1: Census(7)}, {2: "was ended", 3: "was ended"})
    assert isinstance(end, End) and "batch of replica 1 are lost" in end.why


def test_an_exception_of_a_process_ends_the_job_whoever_is_silent() -> None:
    assert decide(FOUR, {2: Census(7, "ValueError: no")}, {}) == End(FAILED, "ValueError: no", 2)


def test_the_lowest_process_that_is_left_decides() -> None:
    assert leader(FOUR, {}) == 0
    assert leader(FOUR, {0: "was ended", 1: "was ended"}) == 2
    assert leader(FOUR, dict.fromkeys(range(4), "was ended")) is None


def test_a_process_completes_nothing_after_its_census() -> None:
    progress = Progress(4)
    assert progress.complete(5)
    assert progress.say() == Census(5)
    assert not progress.complete(6)
    assert progress.say() == Census(5)


@pytest.mark.parametrize("record", [Epoch(FOUR.followed_by(), 6), End(FAILED, "ValueError: no", 2), End(LOST, "all", None, 7)])
def test_a_record_is_read_as_it_was_written(record: Epoch | End) -> None:
    assert follower_of(text_of(record)) == record
    assert census_of(text_of(Census(3, "why"))) == Census(3, "why")
