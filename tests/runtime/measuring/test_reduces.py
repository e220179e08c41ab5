"""REDUCE per stage: how much of it delays the next step, from times written by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

import pytest

from adaptra.collectives.choice import SumWay
from adaptra.collectives.late_ranks import SumChoice
from adaptra.errors import ControlError
from adaptra.program import Kind, Op, Program
from adaptra.runtime.measuring.measurement import ReduceTimes, StageMeasurement, StepMeasurement
from adaptra.runtime.measuring.monitor import Monitor, StepRecords, merge_timelines
from adaptra.runtime.measuring.reduces import (
    MOST_PENDING,
    FirstOp,
    ReduceTracker,
    StageReduce,
    StepReduces,
    exposed_seconds,
    own_reduce,
    usual_reduces,
)
from adaptra.simulation.timeline import ReduceInterval

PROGRAM = Program.parse("schedule two placement=0,1 microbatches=1\n0: 0F0 0B0\n1: 1F0 1B0\n")


def measurement(rank: int, reduce: ReduceTimes | None, stages: tuple[int, ...] | None = None) -> StepMeasurement:
    own = tuple(StageMeasurement(stage, 1.0, None, None, 2.0) for stage in stages or (rank,))
    step = 0 if reduce is None else reduce.step + 1
    return StepMeasurement(rank, step, 1.0, own, (), reduce=reduce)


def observed(*measured: StepMeasurement) -> StepReduces | None:
    tracker = ReduceTracker(0, range(len(measured)))
    for one in measured[:-1]:
        assert tracker.observe(one) is None
    return tracker.observe(measured[-1])


# The definition


@pytest.mark.parametrize(
    ("start", "computed", "arrived", "exposed"),
    [
        (10.0, 10.0, -math.inf, 4.0),  # the first stage waits for no message
        (10.0, 10.0, 9.0, 4.0),  # the message was there before the sum began
        (10.0, 10.0, 13.5, 2.0),  # it came 2 s before the rank was ready
        (10.0, 10.0, 15.5, 0.0),  # at the same moment
        (10.0, 10.0, 20.0, 0.0),  # later: the sum cost nothing
        (8.0, 10.0, -math.inf, 4.0),  # what lies before the last op's end cost nothing
        (8.0, 10.0, 12.0, 3.5),
        (11.0, 10.0, -math.inf, 3.0),  # another wait lies between the last op and the sum
        (8.0, 14.5, -math.inf, 0.0),  # a clock that reads the last op's end after that of the sum
    ],
)
def test_what_delays_the_next_step_is_exposed(start: float, computed: float, arrived: float, exposed: float) -> None:
    """The sum ends at 14.0, and the optimizer at 15.5."""
    assert exposed_seconds(start, 14.0, computed, 15.5, arrived) == exposed
    ready_without = 15.5 - (14.0 - max(start, computed) if computed <= 14.0 else 0.0)
    assert max(15.5, arrived) - max(ready_without, arrived) == exposed, "the delay, as what it is"


def test_a_message_counts_from_when_it_would_have_come_if_requested_before() -> None:
    edge, usual = (0, 1), {(0, 1): 1.0}

    def arrival(*messages: tuple[tuple[int, int] | None, float, float, float]) -> float:
        first = FirstOp()
        for one in messages:
            first.needs(*one)
        return first.arrival(usual)

    assert arrival() == -math.inf
    assert arrival((edge, 5.0, 5.0, 5.75)) == 5.75, "it came sooner than is usual"
    assert arrival((edge, 5.0, 9.0, 9.25)) == 6.0, "it waited for the request"
    assert arrival((edge, 5.0, 5.0, 9.25)) == 6.0, "it did so too, over a transport that does not tell"
    assert arrival((edge, 5.0, 5.5, 5.75)) == 5.75
    assert arrival((None, 5.0, 9.0, 9.25)) == 5.25, "of links to other replicas no usual time is known"
    assert arrival((None, 5.0, 5.0, 9.25)) == 9.25
    assert arrival((edge, 5.0, 5.0, 5.75), (None, 5.0, 5.0, 7.0)) == 7.0, "the last one counts"


# What all ranks tell


def test_the_step_is_known_once_all_ranks_have_told_it() -> None:
    found = observed(
        measurement(2, ReduceTimes(5, 2.0, 0.0, 30)),
        measurement(0, ReduceTimes(5, 2.5, 2.5, 10)),
        measurement(1, ReduceTimes(5, 2.0, None, 20)),
    )
    assert found == StepReduces(
        0,
        5,
        (StageReduce((0,), 2.5, 0.0, 2.5, 10), StageReduce((1,), 2.0, None, None, 20), StageReduce((2,), 2.0, 2.0, 0.0, 30)),
    )
    assert str(found).startswith("step 5: REDUCE of stage 0: 2500.0 ms, hidden 0.0 ms, exposed 2500.0 ms, 10 bytes; stage 1:")
    assert "stage 1: 2000.0 ms, 20 bytes" in str(found)


def test_the_sum_of_several_stages_is_one() -> None:
    found = observed(measurement(0, ReduceTimes(0, 1.0, 1.0, 10), (0, 3)), measurement(1, ReduceTimes(0, 1.5, 0.5, 20), (1, 2)))
    assert found is not None
    assert [(one.name, one.hidden, one.exposed) for one in found.stages] == [("0,3", 0.0, 1.0), ("1,2", 1.0, 0.5)]


def test_steps_do_not_mix_and_none_is_kept_that_a_rank_never_reports() -> None:
    tracker = ReduceTracker(0, range(2))
    for step in range(3):
        assert tracker.observe(measurement(0, ReduceTimes(step, 1.0, 1.0, 8))) is None
    found = tracker.observe(measurement(1, ReduceTimes(2, 1.0, 0.25, 8)))
    assert found is not None
    assert [found.step, *(one.exposed for one in found.stages)] == [2, 1.0, 0.25]
    late = measurement(1, ReduceTimes(1, 1.0, 0.25, 8))
    assert tracker.observe(late) is None, "the other report of step 1 is gone"


def test_steps_that_not_all_ranks_report_are_forgotten() -> None:
    """As in a large job at rest, where a rank reports what is news."""
    tracker = ReduceTracker(0, range(2))
    for step in range(MOST_PENDING + 1):
        assert tracker.observe(measurement(0, ReduceTimes(step, 1.0, 1.0, 8))) is None
    assert tracker.observe(measurement(1, ReduceTimes(0, 1.0, 1.0, 8))) is None
    assert tracker.observe(measurement(1, ReduceTimes(MOST_PENDING, 1.0, 1.0, 8))) is not None


def test_other_replicas_are_left_out() -> None:
    tracker, reduce = ReduceTracker(0, range(2, 4)), ReduceTimes(0, 1.0, 1.0, 8)
    assert [tracker.observe(measurement(rank, reduce)) for rank in (0, 2, 1)] == [None] * 3
    assert tracker.observe(measurement(3, reduce)) is not None


def test_without_other_replicas_there_is_none() -> None:
    assert observed(measurement(0, None)) is None
    assert own_reduce(measurement(0, None)) == ()


def test_a_rank_alone_knows_its_own() -> None:
    assert own_reduce(measurement(1, ReduceTimes(0, 0.5, 0.125, 8))) == (StageReduce((1,), 0.5, 0.375, 0.125, 8),)
    assert own_reduce(measurement(1, ReduceTimes(0, 0.5, None, 8))) == (StageReduce((1,), 0.5, None, None, 8),)


def test_the_usual_sum_is_the_median() -> None:
    steps = [
        StepReduces(0, step, (StageReduce((0,), seconds, hidden, None if hidden is None else seconds - hidden, 8),))
        for step, (seconds, hidden) in enumerate([(1.0, 0.5), (9.0, 1.0), (2.0, None), (3.0, 0.75)])
    ]
    assert usual_reduces(steps) == (StageReduce((0,), 3.0, 0.75, 2.25, 8),)
    assert usual_reduces(steps[2:3]) == (StageReduce((0,), 2.0, None, None, 8),)


# What the monitor measures

Message = tuple[float, float, float]
"""When the message of the second stage's F was sent, departed and arrived."""

SOON: Message = (100.25, 100.25, 100.5)


def run(monitor: Monitor, step: int, at: float, stage: int, message: Message | None, ready: float | None = None) -> None:
    """Record a step of F and B, each of 1 s, that begins at ``at``. Its sum takes 1.5 s and begins half a second after B."""
    monitor.begin_step()
    monitor.ready(at if ready is None else ready)
    if message is not None:
        monitor.message(Kind.SEND_F, stage - 1, stage, 0, 64, *message, at)
    for kind, start in ((Kind.F, at), (Kind.B, at + 1.0)):
        monitor.op(Op(stage, kind, 0), start, start + 1.0)
    monitor.reduce(at + 2.5, at + 4.0, 64)


def test_the_first_stage_pays_for_all_of_it() -> None:
    monitor = Monitor(0, (0, 1))
    run(monitor, 3, 100.0, 0, None)
    assert monitor.end_step(3, 100.0, 104.0).reduce is None, "nothing is known before the next step"
    run(monitor, 4, 104.5, 0, None)
    measured = monitor.end_step(4, 104.5, 109.0)
    assert measured.reduce == ReduceTimes(3, 1.5, 1.5, 64)
    assert StepMeasurement.from_json(json.loads(json.dumps(measured.to_json()))) == measured
    run(monitor, 5, 109.0, 0, None)
    found = monitor.end_step(5, 109.0, 113.0).reduce
    assert found is not None and found.step == 4


@pytest.mark.parametrize(
    ("message", "exposed"),
    [
        ((110.0, 110.0, 110.25), 0.0),  # it comes after the rank is ready, at 104.5
        ((103.0, 103.0, 103.75), 0.75),
        ((102.0, 102.0, 102.25), 1.5),
        ((103.0, 104.75, 105.0), 1.25),  # requested only then: by the usual 0.25 s it would have come at 103.25
    ],
)
def test_a_later_stage_pays_for_what_its_message_waited(message: Message, exposed: float) -> None:
    monitor = Monitor(1, (0, 1))
    run(monitor, 3, 100.0, 1, SOON)
    monitor.end_step(3, 100.0, 104.0)
    run(monitor, 4, max(message[2], 104.5), 1, message, ready=104.5)
    sent = 130.0
    for number in range(3):  # messages of later ops, which show what is usual
        monitor.message(Kind.SEND_F, 0, 1, number + 1, 64, sent, sent, sent + message[2] - message[1], sent + 2.0)
        sent += 4.0
    assert monitor.end_step(4, 104.5, 150.0).reduce == ReduceTimes(3, 1.5, exposed, 64)


def test_a_message_from_another_replica_counts_as_well() -> None:
    """Under routes the first op may be of another replica's microbatch."""
    for arrived, exposed in ((104.0, 0.5), (105.0, 0.0)):
        monitor = Monitor(1, (0, 1))
        run(monitor, 3, 100.0, 1, SOON)
        monitor.end_step(3, 100.0, 104.0)
        monitor.begin_step()
        monitor.ready(104.5)
        monitor.message(Kind.SEND_F, 0, 1, 0, 64, 103.75, 103.75, arrived, arrived, 1)
        monitor.op(Op(1, Kind.F, 0, None, 1), 105.0, 106.0)
        monitor.message(Kind.SEND_F, 0, 1, 1, 64, 103.75, 103.75, 130.0, 130.0, 1)  # of a later op
        assert monitor.end_step(4, 104.5, 140.0).reduce == ReduceTimes(3, 1.5, exposed, 64)


def test_of_several_stages_on_a_rank_the_first_op_counts() -> None:
    """Rank 0 has the first stage and the last; its first op needs no message, though later ones do."""
    monitor = Monitor(0, (0, 1, 1, 0))
    for step, found in ((0, None), (1, ReduceTimes(0, 1.5, 1.5, 64))):
        at = 100.0 + 10.0 * step
        run(monitor, step, at, 0, None)
        monitor.message(Kind.SEND_F, 2, 3, 0, 64, at + 2.0, at + 2.0, at + 2.5, at + 3.0)
        assert monitor.end_step(step, at, at + 4.0).reduce == found


def evaluated(monitor: Monitor) -> None:
    """As the worker does it: the executor records, and the records are discarded."""
    monitor.ready(104.25)
    monitor.op(Op(0, Kind.F, 0), 104.25, 104.5)
    monitor.begin_step()


def failed(monitor: Monitor) -> None:
    """A step whose records the next one discards, such as one whose weights add up to 0."""
    run(monitor, 4, 104.5, 0, None)


def failed_early(monitor: Monitor) -> None:
    """A step that has failed before its first op ended."""
    monitor.begin_step()
    monitor.ready(104.25)


def clipped(monitor: Monitor) -> None:
    monitor.meet(all_ranks=False)


@pytest.mark.parametrize("between", [evaluated, failed, failed_early, clipped])
def test_a_step_that_does_not_follow_at_once_shows_no_delay(between: object) -> None:
    """How long the sum took is still known, and so is the delay by the step after."""
    assert callable(between)
    monitor = Monitor(0, (0, 1))
    run(monitor, 3, 100.0, 0, None)
    monitor.end_step(3, 100.0, 104.0)
    between(monitor)
    for step, exposed in ((4, None), (5, 1.5)):
        run(monitor, step, 30.0 * step, 0, None)
        assert monitor.end_step(step, 30.0 * step, 30.0 * step + 4.0).reduce == ReduceTimes(step - 1, 1.5, exposed, 64)
        assert monitor.records(step).reduce == (30.0 * step + 2.5, 30.0 * step + 4.0, 64, None, None)


@pytest.mark.parametrize("between", [None, evaluated, failed, failed_early, clipped])
def test_the_time_from_the_last_op_to_the_next_step_is_the_update_if_nothing_else_was_between(between: object) -> None:
    """Between the last op's end at 102.5 and 120 are the sum of gradients, the optimizer and the next batch."""
    monitor = Monitor(0, (0, 1))
    run(monitor, 3, 100.0, 0, None)
    assert monitor.end_step(3, 100.0, 104.0).update is None
    if callable(between):
        between(monitor)
    run(monitor, 4, 120.0, 0, None)
    found = monitor.end_step(4, 120.0, 124.0)
    ended = max(op.end for op in monitor.records(3).ops)
    assert found.update == (None if between else 120.0 - ended)
    assert StepMeasurement.from_json(json.loads(json.dumps(found.to_json()))) == found


def test_a_step_without_ops_shows_no_delay() -> None:
    """Other replicas may compute all microbatches of a rank."""
    monitor = Monitor(0, (0, 1))
    run(monitor, 3, 100.0, 0, None)
    monitor.end_step(3, 100.0, 104.0)
    monitor.ready(104.5)
    assert monitor.end_step(4, 104.5, 109.0).reduce == ReduceTimes(3, 1.5, None, 64)


def test_a_sum_that_begins_while_the_last_op_runs_costs_what_is_left_then() -> None:
    monitor = Monitor(0, (0, 1))
    monitor.op(Op(0, Kind.F, 0), 100.0, 101.0)
    monitor.reduce(100.25, 101.5, 64)
    monitor.op(Op(0, Kind.B, 0), 100.0, 101.25)
    monitor.end_step(3, 100.0, 102.0)
    run(monitor, 4, 102.0, 0, None)
    assert monitor.end_step(4, 102.0, 106.0).reduce == ReduceTimes(3, 1.25, 0.25, 64)


def test_marks_of_a_device_are_read_with_those_of_the_ops() -> None:
    """They are numbers here. The mark at which the rank was ready is the first."""
    given: list[list[float]] = []

    def read(marks: Sequence[float]) -> list[float]:
        given.append(list(marks))
        return [100.0 + mark for mark in marks]

    monitor = Monitor(1, (0, 1), read=read)
    for step, at in ((0, 0.0), (1, 4.5)):
        run(monitor, step, at, 1, (103.0, 103.0, 103.75))
        monitor.end_step(step, 100.0 + at, 104.0 + at)
    assert given == [[at, at, at + 1, at + 1, at + 2, at, at + 2.5, at + 4] for at in (0.0, 4.5)]
    assert monitor.records(0).reduce == (102.5, 104.0, 64, 0.75, None)


def records(rank: int) -> Monitor:
    monitor = Monitor(rank, (0, 1))
    for step, at in ((3, 100.0 - rank), (4, 104.5 - rank)):
        run(monitor, step, at, rank, (102.0, 102.0, 102.75) if rank else None)
        monitor.end_step(step, at - 2.0, at + 4.5)
    return monitor


def test_records_keep_what_was_exposed() -> None:
    monitor = records(1)
    kept = monitor.records(3)
    assert kept.reduce == (101.5, 103.0, 64, 0.75, None)
    assert StepRecords.from_json(json.loads(json.dumps(kept.to_json()))) == kept
    assert monitor.records(4).reduce == (106.0, 107.5, 64, None, None), "the next step has not run"


def test_records_of_another_clock_are_shifted_as_a_whole() -> None:
    moved = records(1).records(3).shifted(-97.0)
    assert (moved.rank, moved.step, moved.start, moved.end) == (1, 3, 0.0, 6.5)
    assert moved.ops == ((Op(1, Kind.F, 0), 2.0, 3.0), (Op(1, Kind.B, 0), 3.0, 4.0))
    assert moved.messages == ((Kind.SEND_F, 0, 1, 0, 64, 5.0, 5.0, 5.75, 2.0, None),)
    assert moved.reduce == (4.5, 6.0, 64, 0.75, None)
    monitor = records(1)
    assert monitor.records(4).shifted(0.0) == monitor.records(4)


def test_more_exposed_than_it_took_is_refused() -> None:
    data = measurement(0, ReduceTimes(3, 1.5, 1.5, 64)).to_json()
    data["reduce"]["exposed"] = 2.0
    with pytest.raises(ControlError, match=r"measurement: reduce: field 'exposed': expected at most seconds=1.5, got 2.0"):
        StepMeasurement.from_json(data)


def test_how_a_sum_was_made_is_told_with_it_and_with_the_records_of_its_step() -> None:
    way = SumWay("streamed", (1, 2), 12, (2,))
    choice = SumChoice(way, (0.0, 0.25, 0.125), (("merge", 0.5), ("direct", 0.75)), 0.0625)
    monitor = Monitor(0, (0, 1))

    def run(step: int) -> StepMeasurement:
        monitor.op(Op(0, Kind.B, 0), 1.0 + step, 1.5 + step)
        monitor.reduce(1.5 + step, 1.75 + step, 64)
        if step == 0:
            monitor.chose(choice)
        return monitor.end_step(step, 1.0 + step, 2.0 + step)

    run(0)
    measured = run(1)
    assert measured.reduce is not None and measured.reduce.choice == choice
    assert StepMeasurement.from_json(measured.to_json()) == measured
    first, second = monitor.kept
    assert second.reduce is not None and second.reduce.choice is None, "only what was said of this step"
    assert [StepRecords.from_json(one.to_json()) for one in (first, second)] == [first, second]
    (reduce,) = merge_timelines(PROGRAM, [first]).reduces
    assert reduce.choice == str(choice)
    (told,) = own_reduce(measured)
    assert str(told).endswith(
        "; replica 1 last, 250.0 ms behind the first; by streamed in 12 parts, 1+2 own nothing, 2 for a narrow port "
        "(merge 500.0 ms, direct 750.0 ms)"
    )
    assert usual_reduces([StepReduces(0, 0, (told,))])[0].choice == choice
    for name, value in (
        ("late", [-1]),
        ("narrow", [0.5]),
        ("parts", 0),
        ("lateness", [-0.5]),
        ("seconds", {"merge": -1.0}),
        ("wrong_guess", None),
    ):
        data = measured.to_json()
        data["reduce"]["choice"][name] = value
        with pytest.raises(ControlError, match=f"how a sum was made: field '{name}"):
            StepMeasurement.from_json(data)


def test_the_timeline_shows_what_was_exposed_where_it_is_known() -> None:
    first, second = records(0), records(1)
    timeline = merge_timelines(PROGRAM, [first.records(3), second.records(3)])
    assert timeline.reduces == (ReduceInterval(0, 5.5, 7.0, 64, 1.5), ReduceInterval(1, 4.5, 6.0, 64, 0.75))
    last = merge_timelines(PROGRAM, [first.records(4), second.records(4)])
    assert [one.exposed for one in last.reduces] == [None, None]


def test_a_rounding_of_times_exposes_no_more_than_there_is() -> None:
    monitor = Monitor(0, (0, 1))
    for step in range(2):
        monitor.op(Op(0, Kind.B, 0), 0.3, 4.3)
        monitor.reduce(4.3, 8.4, 64)  # 8.4 - 4.3 is more than (8.4 - 0.3) - (4.3 - 0.3)
        monitor.end_step(step, 0.3, 8.4)
    kept = monitor.records(0)
    (reduce,) = merge_timelines(PROGRAM, [kept]).reduces
    assert kept.reduce is not None and kept.reduce.exposed is not None and reduce.exposed is not None
    assert reduce.exposed <= reduce.end - reduce.start
