"""The schedule generators: valid for every size, in flight as documented, and the orders of the literature."""

import pytest

from adaptra.errors import ScheduleError
from adaptra.program import Kind, Program
from adaptra.schedules import GENERATORS, forward_only, generate, gpipe, one_f_one_b, zb_h1, zb_h2
from adaptra.verify import verify

SIZES = [(1, 1), (1, 5), (2, 1), (4, 1), (4, 2), (4, 3), (4, 4), (3, 7), (5, 9), (8, 24)]


def in_flight(program: Program, ends: set[Kind]) -> list[int]:
    """Per rank, the most microbatches between their F and the op of a kind in ``ends``."""
    peaks: list[int] = []
    for order in program.orders:
        held = peak = 0
        for op in order:
            held += (op.kind is Kind.F) - (op.kind in ends)
            peak = max(peak, held)
        peaks.append(peak)
    return peaks


def unit_bubbles(program: Program) -> list[int]:
    """Per rank, its idle time between its first start and its last end, when every op takes one and messages take nothing."""
    end: dict[tuple[int, str, int], int] = {}
    clock, position, start = [0] * program.ranks, [0] * program.ranks, [0] * program.ranks
    while any(position[rank] < len(order) for rank, order in enumerate(program.orders)):
        for rank, order in enumerate(program.orders):
            if position[rank] == len(order):
                continue
            op = order[position[rank]]
            neighbour = {Kind.F: op.stage - 1, Kind.I: op.stage + 1, Kind.W: -1}[op.kind]
            needed = (neighbour, op.kind.value, op.microbatch)
            if not 0 <= neighbour < program.stages or needed in end:
                begin = max(clock[rank], end.get(needed, 0))
                start[rank] = begin if position[rank] == 0 else start[rank]
                clock[rank] = end[op.stage, op.kind.value, op.microbatch] = begin + 1
                position[rank] += 1
    return [clock[rank] - start[rank] - len(order) for rank, order in enumerate(program.orders)]


@pytest.mark.parametrize("name", GENERATORS)
def test_each_generator_is_what_it_was(name, golden):
    golden(f"{name}.sched", str(generate(name, 4, 8)))


def test_forward_only_and_unsplit_schedules_are_what_they_were(golden):
    golden("forward_only.sched", str(forward_only(3, 4)))
    golden("gpipe_unsplit.sched", str(gpipe(3, 4, split=False)))
    golden("1f1b_unsplit.sched", str(one_f_one_b(3, 4, split=False)))


@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_every_generated_program_verifies(stages, microbatches):
    for name in GENERATORS:
        verify(generate(name, stages, microbatches))
    verify(gpipe(stages, microbatches, split=False))
    verify(one_f_one_b(stages, microbatches, split=False))
    verify(forward_only(stages, microbatches))


@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_in_flight_is_what_each_docstring_says(stages, microbatches):
    some = [min(stages - stage, microbatches) for stage in range(stages)]
    assert in_flight(gpipe(stages, microbatches), {Kind.W}) == [microbatches] * stages
    assert in_flight(one_f_one_b(stages, microbatches), {Kind.W}) == some
    assert in_flight(one_f_one_b(stages, microbatches, split=False), {Kind.B}) == some
    assert in_flight(zb_h1(stages, microbatches), {Kind.W}) == [min(stages, microbatches)] * stages
    assert in_flight(zb_h2(stages, microbatches), {Kind.W}) == [min(2 * stages - 1, microbatches)] * stages


@pytest.mark.parametrize("stages", [1, 2, 4, 6])
def test_bubbles_with_equal_op_times_are_those_of_the_zero_bubble_paper(stages):
    """The largest bubble of a stage: S-1 ops for H1, none for H2, as soon as there are 2S-1 microbatches."""
    for microbatches in (2 * stages - 1, 2 * stages, 4 * stages):
        assert max(unit_bubbles(zb_h1(stages, microbatches))) == stages - 1
        assert unit_bubbles(zb_h2(stages, microbatches)) == [0] * stages


@pytest.mark.parametrize("name", GENERATORS)
@pytest.mark.parametrize(
    ("stages", "microbatches", "what"), [(0, 4, "stages=0"), (4, 0, "microbatches=0"), (-1, 4, "stages=-1")]
)
def test_bad_numbers_are_named(name, stages, microbatches, what):
    with pytest.raises(ScheduleError, match=rf"^{name}: {what}: expected at least 1$"):
        generate(name, stages, microbatches)


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ScheduleError, match=r"^schedule 'zbv': expected one of gpipe, 1f1b, zb_h1, zb_h2$"):
        generate("zbv", 4, 4)
