"""The schedule generators: valid for every size, in flight as documented, and the orders of the literature."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from adaptra.errors import ScheduleError
from adaptra.program import Kind, Program
from adaptra.program.schedules import (
    GENERATORS,
    forward_only,
    generate,
    generate_for,
    gpipe,
    interleaved_1f1b,
    one_f_one_b,
    two_phases,
    zb_h1,
    zb_h2,
    zbv,
)
from adaptra.program.verify import verify
from adaptra.simulation.cost import CostModel
from adaptra.simulation.simulate import simulate

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
def test_each_generator_is_what_it_was(name: str, golden: Callable[[str, str], None]) -> None:
    golden(f"{name}.sched", str(generate(name, 4, 8)))


def test_forward_only_and_unsplit_schedules_are_what_they_were(golden: Callable[[str, str], None]) -> None:
    golden("forward_only.sched", str(forward_only(range(3), 4)))
    golden("gpipe_unsplit.sched", str(gpipe(3, 4, split=False)))
    golden("1f1b_unsplit.sched", str(one_f_one_b(3, 4, split=False)))


@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_every_generated_program_verifies(stages: int, microbatches: int) -> None:
    for name in GENERATORS:
        verify(generate(name, stages, microbatches))
    verify(gpipe(stages, microbatches, split=False))
    verify(one_f_one_b(stages, microbatches, split=False))
    verify(forward_only(range(stages), microbatches))
    verify(two_phases(stages, microbatches))


@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_in_flight_is_what_each_docstring_says(stages: int, microbatches: int) -> None:
    some = [min(stages - stage, microbatches) for stage in range(stages)]
    assert in_flight(gpipe(stages, microbatches), {Kind.W}) == [microbatches] * stages
    assert in_flight(one_f_one_b(stages, microbatches), {Kind.W}) == some
    assert in_flight(one_f_one_b(stages, microbatches, split=False), {Kind.B}) == some
    assert in_flight(zb_h1(stages, microbatches), {Kind.W}) == [min(stages, microbatches)] * stages
    assert in_flight(zb_h2(stages, microbatches), {Kind.W}) == [min(2 * stages - 1, microbatches)] * stages


@pytest.mark.parametrize("delay", [3.0, 100.0])
def test_a_delay_costs_two_phases_its_latency_once_each_way(delay: float) -> None:
    cost, program = CostModel.uniform(4, 1.0, 1.0, 1.0), two_phases(4, 8)
    slow = replace(cost, latency_forward=(0.0, delay, 0.0), latency_backward=(0.0, delay, 0.0))
    assert simulate(program, cost).makespan == 3 * (1 + 1) + 8 * 3
    assert simulate(program, slow).makespan == 3 * (1 + 1) + 8 * 3 + 2 * delay
    assert in_flight(program, {Kind.W}) == [8] * 4


@pytest.mark.parametrize("stages", [1, 2, 4, 6])
def test_bubbles_with_equal_op_times_are_those_of_the_zero_bubble_paper(stages: int) -> None:
    """The largest bubble of a stage: S-1 ops for H1, none for H2, as soon as there are 2S-1 microbatches."""
    for microbatches in (2 * stages - 1, 2 * stages, 4 * stages):
        assert max(unit_bubbles(zb_h1(stages, microbatches))) == stages - 1
        assert unit_bubbles(zb_h2(stages, microbatches)) == [0] * stages


@pytest.mark.parametrize("name", GENERATORS)
@pytest.mark.parametrize(
    ("stages", "microbatches", "what"), [(0, 4, "stages=0"), (4, 0, "microbatches=0"), (-1, 4, "stages=-1")]
)
def test_bad_numbers_are_named(name: str, stages: int, microbatches: int, what: str) -> None:
    with pytest.raises(ScheduleError, match=rf"^{name}: {what}: expected at least 1$"):
        generate(name, stages, microbatches)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ScheduleError, match=r"^schedule 'zbv': expected one of gpipe, 1f1b, zb_h1, zb_h2$"):
        generate("zbv", 4, 4)


# Several stages on each rank


def test_schedules_with_several_stages_on_a_rank_are_what_they_were(golden: Callable[[str, str], None]) -> None:
    golden("interleaved.sched", str(interleaved_1f1b(3, 6)))
    golden("interleaved_3_chunks.sched", str(interleaved_1f1b(2, 4, 3)))
    golden("zbv.sched", str(zbv(3, 6)))


@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
def test_every_schedule_with_several_stages_on_a_rank_verifies(ranks: int, microbatches: int) -> None:
    for chunks in (1, 2, 3):
        verify(interleaved_1f1b(ranks, microbatches, chunks))
    verify(zbv(ranks, microbatches))


@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
def test_interleaved_with_one_chunk_is_1f1b_and_holds_what_its_docstring_says(ranks: int, microbatches: int) -> None:
    assert interleaved_1f1b(ranks, microbatches, 1).orders == one_f_one_b(ranks, microbatches).orders
    full = -(-microbatches // ranks) * ranks
    for chunks in (2, 3):
        ahead = [min(chunks * full, (chunks - 1) * ranks + 2 * (ranks - rank) - 1) for rank in range(ranks)]
        assert in_flight(interleaved_1f1b(ranks, full, chunks), {Kind.W}) == ahead
        held = in_flight(interleaved_1f1b(ranks, microbatches, chunks), {Kind.W})
        assert all(less <= most for less, most in zip(held, ahead, strict=True))


@pytest.mark.parametrize("ranks", [1, 2, 4, 6])
def test_zbv_has_no_bubble_and_holds_two_microbatches_per_rank(ranks: int) -> None:
    for microbatches in (2 * ranks - 1, 2 * ranks, 5 * ranks):
        assert unit_bubbles(zbv(ranks, microbatches)) == [0] * ranks
        assert max(in_flight(zbv(ranks, microbatches), {Kind.W})) <= 2 * ranks


@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 3), (2, 2), (2, 6), (4, 3), (4, 8), (3, 12)])
def test_zbv_is_torchs(ranks: int, microbatches: int) -> None:
    from torch.distributed.pipelining.schedules import ScheduleZBVZeroBubble

    torchs = object.__new__(ScheduleZBVZeroBubble)  # its order needs neither stages nor processes
    torchs.pp_group_size, torchs.num_stages, torchs._n_microbatches = ranks, 2 * ranks, microbatches
    for rank, order in enumerate(zbv(ranks, microbatches).orders):
        assert [str(op) for op in order] == [str(op) for op in torchs._calculate_single_rank_operations(rank) if op is not None]


@pytest.mark.parametrize(("ranks", "microbatches", "chunks"), [(2, 2, 2), (2, 6, 3), (4, 8, 2), (3, 12, 2)])
def test_interleaved_is_torchs(ranks: int, microbatches: int, chunks: int) -> None:
    """Whole rounds, and torch's B for our I and W."""
    from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B

    torchs = object.__new__(ScheduleInterleaved1F1B)  # its order needs neither stages nor processes
    torchs.pp_group_size, torchs.n_local_stages, torchs._n_microbatches = ranks, chunks, microbatches
    torchs.number_of_rounds, torchs.microbatches_per_round = microbatches // ranks, ranks
    for rank, order in enumerate(interleaved_1f1b(ranks, microbatches, chunks).orders):
        ours = [str(op).replace("I", "B") for op in order if op.kind is not Kind.W]
        assert ours == [str(op) for op in torchs._calculate_single_rank_operations(rank) if op is not None]


@pytest.mark.parametrize("name", ["interleaved", "zbv"])
def test_bad_numbers_of_ranks_are_named(name: str) -> None:
    generator = {"interleaved": interleaved_1f1b, "zbv": zbv}[name]
    with pytest.raises(ScheduleError, match=rf"^{name}: ranks=0: expected at least 1$"):
        generator(0, 3)
    with pytest.raises(ScheduleError, match=rf"^{name}: microbatches=0: expected at least 1$"):
        generator(3, 0)
    with pytest.raises(ScheduleError, match=r"^interleaved: chunks=0: expected at least 1$"):
        interleaved_1f1b(2, 2, 0)


def test_a_schedule_for_a_placement_is_the_one_that_places_so() -> None:
    assert generate_for("zbv", (0, 1, 1, 0), 3) == zbv(2, 3)
    assert generate_for("interleaved", (0, 1, 0, 1, 0, 1), 4) == interleaved_1f1b(2, 4, 3)
    assert generate_for("zb_h1", (0, 1, 2), 4) == zb_h1(3, 4)
    with pytest.raises(ScheduleError, match=r"^placement 0,1,0,1: zbv places stages on ranks 0,1,1,0$"):
        generate_for("zbv", (0, 1, 0, 1), 3)
    with pytest.raises(ScheduleError, match=r"^placement 0,1,1,0: 1f1b places stages on ranks 0,1,2,3$"):
        generate_for("1f1b", (0, 1, 1, 0), 3)
    with pytest.raises(ScheduleError, match=r"^schedule 'x': expected one of gpipe, 1f1b, zb_h1, zb_h2, interleaved, zbv$"):
        generate_for("x", (0, 1), 3)
