"""Programs with an open tail: whatever number of slots is filled, ranks can execute what is left."""

from __future__ import annotations

import random

import pytest

from adaptra.errors import ScheduleError
from adaptra.planning.planner import plan
from adaptra.program import Kind, Program
from adaptra.program.open_tail import closed_after, open_tail
from adaptra.program.schedules import GENERATORS, generate, zbv
from adaptra.simulation.case import Case
from adaptra.simulation.cost import CostModel
from adaptra.simulation.simulate import verify_whole


def check(program: Program, extra: int) -> None:
    opened = open_tail(program, extra)
    assert closed_after(opened, program.microbatches).orders == program.orders
    for slots in range(1, program.microbatches + extra + 1):
        verify_whole(closed_after(opened, slots))
    for order, before in zip(opened.orders, program.orders, strict=True):
        assert most_held(order) == most_held(before)


def most_held(order: tuple[object, ...]) -> int:
    """The most microbatches between F and the end of their W."""
    held = most = 0
    for op in order:
        kind = getattr(op, "kind", None)
        held += (kind is Kind.F) - (kind in (Kind.W, Kind.B))
        most = max(most, held)
    return most


@pytest.mark.parametrize("name", sorted(GENERATORS))
def test_schedules_of_the_literature(name: str) -> None:
    for stages in (1, 2, 4):
        for microbatches in (1, 3, 8):
            for extra in (1, 4):
                check(generate(name, stages, microbatches), extra)


def test_planned_programs() -> None:
    chance = random.Random(7)

    def some(least: float, most: float, count: int) -> tuple[float, ...]:
        return tuple(chance.uniform(least, most) for _ in range(count))

    for _ in range(60):
        stages, microbatches = chance.choice((2, 3, 4)), chance.choice((4, 6, 8))
        latency, occupancy = [some(0, most, stages - 1) for most in (2, 2)], [some(0, most, stages - 1) for most in (0.3, 0.3)]
        cost = CostModel(
            some(0.5, 2, stages), some(0.5, 2, stages), some(0.5, 2, stages), latency[0], latency[1], occupancy[0], occupancy[1]
        )
        check(plan(Case(cost, microbatches, tuple(range(stages)), name="drawn")), microbatches // 2)


def test_where_every_extra_forward_could_come_at_once_two_stages_would_wait_for_each_other() -> None:
    text = """
    schedule adapted placement=0,1,2,3 microbatches=6
    0: 0F0 0F1 0F2 0F3 0F4 0F5 0I0 0W0 0I1 0W1 0I2 0W2 0I3 0I4 0W3 0I5 0W4 0W5
    1: 1F0 1F1 1F2 1F3 1F4 1F5 1I0 1W0 1I1 1I2 1W1 1I3 1I4 1W2 1I5 1W3 1W4 1W5
    2: 2F0 2F1 2F2 2F3 2I0 2F4 2W0 2I1 2F5 2I2 2W1 2W2 2I3 2W3 2I4 2W4 2I5 2W5
    3: 3F0 3I0 3F1 3I1 3F2 3I2 3F3 3I3 3F4 3I4 3F5 3I5 3W0 3W1 3W2 3W3 3W4 3W5
    """
    check(Program.parse(text), 3)


def test_the_text_of_one() -> None:
    assert str(open_tail(generate("1f1b", 2, 3), 2)).splitlines() == [
        "schedule 1f1b-open placement=0,1 microbatches=5",
        "0: 0F0 0F1 0I0 0W0 0F2 0I1 0W1 0F3 0I2 0W2 0F4 0I3 0W3 0I4 0W4",
        "1: 1F0 1I0 1W0 1F1 1I1 1W1 1F2 1I2 1W2 1F3 1I3 1W3 1F4 1I4 1W4",
    ]


def test_several_stages_on_a_rank_are_refused() -> None:
    with pytest.raises(ScheduleError, match="expected compute ops of a training step without messages, and one stage per rank"):
        open_tail(zbv(2, 4), 1)
