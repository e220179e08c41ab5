"""Failure traces, the live workers over time, and the throughput of a job that lives through a trace."""

from __future__ import annotations

from pathlib import Path

import pytest

from adaptra.errors import CaseError
from adaptra.planning.responses.availability import (
    DAY,
    Change,
    FailureTrace,
    LiveWorkers,
    MtbfOf,
    TransitionCost,
    random_trace,
    read_trace,
    throughput_over,
)

TEXT = """# a note
0,add,a
0,add,b
0,add,c
10000,remove,b
20000,add,d
20000,remove,c
30000,add,b
60000,remove,a
"""


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    return path


def test_a_trace_is_read_with_its_levels(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, TEXT))
    assert trace.changes[3] == Change(10.0, False, "b")
    assert trace.end == 60.0
    assert trace.levels() == (LiveWorkers(0.0, 3), LiveWorkers(10.0, 2, 1), LiveWorkers(20.0, 2, 1), LiveWorkers(30.0, 3))


def test_workers_beyond_the_most_are_not_counted(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, TEXT))
    assert [level.workers for level in trace.levels(most=2)] == [2, 2, 2]


def test_joins_are_delayed_and_short_lives_left_out() -> None:
    changes = (Change(0.0, True, "a"), Change(10.0, True, "b"), Change(20.0, False, "b"), Change(30.0, True, "b"))
    assert FailureTrace(changes, 100.0).levels(join_delay=15.0) == (LiveWorkers(15.0, 1), LiveWorkers(45.0, 2))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0,add,a\n5,drop,a\n", "line 2: '5,drop,a': expected 'milliseconds,add|remove,name'"),
        ("0,add,a\n-5,remove,a\n", "line 2: '-5,remove,a': expected 'milliseconds,add|remove,name'"),
        ("9,add,a\n5,add,b\n", "line 2: '5,add,b': earlier than the line before"),
        ("0,add,a\n5,add,a\n", "expected the name of a worker that is not live"),
        ("0,add,a\n5,remove,b\n", "expected the name of a live worker"),
        ("# nothing\n", "no worker joins"),
    ],
)
def test_bad_traces_are_refused(tmp_path: Path, text: str, said: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(CaseError) as refused:
        read_trace(path)
    assert said in str(refused.value)
    assert str(path) in str(refused.value)


def test_a_missing_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CaseError, match=r"none\.csv: No such file"):
        read_trace(tmp_path / "none.csv")


def test_an_integral_without_cost_is_exact(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, TEXT))
    found = throughput_over(trace.levels(), trace.end, lambda workers: 2.0 * workers)
    assert found.samples == 2.0 * (3 * 10 + 2 * 20 + 3 * 30)
    assert found.average == found.samples / 60
    assert (found.transitions, found.lost_seconds) == (3, 0.0)
    assert found.curve == ((0.0, 6.0), (10.0, 4.0), (20.0, 4.0), (30.0, 6.0))


def test_a_transition_stops_the_job_and_the_step_is_redone(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, TEXT))
    cost = TransitionCost(lost=2.0, joined=1.0, samples_per_step=7.0)
    found = throughput_over(trace.levels(), trace.end, float, cost)
    # 30 samples until the first loss are 4 steps of 7; 16 until the next are 2; then 16 and 87, where nothing is redone.
    assert found.samples == 28 + 14 + 16 + 87
    assert found.lost_seconds == pytest.approx(2 / 3 + (2 + 2 / 2) + 2 + 1)
    assert found.curve[:3] == ((0.0, 3.0), (10.0, 0.0), (12.0, 2.0))


def test_a_transition_may_be_longer_than_its_level() -> None:
    found = throughput_over(
        (LiveWorkers(0.0, 2), LiveWorkers(10.0, 1, 1), LiveWorkers(11.0, 0, 1)), 20.0, float, TransitionCost(lost=5.0)
    )
    assert found.samples == 20.0
    assert found.lost_seconds == 1 + 5


def test_an_end_before_the_last_level_is_refused() -> None:
    with pytest.raises(CaseError, match="expected at least one, and an end after the last"):
        throughput_over((LiveWorkers(5.0, 1),), 4.0, float)


@pytest.mark.parametrize(("whose", "mtbf"), [(MtbfOf.WORKER, 50 * 7200.0), (MtbfOf.JOB, 7200.0)])
def test_random_failures_are_as_frequent_as_given(whose: MtbfOf, mtbf: float) -> None:
    trace = random_trace(50, 100.0, mtbf, whose, repair=0.0, seed=3)
    failures = sum(not change.joins for change in trace.changes)
    assert failures == pytest.approx(100 * DAY / 7200, rel=0.1)
    assert trace.end == 100 * DAY


def test_a_random_trace_depends_on_its_seed_alone() -> None:
    first, again, other = (random_trace(8, 2.0, 9000.0, MtbfOf.JOB, 600.0, seed) for seed in (1, 1, 2))
    assert first == again != other
    levels = first.levels()
    assert levels[0] == LiveWorkers(0.0, 8)
    assert 0 <= min(level.workers for level in levels) < 8


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        ((0, 1.0, 1.0, 1.0), "workers: 0"),
        ((1, -1.0, 1.0, 1.0), "days: -1"),
        ((1, 1.0, 0.0, 1.0), "mtbf: 0"),
        ((1, 1.0, 1.0, -1.0), "repair: -1 seconds"),
    ],
)
def test_impossible_random_traces_are_refused(numbers: tuple[int, float, float, float], said: str) -> None:
    workers, days, mtbf, repair = numbers
    with pytest.raises(CaseError, match=said):
        random_trace(workers, days, mtbf, MtbfOf.JOB, repair)
