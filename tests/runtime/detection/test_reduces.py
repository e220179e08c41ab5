"""REDUCE per stage: how much of it is hidden, from measurements written by hand."""

from __future__ import annotations

import json

import pytest

from adaptra.errors import ControlError
from adaptra.program import Kind, Op, Program
from adaptra.runtime.detection.measurement import ReduceTimes, StageMeasurement, StepMeasurement
from adaptra.runtime.detection.monitor import Monitor, StepRecords, merge_timelines
from adaptra.runtime.detection.reduces import MOST_PENDING, ReduceTracker, StageReduce, StepReduces, own_reduce, usual_reduces
from adaptra.simulation.timeline import ReduceInterval

PROGRAM = Program.parse("schedule two placement=0,1 microbatches=1\n0: 0F0 0B0\n1: 1F0 1B0\n")


def measurement(rank: int, step: int, reduce: ReduceTimes | None, stages: tuple[int, ...] | None = None) -> StepMeasurement:
    own = tuple(StageMeasurement(stage, 1.0, None, None, 2.0) for stage in stages or (rank,))
    return StepMeasurement(rank, step, 1.0, own, (), reduce=reduce)


def no_drift(stage: int) -> float:
    return 0.0


def observed(*measured: StepMeasurement, drift: float = 0.0) -> StepReduces | None:
    tracker = ReduceTracker(0, range(len(measured)))
    for one in measured[:-1]:
        assert tracker.observe(one, no_drift) is None
    return tracker.observe(measured[-1], lambda stage: drift)


def test_what_lies_before_the_last_op_of_the_pipeline_is_hidden() -> None:
    found = observed(
        measurement(2, 5, ReduceTimes(4.0, 4.0, 6.0, 30)),  # all of it
        measurement(0, 5, ReduceTimes(10.0, 10.5, 13.0, 10)),  # nothing: its own op is the last
        measurement(1, 5, ReduceTimes(9.0, 9.0, 11.0, 20)),  # half of it
    )
    assert found == StepReduces(
        0,
        5,
        (StageReduce((0,), 2.5, 0.0, 2.5, 10), StageReduce((1,), 2.0, 1.0, 1.0, 20), StageReduce((2,), 2.0, 2.0, 0.0, 30)),
    )
    assert str(found).startswith("step 5: REDUCE of stage 0: 2500.0 ms, hidden 0.0 ms, exposed 2500.0 ms, 10 bytes; stage 1:")


def test_the_sum_of_several_stages_is_one() -> None:
    found = observed(
        measurement(0, 0, ReduceTimes(2.0, 2.0, 3.0, 10), (0, 3)), measurement(1, 0, ReduceTimes(1.0, 1.0, 2.5, 20), (1, 2))
    )
    assert found is not None
    assert [(one.name, one.hidden, one.exposed) for one in found.stages] == [("0,3", 0.0, 1.0), ("1,2", 1.0, 0.5)]


def test_clock_drift_is_taken_out() -> None:
    """The clock of stage 1 has gained 0.5 s: what it calls 9.5 is 9.0."""
    found = observed(
        measurement(0, 0, ReduceTimes(10.0, 10.0, 12.0, 8)), measurement(1, 0, ReduceTimes(9.5, 9.5, 11.5, 8)), drift=0.5
    )
    assert found is not None
    assert [one.hidden for one in found.stages] == pytest.approx([0.0, 1.0])


def test_steps_do_not_mix_and_none_is_kept_that_a_rank_never_reports() -> None:
    tracker = ReduceTracker(0, range(2))
    early, late = ReduceTimes(1.0, 1.0, 2.0, 8), ReduceTimes(3.0, 3.0, 4.0, 8)
    for step in range(3):
        assert tracker.observe(measurement(0, step, early), no_drift) is None
    found = tracker.observe(measurement(1, 2, late), no_drift)
    assert found is not None
    assert [found.step, *(one.hidden for one in found.stages)] == [2, 1.0, 0.0]
    assert tracker.observe(measurement(1, 1, late), no_drift) is None, "the other report of step 1 is gone"


def test_steps_that_not_all_ranks_report_are_forgotten() -> None:
    """As in a large job at rest, where a rank reports what is news."""
    tracker, reduce = ReduceTracker(0, range(2)), ReduceTimes(1.0, 1.0, 2.0, 8)
    for step in range(MOST_PENDING + 1):
        assert tracker.observe(measurement(0, step, reduce), no_drift) is None
    assert tracker.observe(measurement(1, 0, reduce), no_drift) is None
    assert tracker.observe(measurement(1, MOST_PENDING, reduce), no_drift) is not None


def test_other_replicas_are_left_out() -> None:
    tracker, reduce = ReduceTracker(0, range(2, 4)), ReduceTimes(1.0, 1.0, 2.0, 8)
    assert [tracker.observe(measurement(rank, 0, reduce), no_drift) for rank in (0, 2, 1)] == [None] * 3
    assert tracker.observe(measurement(3, 0, reduce), no_drift) is not None


def test_without_other_replicas_there_is_none() -> None:
    assert observed(measurement(0, 0, None)) is None
    assert own_reduce(measurement(0, 0, None)) == ()


def test_a_rank_alone_does_not_know_what_is_hidden() -> None:
    assert own_reduce(measurement(1, 0, ReduceTimes(1.0, 1.5, 2.0, 8))) == (StageReduce((1,), 0.5, None, None, 8),)


def test_the_usual_sum_is_the_median() -> None:
    steps = [
        StepReduces(0, step, (StageReduce((0,), seconds, hidden, None if hidden is None else seconds - hidden, 8),))
        for step, (seconds, hidden) in enumerate([(1.0, 0.5), (9.0, 1.0), (2.0, None), (3.0, 0.75)])
    ]
    assert usual_reduces(steps) == (StageReduce((0,), 2.5, 0.75, 2.25, 8),)


def records(rank: int, ahead: float = 0.0) -> tuple[Monitor, StepMeasurement]:
    monitor = Monitor(rank, (0, 1), ahead=ahead)
    monitor.begin_step()
    for kind, start in ((Kind.F, 0.0), (Kind.B, 3.0)):
        monitor.op(Op(rank, kind, 0), 100.0 + start - rank, 102.0 + start - rank)
    monitor.reduce(105.25 - rank, 106.25 - rank, 64)
    return monitor, monitor.end_step(3, 98.0, 107.0)


def test_the_monitor_measures_it_on_the_clock_of_rank_0() -> None:
    _, measured = records(1, ahead=1000.0)
    assert measured.reduce == ReduceTimes(1104.0, 1104.25, 1105.25, 64)
    assert StepMeasurement.from_json(json.loads(json.dumps(measured.to_json()))) == measured
    monitor, _ = records(1)
    kept = monitor.records(3)
    assert kept.reduce == (104.25, 105.25, 64)
    assert StepRecords.from_json(json.loads(json.dumps(kept.to_json()))) == kept
    monitor.begin_step()
    assert monitor.end_step(4, 110.0, 111.0).reduce is None, "it belongs to one step"


def test_records_of_another_clock_are_shifted_as_a_whole() -> None:
    monitor, _ = records(1)
    monitor.message(Kind.SEND_F, 0, 1, 0, 64, 111.0, 112.0, 113.0, 114.0, 2)
    monitor.op(Op(1, Kind.F, 0), 114.0, 115.0)
    monitor.reduce(116.0, 117.0, 64)
    monitor.end_step(4, 110.0, 118.0)
    moved = monitor.records(4).shifted(-110.0)
    assert (moved.rank, moved.step, moved.start, moved.end) == (1, 4, 0.0, 8.0)
    assert moved.ops == ((Op(1, Kind.F, 0), 4.0, 5.0),)
    assert moved.messages == ((Kind.SEND_F, 0, 1, 0, 64, 1.0, 2.0, 3.0, 4.0, 2),)
    assert moved.reduce == (6.0, 7.0, 64)
    assert monitor.records(4).shifted(0.0) == monitor.records(4)


def test_a_sum_that_ends_before_it_begins_is_refused() -> None:
    _, measured = records(0)
    data = measured.to_json()
    data["reduce"]["end"] = 0.0
    with pytest.raises(ControlError, match=r"measurement: reduce: field 'end': expected at least start=105.25, got 0.0"):
        StepMeasurement.from_json(data)


def test_the_timeline_of_all_ranks_shows_what_is_exposed() -> None:
    (first, _), (second, _) = records(0), records(1)
    timeline = merge_timelines(PROGRAM, [first.records(3), second.records(3)])
    assert timeline.reduces == (ReduceInterval(0, 7.25, 8.25, 64), ReduceInterval(1, 6.25, 7.25, 64))
    assert timeline.end == 7.0
    assert [timeline.exposed_from(one) for one in timeline.reduces] == [7.25, 7.0]
    alone = merge_timelines(PROGRAM, [second.records(3)])
    assert [alone.exposed_from(one) for one in alone.reduces] == [None], "another rank may have computed longer"
