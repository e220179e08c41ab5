"""The monitor condenses a step to what happened in it, and the edge estimate tells latency from occupancy."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptra.errors import ControlError
from adaptra.program import Kind, Op, Program
from adaptra.runtime.measuring.measurement import EdgeEstimate, StepMeasurement, estimate_edge
from adaptra.runtime.measuring.monitor import Monitor, StepRecords, merge_timelines
from adaptra.simulation.timeline import Source

PROGRAM = Program.parse("schedule t placement=0,1 microbatches=2\n0: 0F0 0F1 0I0 0W0 0I1 0W1\n1: 1F0 1B0 1F1 1B1\n")


def flights(
    sends: list[float], latency: float, occupancy: float, jitter: float = 0.0, seed: int = 0
) -> list[tuple[float, float]]:
    """What the cost model says about messages handed over at these times."""
    noise = random.Random(seed)
    found: list[tuple[float, float]] = []
    free = float("-inf")
    for sent in sends:
        free = max(sent, free) + occupancy
        found.append((sent, free + latency + noise.uniform(0, jitter)))
    return found


def record_step(monitor: Monitor, step: int, start: float) -> StepMeasurement:
    """What the executor of rank 1 of PROGRAM would record: F takes 2, B 5, messages 3."""
    clock = start
    monitor.begin_step()
    for microbatch in range(2):
        monitor.wait(Op(1, Kind.F, microbatch), clock, clock + 0.5)
        monitor.message(Kind.SEND_F, 0, 1, microbatch, 64, clock - 3.0, clock - 3.0, clock, clock + 0.5)
        clock += 0.5
        monitor.op(Op(1, Kind.F, microbatch), clock, clock + 2.0)
        monitor.op(Op(1, Kind.B, microbatch), clock + 2.0, clock + 7.0)
        clock += 7.0
    return monitor.end_step(step, start, clock)


def test_a_step_is_condensed_to_medians_per_stage_and_flights_per_edge() -> None:
    measurement = record_step(Monitor(1, (0, 1)), step=7, start=100.0)
    assert (measurement.rank, measurement.step, measurement.seconds) == (1, 7, 15.0)
    (stage,) = measurement.stages
    assert (stage.stage, stage.forward, stage.input_grad, stage.weight_grad, stage.both) == (1, 2.0, None, None, 5.0)
    assert stage.backward == 5.0
    (edge,) = measurement.edges
    assert (edge.source, edge.destination, edge.messages, edge.waiting) == (0, 1, 2, 1.0)
    # The first message was sent before the step began, so only the second one counts.
    assert edge.estimate == EdgeEstimate(flight=3.0, occupancy=None, spacing=None)


def test_what_waited_for_its_receive_is_no_slow_link() -> None:
    """A slow stage posts its receives late where sends wait for them; the edge before it is as fast as ever."""
    monitor = Monitor(1, (0, 1))
    monitor.begin_step()
    for microbatch in range(8):
        sent = 100.0 + 0.1 * microbatch
        departed = max(sent, 100.0 + 0.4 * (microbatch - 3))
        monitor.message(Kind.SEND_F, 0, 1, microbatch, 64, sent, departed, departed + 0.001, departed + 0.5)
    (edge,) = monitor.end_step(7, 100.0, 105.0).edges
    assert edge.estimate.flight == pytest.approx(0.001)
    assert (edge.estimate.occupancy, edge.stalls.count) == (None, 0)


def test_what_was_sent_before_its_receiver_began_the_step_is_no_slow_link() -> None:
    """The stage before a slow one begins each step earlier, by more messages than come later."""
    monitor = Monitor(1, (0, 1))
    monitor.begin_step()
    for microbatch in range(8):
        sent = 99.5 + 0.1 * microbatch
        arrived = max(sent, 100.0) + 0.001
        monitor.message(Kind.SEND_F, 0, 1, microbatch, 64, sent, sent, arrived, arrived)
    (edge,) = monitor.end_step(7, 100.0, 105.0).edges
    assert edge.estimate.flight == pytest.approx(0.001)


def test_an_edge_whose_messages_take_other_routes_is_measured_by_its_probe() -> None:
    monitor = Monitor(1, (0, 1, 2))
    monitor.message(Kind.SEND_F, 0, 1, 0, 64, 10.0, 10.0, 11.0, 11.5)
    monitor.probe(2, 1, 10.0, 10.03)
    measurement = monitor.end_step(1, 9.0, 12.0)
    forward, alone = measurement.edges
    assert (forward.source, forward.messages > 0) == (0, True)
    assert (alone.source, alone.messages, alone.estimate.occupancy) == (2, 0, None)
    assert alone.estimate.flight == pytest.approx(0.03)
    assert StepMeasurement.from_json(measurement.to_json()) == measurement


def test_only_the_last_steps_are_kept() -> None:
    monitor = Monitor(1, (0, 1), keep=3)
    for step in range(10):
        record_step(monitor, step, 100.0 * step)
    assert monitor.records(9).step == 9
    with pytest.raises(KeyError, match=r"step 6: the records of rank 1 hold the steps \[7, 8, 9\]"):
        monitor.records(6)


def test_records_of_a_failed_step_do_not_reach_the_next() -> None:
    monitor = Monitor(1, (0, 1))
    monitor.op(Op(1, Kind.F, 0), 0.0, 50.0)
    monitor.message(Kind.SEND_F, 0, 1, 0, 64, 0.0, 0.0, 50.0, 50.0)
    monitor.wait(Op(1, Kind.F, 0), 0.0, 50.0)
    clean = record_step(Monitor(1, (0, 1)), 1, 100.0)
    assert record_step(monitor, 1, 100.0) == clean


def test_measurements_and_records_survive_the_wire() -> None:
    monitor = Monitor(1, (0, 1))
    measurement = record_step(monitor, 3, 10.0)
    assert StepMeasurement.from_json(json.loads(json.dumps(measurement.to_json()))) == measurement
    records = monitor.records(3)
    assert StepRecords.from_json(json.loads(json.dumps(records.to_json()))) == records


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step": -1}, "measurement: field 'step': expected a whole number of at least 0, got -1"),
        ({"step": True}, "measurement: field 'step': expected a whole number of at least 0, got True"),
        ({"seconds": "1"}, "measurement: field 'seconds': expected a finite number that is not negative, got '1'"),
        ({"seconds": float("nan")}, "measurement: field 'seconds': expected a finite number that is not negative, got nan"),
        ({"stages": 3}, "measurement: field 'stages': expected a list, got 3"),
        ({"stages": [3]}, "measurement: stages[0]: expected a JSON object, got int"),
        ({"edges": [{}]}, "measurement: edges[0]: missing field 'source'"),
        (
            {"run": "rm"},
            "measurement: unknown field 'run': expected some of edges, has_met, pause, rank, reduce, seconds, "
            "stages, step, update",
        ),
    ],
)
def test_a_measurement_that_is_not_one_is_refused(change: dict[str, object], message: str) -> None:
    data = record_step(Monitor(1, (0, 1)), 3, 10.0).to_json() | change
    with pytest.raises(ControlError) as caught:
        StepMeasurement.from_json(data)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ops": [{"op": "1X0", "start": 0, "end": 1}]}, "records of a step: op '1X0': expected STAGE KIND"),
        ({"messages": [{"kind": "F"}]}, "records of a step: message of kind 'F': expected SEND_F, SEND_B or another SEND"),
        ({"start": float("inf")}, "records of a step: field 'start': expected a finite number, got inf"),
    ],
)
def test_records_that_are_none_are_refused(change: dict[str, object], message: str) -> None:
    monitor = Monitor(1, (0, 1))
    record_step(monitor, 3, 10.0)
    with pytest.raises(ControlError) as caught:
        StepRecords.from_json(monitor.records(3).to_json() | change)
    assert str(caught.value).startswith(message)


def test_the_records_of_all_ranks_make_one_timeline() -> None:
    first, second = Monitor(0, (0, 1)), Monitor(1, (0, 1))
    first.op(Op(0, Kind.F, 0), 98.0, 99.0)
    first.message(Kind.SEND_B, 1, 0, 0, 64, 107.0, 107.0, 110.0, 110.0)
    first.end_step(3, 98.0, 111.0)
    record_step(second, 3, 100.0)
    timeline = merge_timelines(PROGRAM, [second.records(3), first.records(3)])
    assert timeline.source is Source.MEASURED
    assert [(interval.op, interval.start, interval.end) for interval in timeline.ops[0]] == [(Op(0, Kind.F, 0), 0.0, 1.0)]
    assert len(timeline.ops[1]) == 4
    assert timeline.makespan == pytest.approx(17.0)
    assert [message.posted for message in timeline.messages] == sorted(message.posted for message in timeline.messages)
    assert {(message.source, message.destination) for message in timeline.messages} == {(0, 1), (1, 0)}
    assert second.timeline(PROGRAM, 3).ops[0] == ()


def test_records_that_do_not_belong_together_are_refused() -> None:
    monitor = Monitor(1, (0, 1))
    record_step(monitor, 3, 10.0)
    record_step(monitor, 4, 30.0)
    other = Monitor(0, (0, 1))
    other.end_step(4, 0.0, 1.0)
    with pytest.raises(ValueError, match="records of rank 1: expected each of the ranks"):
        merge_timelines(PROGRAM, [monitor.records(3), monitor.records(3)])
    with pytest.raises(ValueError, match=r"records of the steps \[3, 4\]"):
        merge_timelines(PROGRAM, [monitor.records(3), other.records(4)])


@given(
    latency=st.floats(0.0, 0.2),
    occupancy=st.floats(0.001, 0.05),
    count=st.integers(6, 40),
    interval=st.floats(0.1, 0.6),
    seed=st.integers(0, 1000),
)
def test_queued_messages_show_latency_and_occupancy(
    latency: float, occupancy: float, count: int, interval: float, seed: int
) -> None:
    """Messages handed over faster than the edge carries them arrive one occupancy apart, whatever the latency is."""
    noise = random.Random(seed)
    sends = [index * interval * occupancy + noise.uniform(0, 0.1 * occupancy) for index in range(count)]
    estimate = estimate_edge(flights(sorted(sends), latency, occupancy, jitter=0.01 * occupancy))
    assert estimate.occupancy == pytest.approx(occupancy, rel=0.05)
    assert estimate.flight == pytest.approx(latency + occupancy, rel=0.1, abs=0.1 * occupancy)


@given(latency=st.floats(0.0, 0.2), occupancy=st.floats(0.0, 0.005), count=st.integers(1, 40), seed=st.integers(0, 1000))
def test_messages_that_never_queue_show_their_flight_and_no_occupancy(
    latency: float, occupancy: float, count: int, seed: int
) -> None:
    estimate = estimate_edge(flights([0.02 * index for index in range(count)], latency, occupancy, jitter=1e-4, seed=seed))
    assert estimate.occupancy is None
    assert estimate.flight == pytest.approx(latency + occupancy, abs=1.1e-4)
    assert estimate.spacing is None or estimate.spacing >= occupancy - 1e-4


def test_one_late_message_changes_nothing() -> None:
    pairs = flights([0.02 * index for index in range(16)], 0.06, 0.0)
    pairs[5] = (pairs[5][0], pairs[5][1] + 1.0)
    assert estimate_edge(pairs).flight == pytest.approx(0.06)
    assert estimate_edge(pairs).occupancy is None


def test_a_burst_with_pauses_shows_its_occupancy() -> None:
    """Four bursts of four: the first of each burst does not queue, the others do."""
    sends = [0.2 * burst + 1e-4 * index for burst in range(4) for index in range(4)]
    estimate = estimate_edge(flights(sends, 0.03, 0.01, jitter=2e-4))
    assert estimate.occupancy == pytest.approx(0.01, rel=0.05)
    assert estimate.flight == pytest.approx(0.04, rel=0.05)


def test_a_message_of_another_link_is_recorded_and_measured_as_no_edge() -> None:
    """Another replica's worker computes the microbatch on one of its stages. It may be far away."""
    monitor = Monitor(1, (0, 1))
    monitor.message(Kind.SEND_F, 0, 1, 0, 64, 1.0, 1.0, 1.5, 1.6)
    monitor.message(Kind.SEND_F, 0, 1, 1, 64, 1.0, 1.0, 9.0, 9.0, 3)
    measured = monitor.end_step(0, 0.0, 10.0)
    assert [(edge.source, edge.messages, edge.estimate.flight) for edge in measured.edges] == [(0, 1, 0.5)]
    records = monitor.records(0)
    assert [one.replica for one in records.messages] == [None, 3]
    assert StepRecords.from_json(json.loads(json.dumps(records.to_json()))) == records
