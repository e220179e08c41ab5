"""The simulator of several replicas: against its definition, and on what it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jobs import even_case, random_case, random_job_program
from naive import simulate_steps

from adaptra.errors import CaseError, ScheduleError
from adaptra.program import Program
from adaptra.program.routing import Routing
from adaptra.program.schedules import generate
from adaptra.simulation.case import Case
from adaptra.simulation.simulate import STEPS, simulate


def with_times_above_zero(case: Case) -> Case:
    """Ops that take no time end in an order that the definition leaves open."""
    cost = replace(
        case.cost,
        forward=tuple(time + 0.31 for time in case.cost.forward),
        input_grad=tuple(time + 0.17 for time in case.cost.input_grad),
        weight_grad=tuple(time + 0.23 for time in case.cost.weight_grad),
    )
    return replace(case, cost=cost)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 100_000), st.booleans())
def test_times_are_those_of_the_definition(seed: int, links: bool) -> None:
    case = random_case(seed, links=links, shapes=seed % 3 > 0)
    case = with_times_above_zero(case) if links else case
    simulated = simulate(random_job_program(case, seed), case)
    expected = simulate_steps(simulated.program, case, STEPS)
    for step, workers in enumerate(simulated.steps):
        for intervals in workers:
            for interval in intervals:
                if interval.op.kind.value == "REDUCE":
                    assert interval.end == pytest.approx(expected[step, interval.op][1])
                else:
                    assert (interval.start, interval.end) == pytest.approx(expected[step, interval.op])


@given(st.integers(0, 100_000))
def test_the_period_is_the_distance_between_the_ends_of_steps(seed: int) -> None:
    case = random_case(seed, shapes=True)
    simulated = simulate(random_job_program(case, seed), case)
    ends = [[intervals[-1].end for intervals in workers if intervals] for workers in simulated.steps]
    half = STEPS // 2
    distances = [(last - middle) / half for last, middle in zip(ends[-1], ends[half - 1], strict=True)]
    assert simulated.period == pytest.approx(max(distances))
    assert simulated.makespan == max(ends[0])


def test_a_healthy_pipeline_alone_repeats_at_its_first_stage() -> None:
    one = generate("1f1b", 2, 4)
    orders = tuple(tuple(replace(op, replica=0) for op in order) for order in one.orders)
    program = Program("1f1b", Routing.healthy(1, 2, 4), orders)
    simulated = simulate(program, even_case(1, 2, 4, 3.0))
    # The first stage works 12, waits 1 for its first gradient and 1 for its last, and steps for 3.
    assert simulated.period == 17.0
    assert simulated.held == (2, 1)


def test_a_program_that_does_not_fit_the_case_is_refused() -> None:
    case = even_case(2, 2, 2, 3.0)
    program = random_job_program(case, 1)
    with pytest.raises(CaseError, match=r"^random has 2 replicas of 2 stages and 2 microbatches: expected 2, 2 and 3, as case"):
        simulate(program, replace(case, microbatches=3))
    with pytest.raises(CaseError, match=r"^random: worker 3 has stages, but case says that it is lost$"):
        simulate(program, replace(case, lost=frozenset({3})))
    with pytest.raises(
        CaseError, match=r"^random: worker 1 of replica 0 has the stages \[1\]: expected the placement \[\[0, 1\]\]"
    ):
        simulate(program, replace(case, placement=(0, 0)))
    with pytest.raises(
        CaseError, match=r"^gpipe has 1 replicas of 2 stages and 2 microbatches: expected 2, 2 and 2, as case has$"
    ):
        simulate(generate("gpipe", 2, 2), case)
    with pytest.raises(ScheduleError, match=r"^critical_path: random has 2 replicas: expected a program of one pipeline$"):
        _ = simulate(program, case.cost).critical_path


def test_a_program_that_workers_cannot_execute_is_refused_by_the_verifier() -> None:
    case = even_case(1, 1, 1, 3.0)
    text = "schedule x version=2 stages=1 microbatches=1\nworkers 0\nroute 0 0 by 0\n0: "
    with pytest.raises(ScheduleError, match=r"^x: deadlock: 1 of 1 ranks wait forever"):
        simulate(Program.parse(text + "0:0I0 0:0F0 0:0W0\n"), case)
    with pytest.raises(ScheduleError, match=r"^x: stage 0, microbatch 0: rank 0 has 0F0 0I0: expected"):
        simulate(Program.parse(text + "0:0F0 0:0I0\n"), case)
    with pytest.raises(ScheduleError, match=r"^x: no op computes a gradient: expected a training step$"):
        simulate(Program.parse(text + "0:0F0\n"), case)
