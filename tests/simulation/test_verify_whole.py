"""The verifier in C++ accepts programs that the verifier accepts, and no others."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jobs import damaged, even_case, random_case, random_job_program

from adaptra import _C
from adaptra.errors import InvalidProgramError
from adaptra.passes import InsertComm
from adaptra.planning.routes.job_planner import plan_job
from adaptra.program import Program
from adaptra.program.program import COMPUTE_KINDS, UPDATE_KINDS
from adaptra.program.schedules import forward_only
from adaptra.program.verify import verify
from adaptra.simulation.cost import CostModel
from adaptra.simulation.job import alike_case, problem_of, with_updates
from adaptra.simulation.simulate import verify_whole


def runs(program: Program, changing: frozenset[int] = frozenset()) -> bool:
    """What C++ says alone."""
    case = alike_case(program, CostModel.uniform(program.stages, 1, 1, 1), changing=changing)
    return _C.runs_whole(problem_of(case, program.routing), _C.to_orders(program.orders))


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 100_000))
def test_it_accepts_what_runs_and_nothing_else(seed: int) -> None:
    case = replace(random_case(seed, shapes=True), hands_over=True)
    program = random_job_program(case, seed)
    if seed % 2:
        program = with_updates(program)
    assert runs(program, case.changing)
    bad = damaged(program, seed, COMPUTE_KINDS | UPDATE_KINDS if seed % 2 else COMPUTE_KINDS)
    try:
        verify(bad, changing=case.changing)
    except InvalidProgramError as error:
        assert not runs(bad, case.changing)
        with pytest.raises(InvalidProgramError) as raised:
            verify_whole(bad, changing=case.changing)
        assert str(raised.value) == str(error)
    else:
        verify_whole(bad, changing=case.changing)


def test_it_accepts_forwards_alone_and_skips_messages() -> None:
    program = forward_only((0, 1), 2)
    assert runs(program)
    lowered = InsertComm().apply(program, CostModel.uniform(2, 1, 1, 1))
    assert runs(lowered)
    verify_whole(replace(lowered, orders=(lowered.orders[0], program.orders[1])))


def test_a_compute_op_with_a_lane_is_left_to_the_verifier() -> None:
    program = plan_job(even_case(2, 2, 2), effort=1)
    first, *rest = program.orders[0]
    with pytest.raises(InvalidProgramError, match="a compute op has no lane, this one has 'delegate'"):
        verify_whole(replace(program, orders=((replace(first, lane="delegate"), *rest), *program.orders[1:])))
