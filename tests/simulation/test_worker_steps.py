"""What workers did, condensed from a timeline: exact numbers of a step made by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from job_timeline import job_timeline

from adaptra.program.schedules import one_f_one_b
from adaptra.simulation.cost import CostModel
from adaptra.simulation.simulate import simulate
from adaptra.simulation.worker_steps import WorkerStep, paces, usual_step, worker_step, worker_steps


def test_a_job_has_an_entry_for_each_worker() -> None:
    first, host, giver, slow = worker_steps(job_timeline())
    assert [one.name for one in (first, host, giver, slow)] == ["0.0", "0.1", "1.0", "1.1"]
    assert (host.own, host.taken, host.given) == (2, ((1, 1),), ())
    assert (slow.own, slow.taken, slow.given) == (1, (), ((1, 1),))
    assert (giver.own, giver.taken, giver.given) == (2, (), ())
    assert (host.compute, slow.compute) == pytest.approx((0.3, 0.25))
    assert (host.reduce, host.exposed) == pytest.approx((0.1, 0.1)), "worker 0.1 computes last of its replica"
    assert first.reduce is None and first.exposed is None


def test_an_op_waits_for_the_worker_whose_message_is_late() -> None:
    _, host, giver, slow = worker_steps(job_timeline())
    assert [worker for worker, _ in host.waits] == [2, 0], "the foreign microbatch comes latest; the longest wait stands first"
    assert [seconds for _, seconds in host.waits] == pytest.approx([0.275, 0.125])
    assert giver.waits == (), "it idles without waiting for a message"
    assert slow.waits == ((2, 0.5),)


def test_paces_compare_workers_of_one_stage() -> None:
    steps = worker_steps(job_timeline())
    assert paces(steps) == pytest.approx({0: 1.0, 2: 1.0, 1: 0.4, 3: 2.5})
    third = replace(steps[1], worker=5, replica=2)
    assert paces([*steps, third]) == pytest.approx({0: 1.0, 2: 1.0, 1: 0.1 / 0.175, 5: 0.1 / 0.175, 3: 2.5})
    idle = replace(steps[1], per_microbatch=None)
    assert 1 not in paces([steps[0], idle, *steps[2:]]) and 3 not in paces([steps[0], idle, *steps[2:]])


def test_one_pipeline_has_an_entry_for_each_rank_and_no_paces() -> None:
    timeline = simulate(one_f_one_b(2, 3), CostModel.uniform(2, 1.0, 1.0, 1.0, latency=0.5)).timeline
    first, second = worker_steps(timeline)
    assert (first.name, second.name) == ("0.0", "0.1")
    assert (first.own, first.taken, first.given, first.compute) == (3, (), (), 9.0)
    assert second.waits[0] == (0, 1.5), "for its first F alone"
    assert [worker for worker, _ in first.waits] == [1]
    assert paces((first, second)) == {}
    assert worker_step(timeline, 1) == second


def test_the_usual_step_has_medians_and_the_last_microbatches() -> None:
    def step(compute: float, own: int, waits: tuple[tuple[int, float], ...], exposed: float | None = None) -> WorkerStep:
        return WorkerStep(1, 0, (1,), compute, compute / own, own, (), (), waits, 0.5, exposed)

    usual = usual_step([step(1.0, 4, ((0, 1.0),)), step(3.0, 4, ((2, 6.0),), 0.25), step(2.0, 2, ((0, 2.0),))])
    assert (usual.compute, usual.own, usual.reduce, usual.exposed) == (2.0, 2, 0.5, 0.25)
    assert usual.waits == ((2, 2.0), (0, 1.0)), "means of all steps"
