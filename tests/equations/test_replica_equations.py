"""The equations of several replicas: solved forms against the conditions they solve, published figures, and the planner."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import sympy
from hypothesis import given
from hypothesis import strategies as st
from jobs import even_case, random_case, random_job_program
from paths import DOCS

from adaptra.equations.equation import Equation, legend
from adaptra.equations.replicas import REPLICA_SYMBOLS, replica_equations
from adaptra.planning.explaining.job_numbers import JobNumbers
from adaptra.planning.responses.normalize import normalized, stage_work
from adaptra.planning.routes.period_bound import period_bound
from adaptra.planning.routes.route import counts, share_evenly
from adaptra.simulation.bound import BoundKind
from adaptra.simulation.case import Case
from adaptra.simulation.cost import CostModel
from adaptra.simulation.simulate import simulate

MODEL = replica_equations()
EVERY: list[Equation] = [getattr(MODEL, field.name) for field in dataclasses.fields(MODEL)]
UNIT = (1, 1, 1, 0, 3)
"""Times of a stage as in ReCycle's table: F, I, W, REDUCE, STEP."""

times = st.integers(1, 40).map(lambda quarters: quarters / 4)
sizes = st.tuples(st.integers(2, 12), st.integers(1, 8), st.integers(1, 40))


def argument(equation: Equation, name: str) -> Any:
    """The symbol of an equation by its name."""
    (found,) = (symbol for symbol in equation.arguments if str(symbol) == name)
    return found


# ── each by itself ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("equation", EVERY, ids=lambda equation: equation.title)
def test_an_equation_takes_its_own_symbols_and_fills_them_in(equation: Equation) -> None:
    assert {str(symbol) for symbol in equation.expression.free_symbols} == {str(symbol) for symbol in equation.arguments}
    filled = equation.with_values(*range(2, 2 + len(equation.arguments)))
    assert not set(filled.replace("(", " ").split()) & set(REPLICA_SYMBOLS) and "_" not in filled


def test_every_symbol_is_explained() -> None:
    assert set(legend(EVERY, REPLICA_SYMBOLS)) == set(REPLICA_SYMBOLS)
    assert all(equation.symbols <= set(REPLICA_SYMBOLS) for equation in EVERY)


def test_importing_does_not_import_sympy() -> None:
    modules = "adaptra.equations.replicas, adaptra.planning.explaining.explanation"
    code = f"import sys, {modules}; sys.exit('sympy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ── solved forms satisfy what they solve ─────────────────────────────────────────────────────────────────────────────────────


@given(sizes)
def test_the_most_lost_workers_that_fit_are_where_the_fit_turns(size: tuple[int, int, int]) -> None:
    replicas, stages, microbatches = size
    most = MODEL.most_lost.evaluate(microbatches, replicas, stages)
    assert MODEL.fit.evaluate(most, microbatches, replicas, stages)
    assert most == replicas - 1 or not MODEL.fit.evaluate(most + 1, microbatches, replicas, stages)


def test_the_fit_says_that_the_work_is_within_the_period_of_1f1b() -> None:
    f, m, p, *ops = MODEL.work.arguments
    stages = argument(MODEL.fit, "S")
    spare = sympy.simplify((MODEL.one_f_one_b.expression - MODEL.work.expression) / sum(ops[:3]))
    assert sympy.simplify(spare - (stages - 1 - MODEL.extra.expression)) == 0
    assert {f, m, p} <= set(MODEL.extra.expression.free_symbols)


@given(sizes, st.tuples(times, times, times, times, times), st.integers(0, 11))
def test_a_stage_bears_as_many_as_leave_its_work_within_the_period(
    size: tuple[int, int, int], ops: tuple[float, ...], lost: int
) -> None:
    replicas, _, microbatches = size
    lost = min(lost, replicas - 1)
    period = MODEL.work.evaluate(lost, microbatches, replicas, *ops)
    most = MODEL.bears.evaluate(microbatches, replicas, *ops, period)
    assert most >= lost
    assert MODEL.work.evaluate(most, microbatches, replicas, *ops) <= period
    assert most == replicas - 1 or MODEL.work.evaluate(most + 1, microbatches, replicas, *ops) > period


@given(
    st.integers(2, 5),
    st.integers(1, 12),
    st.lists(st.tuples(times, times, times, times, times), min_size=1, max_size=5),
    st.data(),
)
def test_normalisation_reaches_the_least_period_within_which_the_stages_bear_all(
    replicas: int, microbatches: int, stages: list[tuple[float, ...]], data: st.DataObject
) -> None:
    f, i, w, reduce, step = (tuple(of_stages) for of_stages in zip(*stages, strict=True))
    none = (0.0,) * (len(stages) - 1)
    case = Case(CostModel(f, i, w, none, none, none, none), microbatches, replicas=replicas, step=step, reduce=reduce)
    works = {
        (stage, lost): float(MODEL.work.evaluate(lost, microbatches, replicas, *ops))
        for stage, ops in enumerate(stages)
        for lost in range(replicas)
    }
    assert all(work == stage_work(case, *place) for place, work in works.items())
    number = data.draw(st.integers(0, len(stages) * (replicas - 1)))

    def borne(period: float) -> int:
        if any(works[stage, 0] > period for stage in range(len(stages))):
            return -1
        return sum(MODEL.bears.evaluate(microbatches, replicas, *ops, period) for ops in stages)

    least = min(period for period in works.values() if borne(period) >= number)
    assert least == max(works[place] for place in enumerate(normalized(case, number)))


@given(sizes, times, times, times, st.floats(1.01, 8))
def test_a_slow_worker_keeps_what_makes_all_of_its_stage_busy_for_as_long(
    size: tuple[int, int, int], f: float, i: float, w: float, slow: float
) -> None:
    replicas, _, microbatches = size
    lost = 1 - 1 / slow
    capacity = MODEL.capacity.evaluate(lost, microbatches, replicas, f, i, w)
    kept = MODEL.kept.evaluate(lost, microbatches, replicas, slow)
    others = (replicas * microbatches - kept) / (replicas - 1)
    assert kept * slow * (f + i + w) == pytest.approx(capacity)
    assert others * (f + i + w) == pytest.approx(capacity)
    assert capacity == pytest.approx(microbatches * replicas * (f + i + w) / (replicas - 1 + 1 / slow))


@given(times, times, times, st.integers(1, 9), st.integers(1, 40), st.floats(1, 4), times)
def test_rooms_are_the_least_that_satisfy_their_bounds(
    f: float, back: float, trip: float, loops: int, computed: int, slow: float, step: float
) -> None:
    worker = f, back, back, 0.0, step, slow
    full = MODEL.fill_room.evaluate(trip, f, slow)
    work = MODEL.worker_work.evaluate(computed, *worker)
    assert MODEL.fill.evaluate(computed, full, trip, *worker) == pytest.approx(work)
    assert MODEL.fill.evaluate(computed, full * 0.9, trip, *worker) > work
    period = (loops * ((f + 2 * back) * slow + trip) + step * slow) * (1 + 1e-9)
    room = MODEL.memory_room.evaluate(computed, trip, *worker, period)
    assert MODEL.memory.evaluate(computed, room, trip, *worker) <= period
    assert room == 1 or MODEL.memory.evaluate(computed, room - 1, trip, *worker) > period


def test_the_memory_price_is_the_room_for_the_microbatches_of_others() -> None:
    lost, microbatches, replicas = 1, 6, 3
    extra = MODEL.extra.evaluate(lost, microbatches, replicas)
    # A round trip of 9 fits three times into 30 - 3: three more microbatches take one more place.
    assert extra == 3 and MODEL.memory_price.evaluate(lost, microbatches, replicas, 6, *UNIT, 1, 30) == 1
    assert MODEL.memory_room.evaluate(9, 6, *UNIT, 1, 30) - MODEL.memory_room.evaluate(6, 6, *UNIT, 1, 30) == 1


@given(times, times, times)
def test_a_recut_pays_from_its_break_even_on(gain: float, best: float, cost: float) -> None:
    steps = MODEL.break_even.evaluate(best + gain, best, cost)
    assert steps == pytest.approx(cost / gain)
    assert MODEL.recut_pays.evaluate(best + gain, best, steps * 1.001, cost)
    assert not MODEL.recut_pays.evaluate(best + gain, best, steps * 0.999, cost)


@given(st.integers(1, 64), times, st.integers(0, 64), times)
def test_the_best_number_of_detours_makes_both_links_busy_for_as_long(sent: int, narrow: float, own: int, wide: float) -> None:
    links = sent, narrow, own, wide
    best, bound = MODEL.detour_share.evaluate(*links), MODEL.detour_bound.evaluate(*links)
    assert MODEL.detour.evaluate(*links, best) == pytest.approx(bound)
    for other in (best - 1, best + 1):
        assert MODEL.detour.evaluate(*links, other) > bound


# ── published figures ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("replicas", "stages", "microbatches", "lost", "normalised", "work", "healthy", "extra", "holds", "scaled"),
    [
        (3, 4, 6, 1, [0, 0, 0, 1], 30, 30, 3, True, 0.9167),
        (3, 4, 6, 5, [1, 1, 1, 2], 57, 30, 12, False, 0.5833),
        (6, 4, 8, 3, [0, 1, 1, 1], 33, 36, 2, True, 0.875),
        (6, 4, 16, 1, [0, 0, 0, 1], 63, 60, 4, False, 0.9583),
        (6, 4, 32, 9, [2, 2, 2, 3], 195, 108, 32, False, 0.625),
        (8, 8, 16, 9, [1, 1, 1, 1, 1, 1, 1, 2], 69, 72, 6, True, 0.8594),
        (2, 4, 8, 1, [0, 0, 0, 1], 51, 36, 8, False, 0.875),
    ],
)
def test_the_model_of_recycle(
    replicas: int,
    stages: int,
    microbatches: int,
    lost: int,
    normalised: list[int],
    work: int,
    healthy: int,
    extra: int,
    holds: bool,
    scaled: float,
) -> None:
    most = max(normalised)
    assert sum(normalised) == lost
    assert max(MODEL.work.evaluate(count, microbatches, replicas, *UNIT) for count in normalised) == work
    assert MODEL.one_f_one_b.evaluate(microbatches, stages, *UNIT) == healthy
    assert MODEL.extra.evaluate(most, microbatches, replicas) == extra
    assert MODEL.fit.evaluate(most, microbatches, replicas, stages) is holds
    assert (work <= healthy) is holds
    assert 1 / MODEL.fault_scaled.evaluate(1, replicas, stages, lost) == pytest.approx(scaled, abs=5e-5)


# ── the planner's own bounds ─────────────────────────────────────────────────────────────────────────────────────────────────


@given(st.integers(2, 5), st.integers(1, 5), st.integers(1, 12), st.data())
def test_the_work_of_a_stage_is_the_planners_work_bound(
    replicas: int, stages: int, microbatches: int, data: st.DataObject
) -> None:
    lost = data.draw(st.lists(st.integers(0, replicas - 1), min_size=stages, max_size=stages))
    case = even_case(replicas, stages, microbatches, 3.0)
    case = replace(case, lost=frozenset(case.worker(one, stage) for stage, most in enumerate(lost) for one in range(most)))
    routing = share_evenly(case, in_turns=data.draw(st.booleans()))
    expected = max(MODEL.work.evaluate(count, microbatches, replicas, *UNIT) for count in lost)
    # Where F and I take no time, only the work counts.
    bound = period_bound(replace(case, cost=replace(case.cost, input_grad=(0.0,) * stages, forward=(0.0,) * stages)), routing)
    assert bound.value == max(MODEL.work.evaluate(count, microbatches, replicas, 0, 0, 1, 0, 3) for count in lost)
    assert period_bound(case, routing).value >= expected
    if period_bound(case, routing).kind is BoundKind.WORK:
        assert period_bound(case, routing).value == expected


@given(st.integers(0, 100_000), st.booleans(), st.booleans())
def test_no_equation_exceeds_the_planners_bound(seed: int, links: bool, limited: bool) -> None:
    case = random_case(seed, links=links)
    simulation = simulate(random_job_program(case, seed), case)
    if limited:
        simulation = replace(simulation, given=replace(case, memory=tuple(max(simulation.held) for _ in range(case.stages))))
    routing = simulation.program.routing
    numbers = JobNumbers(simulation, routing)
    lines = [*numbers.of_stages(), *numbers.of_workers(), *numbers.of_messages(), *numbers.of_recut()]
    bound = period_bound(simulation.case, routing)
    assert max(line.result for line in lines if line.equation.source == "lower bound") <= bound.value * (1 + 1e-9)
    of_kind = {BoundKind.WORK: MODEL.worker_work, BoundKind.MEMORY: MODEL.memory}
    if equation := of_kind.get(bound.kind):
        assert max(line.result for line in lines if line.equation == equation) == pytest.approx(bound.value)
    assert all(line.result for line in lines if line.equation == MODEL.held)


@given(st.integers(2, 5), st.integers(1, 4), st.integers(1, 20), st.sampled_from([0.5, 1.25, 2.0, 3.0]))
def test_a_slow_worker_keeps_nearly_what_the_pass_leaves_it(replicas: int, stages: int, microbatches: int, slow: float) -> None:
    case = replace(even_case(replicas, stages, microbatches), slow={stages - 1: slow})
    left = counts(case, stages - 1)[stages - 1]
    assert math.isclose(left, MODEL.kept.evaluate(1 - 1 / slow, microbatches, replicas, slow), abs_tol=1)


def test_the_documentation_lists_every_equation_and_symbol() -> None:
    page = (DOCS / "equations.md").read_text()
    for equation in EVERY:
        assert f"| {equation.title} | `{equation.text}` | " in page
        assert f" | {equation.source} |\n" in page
    assert all(f"| `{symbol}` | {meaning} |\n" in page for symbol, meaning in REPLICA_SYMBOLS.items())
