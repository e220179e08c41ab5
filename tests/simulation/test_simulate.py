"""The simulator: exact figures, agreement with a naive reference, what it refuses, and bounds that nothing beats."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import paths
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from naive import greedy, messages, random_program, simulate_by_iteration

from adaptra import _C
from adaptra.errors import CaseError, ScheduleError
from adaptra.program import Kind, Op, Program
from adaptra.program.schedules import generate
from adaptra.simulation.bound import BoundKind
from adaptra.simulation.case import Case
from adaptra.simulation.case_files import load_case
from adaptra.simulation.cost import Blocking, CostModel
from adaptra.simulation.job import pipeline_of
from adaptra.simulation.simulate import Simulation, lower_bound, simulate
from adaptra.simulation.timeline import MessageInterval, OpInterval
from adaptra.sizes import MemoryLimit

CASES = sorted(paths.CASES.glob("*.json"))
TEN = CostModel.uniform(4, 10, 10, 10)
TWO_STAGES = """\
schedule two placement=0,1 microbatches=2
0: 0F0 0F1 0I0 0W0 0I1 0W1
1: 1F0 1I0 1W0 1F1 1I1 1W1
"""


def delayed(cost: CostModel, latency: float) -> CostModel:
    """The same model with a latency in both directions of the first edge."""
    return cost.with_latency(0, 1, latency).with_latency(1, 0, latency)


# ── the published figures ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_four_stages_under_the_greedy_order_take_390() -> None:
    assert simulate(greedy(TEN, 12, [7, 5, 3, 1]), TEN).makespan == 390


@pytest.mark.parametrize(("latency", "makespan"), [(10, 400), (20, 440), (30, 500), (40, 560), (60, 680)])
def test_the_order_for_no_delay_kept_under_a_delay(latency: float, makespan: float) -> None:
    order_for_no_delay = greedy(TEN, 12, [7, 5, 3, 1])
    assert simulate(order_for_no_delay, delayed(TEN, latency)).makespan == makespan


@pytest.mark.parametrize("latency", [10, 20, 30, 40, 60])
def test_an_order_for_the_delay_costs_the_delay_once(latency: float) -> None:
    cost = delayed(TEN, latency)
    assert simulate(greedy(cost, 12, [7, 5, 3, 1]), cost).makespan == 390 + latency


@pytest.mark.parametrize(
    ("slackness", "planned_for", "expected"),
    [
        pytest.param(2, 0, [0, 4, 8, 50, 130, 210, 290], id="slackness 2"),
        pytest.param(4, 10, [0, 4, 8, 12, 16, 20, 24, 28, 54, 102, 150], id="slackness 4"),
    ],
)
def test_accumulated_delay_between_two_stages(slackness: int, planned_for: float, expected: list[float]) -> None:
    cost = CostModel.uniform(2, 10, 10, 10)
    program = greedy(delayed(cost, planned_for), 30, [1 + slackness, 1])
    found = [simulate(program, delayed(cost, latency)).makespan - 910 for latency in range(0, 4 * len(expected), 4)]
    assert found == expected


# ── against the definition ───────────────────────────────────────────────────────────────────────────────────────────────────

WHOLE = st.integers(1, 5).map(float)
REAL = st.floats(0.125, 8, allow_nan=False)


@st.composite
def problems(draw: st.DrawFn) -> tuple[Program, CostModel]:
    stages = draw(st.integers(1, 4))
    ranks = draw(st.integers(1, stages))
    extra = draw(st.lists(st.integers(0, ranks - 1), min_size=stages - ranks, max_size=stages - ranks))
    placement = draw(st.permutations([*range(ranks), *extra]))
    duration = draw(st.sampled_from([WHOLE, REAL]))
    wait = st.one_of(st.just(0.0), duration)
    times = st.lists(duration, min_size=stages, max_size=stages).map(tuple)
    edges = st.lists(wait, min_size=stages - 1, max_size=stages - 1).map(tuple)
    cost = CostModel(
        *(draw(times) for _ in range(3)),
        *(draw(edges) for _ in range(4)),
        half_duplex=draw(st.booleans()),
        blocking=draw(st.sampled_from(Blocking)),
    )
    microbatches, seed, forward_only = draw(st.integers(1, 4)), draw(st.integers(0, 2**32)), draw(st.booleans())
    return random_program(seed, placement, microbatches, forward_only=forward_only), cost


@settings(max_examples=150)
@given(problems())
def test_every_time_equals_the_naive_reference(problem: tuple[Program, CostModel]) -> None:
    program, cost = problem
    simulation = simulate(program, cost)
    expected = simulate_by_iteration(program, cost)
    assert {interval.op: (interval.start, interval.end) for interval in simulation.timeline} == expected
    travels = messages(program, cost, expected)
    for message in simulation.timeline.messages:
        (producer,) = (
            op
            for op in travels
            if (op.stage, op.microbatch) == (message.source, message.microbatch)
            and (op.kind is Kind.F) == (message.kind is Kind.SEND_F)
        )
        assert message.posted == expected[producer][1]
        assert (message.departed, message.arrived) == travels[producer]


def test_all_messages_from_one_rank_to_another_take_one_link() -> None:
    """Stages 0 and 3 send to the other rank: an activation and a gradient that queue for each other."""
    program = Program.parse(
        "schedule v placement=0,1,1,0 microbatches=2\n"
        "0: 0F0 3F0 3I0 0F1 3W0 0I0 0W0 3F1 3I1 3W1 0I1 0W1\n"
        "1: 1F0 2F0 2I0 1I0 2W0 1W0 1F1 2F1 2I1 1I1 2W1 1W1\n"
    )
    link = CostModel.uniform(4, 1, 1, 1, occupancy=4)
    sent = [message for message in simulate(program, link).timeline.messages if message.source in (0, 3)]
    assert [(one.kind, one.microbatch, one.posted, one.departed) for one in sent] == [
        (Kind.SEND_F, 0, 1, 1),
        (Kind.SEND_B, 0, 13, 13),
        (Kind.SEND_F, 1, 14, 17),
        (Kind.SEND_B, 1, 29, 29),
    ]


def test_the_search_times_links_as_the_simulator_does() -> None:
    for seed in range(6):
        case = Case(CostModel.uniform(4, 1 + seed % 3, 1, 1, latency=1, occupancy=1.5), 4, (0, 1, 1, 0))
        found = _C.search_orders(pipeline_of(case, case.cost), [4] * 4, [[2, 1, 1, 1]], [], 20_000, seed, None)
        assert found is not None
        makespan, orders = found
        program = Program.of_pipeline("found", case.placement, 4, orders.computed())
        assert makespan == pytest.approx(simulate(program, case.cost).makespan)


@settings(max_examples=150)
@given(problems())
def test_the_critical_path_has_no_gap(problem: tuple[Program, CostModel]) -> None:
    program, cost = problem
    simulation = simulate(program, cost)
    path = simulation.critical_path
    assert isinstance(path[0], OpInterval)
    assert path[0].start == 0
    assert isinstance(path[-1], OpInterval)
    assert path[-1].end == simulation.makespan
    for before, after in pairwise(path):
        match before, after:
            case OpInterval(), OpInterval():
                assert after.start == before.end
            case MessageInterval(), OpInterval():
                assert after.start == before.arrived
            case OpInterval(), MessageInterval():
                assert after.departed == after.posted == before.end
            case MessageInterval(), MessageInterval():
                occupancy = cost.occupancy(before.source, before.destination)
                assert after.posted < after.departed == before.departed + occupancy
            case _:
                raise AssertionError(path)


@settings(max_examples=150)
@given(problems())
def test_no_program_beats_the_bound(problem: tuple[Program, CostModel]) -> None:
    program, cost = problem
    if not program.is_forward_only:
        simulation = simulate(program, cost)
        limited = cost.limited(simulation.peak_memory)
        bound = lower_bound(Case(limited, program.microbatches, program.placement)).value
        assert bound <= simulation.makespan * (1 + 1e-9)
        assert bound >= lower_bound(Case(cost, program.microbatches, program.placement)).value * (1 - 1e-9)


@settings(max_examples=100)
@given(problems())
def test_peaks_are_what_the_timeline_shows(problem: tuple[Program, CostModel]) -> None:
    program, cost = problem
    simulation = simulate(program, cost)
    frees = {Kind.F} if program.is_forward_only else {Kind.I, Kind.B}
    for stage, peak in enumerate(simulation.peak_in_flight):
        ops = [interval for interval in simulation.timeline if interval.op.stage == stage]
        starts = [interval.start for interval in ops if interval.op.kind is Kind.F]
        ends = [interval.end for interval in ops if interval.op.kind in frees]
        assert peak == max(sum(s <= at for s in starts) - sum(e <= at for e in ends) for at in starts)


# ── single figures ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def two_stages(**changes: object) -> Simulation:
    cost = replace(CostModel.uniform(2, 4, 3, 2, latency=1, occupancy=5), **changes)
    return simulate(Program.parse(TWO_STAGES), cost)


def test_messages_queue_for_occupancy_and_not_for_latency() -> None:
    first, second = (m for m in two_stages().timeline.messages if m.kind is Kind.SEND_F)
    assert (first.posted, first.departed, first.arrived) == (4, 4, 10)
    assert (second.posted, second.departed, second.arrived) == (8, 9, 15)


def test_a_sender_that_blocks_starts_nothing_until_its_message_is_there() -> None:
    assert [i.start for i in two_stages(blocking=Blocking.SEND).timeline.ops[0]][:2] == [0, 10]


def test_a_receiver_that_blocks_starts_nothing_while_a_message_is_under_way() -> None:
    kwargs = {"latency_forward": (9.0,), "occupancy_forward": (0.0,)}
    sender_only, both = (two_stages(blocking=mode, **kwargs) for mode in (Blocking.SEND, Blocking.BOTH))
    start = Op(1, Kind.W, 0)
    at = [next(i.start for i in simulation.timeline if i.op == start) for simulation in (sender_only, both)]
    assert at[0] < at[1]


def test_both_directions_of_a_shared_edge_queue_for_each_other() -> None:
    departed = [
        next(m.departed for m in two_stages(occupancy_forward=(12.0,), half_duplex=shared).timeline.messages if m.source == 1)
        for shared in (False, True)
    ]
    assert departed == [24, 28]


def test_memory_is_held_from_f_in_parts_until_i_and_w() -> None:
    simulation = two_stages(memory_forward=(10.0, 8.0), memory_input_grad=(6.0, 8.0), memory_limit=MemoryLimit((19.0, 8.0)))
    assert simulation.peak_memory == (20, 8)
    assert simulation.peak_in_flight == (2, 1)
    assert simulation.over_memory == (0,)


def test_busy_and_bubble_fill_the_makespan() -> None:
    simulation = two_stages()
    assert simulation.busy == (18, 18)
    assert simulation.bubble == tuple(simulation.makespan - 18 for _ in range(2))
    assert simulation.bubble_ratio == sum(simulation.bubble) / (2 * simulation.makespan)
    assert simulation.to_json()["bubble"] == list(simulation.bubble)
    assert simulation.timeline.makespan == simulation.makespan
    assert simulation.timeline.busy == simulation.busy


def test_a_b_takes_the_time_of_i_and_w_and_sends_at_its_end() -> None:
    program = Program.parse("schedule b placement=0,1 microbatches=1\n0: 0F0 0B0\n1: 1F0 1B0\n")
    assert simulate(program, CostModel.uniform(2, 4, 3, 2, latency=1)).makespan == 4 + 1 + 4 + 5 + 1 + 5


def test_communication_ops_are_skipped() -> None:
    cost = CostModel.uniform(2, 1, 1, 1, latency=3)
    lowered = Program.parse(
        "schedule x placement=0,1 microbatches=1\n0: 0F0 0SEND_F0 0RECV_B0 0I0 0W0\n1: 1RECV_F0 1F0 1I0 1SEND_B0 1W0\n"
    )
    assert simulate(lowered, cost).makespan == simulate(lowered.compute_only(), cost).makespan == 1 + 3 + 2 + 3 + 2


# ── what it refuses ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_deadlock_names_every_rank_and_what_it_waits_for() -> None:
    program = Program.parse(
        "schedule stuck placement=0,1 microbatches=2\n0: 0F0 0I0 0W0 0F1 0I1 0W1\n1: 1F0 1F1 1I0 1W0 1I1 1W1\n"
    )
    with pytest.raises(ScheduleError) as error:
        simulate(program, CostModel.uniform(2, 1, 1, 1))
    assert all(word in str(error.value) for word in ("rank 0", "rank 1", "0I0", "1I0", "1F1", "0F1"))


@pytest.mark.parametrize(
    "lines",
    [
        pytest.param("0: 0F0 0F0 0I0 0W0\n1: 1F0 1I0 1W0", id="an op twice"),
        pytest.param("0: 0F0 1F0 0I0 0W0\n1: 1I0 1W0", id="an op on another rank"),
        pytest.param("0: 0F0 0I0 0W0 0F1\n1: 1F0 1I0 1W0", id="a microbatch that does not exist"),
        pytest.param("0: 0F0 0I0 0W0\n1: 1F0 1I0 1W0 2F0", id="a stage that does not exist"),
    ],
)
def test_a_program_that_makes_no_sense_is_refused(lines: str) -> None:
    with pytest.raises(ScheduleError):
        simulate(Program.parse(f"schedule x placement=0,1 microbatches=1\n{lines}\n"), CostModel.uniform(2, 1, 1, 1))


def test_another_number_of_stages_is_refused() -> None:
    with pytest.raises(CaseError, match="two has 2 stages, the cost model 4: expected as many"):
        simulate(Program.parse(TWO_STAGES), TEN)


# ── bounds ───────────────────────────────────────────────────────────────────────────────────────────────────────────────────


SOLVER_IS_TIGHTER = {"C01", "G03", "G08", "G11"}
"""Cases whose published bound comes from an exact solver and lies up to 5 % above ours."""


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_the_bound_of_a_case_reaches_the_published_one_and_no_program_beats_it(path: Path) -> None:
    case, published = load_case(path), json.loads(path.read_text())
    bound = lower_bound(case)
    part = 0.95 if case.name in SOLVER_IS_TIGHTER else 1 - 1e-9
    assert published["lower_bound"] * part <= bound.value <= published["best_known"] * (1 + 1e-9)
    if case.microbatches <= 64:
        for name in ("gpipe", "1f1b", "zb_h1", "zb_h2"):
            simulation = simulate(generate(name, case.cost.stages, case.microbatches), case.cost)
            assert simulation.over_memory or simulation.makespan >= bound.value * (1 - 1e-9)


@pytest.mark.parametrize(
    ("changes", "microbatches", "value", "kind", "where"),
    [
        pytest.param({}, 8, 10 + 8 * 30.0, BoundKind.LOAD, "rank 1", id="load"),
        pytest.param({"weight_grad": (10.0, 0.0)}, 8, 240.0, BoundKind.LOAD, "rank 0", id="load of the first rank"),
        pytest.param({}, 1, 10 + 10 + 10 + 10 + 10.0, BoundKind.DRAIN, "stage 1", id="drain"),
        pytest.param({"latency_forward": (99.0,)}, 1, 149.0, BoundKind.DRAIN, "stage 1", id="drain behind a slow edge"),
        pytest.param(
            {"memory_limit": (1.0, 2.0), "memory_input_grad": (1.0, 1.0)},
            8,
            8 * 40 + 10.0,
            BoundKind.MEMORY,
            "stage 0",
            id="memory",
        ),
        pytest.param({"memory_limit": (1.0, 2.0)}, 8, 8 * 50.0, BoundKind.IDLE, "stage 0", id="memory that W frees"),
        pytest.param(
            {"occupancy_forward": (90.0,)}, 8, 10 + 720 + 10 + 10 + 10 + 10.0, BoundKind.LINK_FORWARD, "edge 0→1", id="link"
        ),
        pytest.param(
            {"occupancy_backward": (90.0,)}, 8, 10 + 10 + 10 + 720 + 10 + 10.0, BoundKind.LINK_BACKWARD, "edge 1→0", id="back"
        ),
    ],
)
def test_what_binds(changes: dict[str, object], microbatches: int, value: float, kind: BoundKind, where: str) -> None:
    cost = replace(CostModel.uniform(2, 10, 10, 10), **changes)
    bound = lower_bound(Case(cost, microbatches, (0, 1)))
    assert (bound.value, bound.kind, bound.where) == (value, kind, where)


def test_a_microbatch_that_does_not_fit_has_no_plan() -> None:
    cost = CostModel.uniform(2, 1, 1, 1).limited((1.0, 0.5))
    assert lower_bound(Case(cost, 4, (0, 1))).value == float("inf")


# ── size ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_large_program_is_simulated_by_several_threads_alike() -> None:
    """The interpreter lock is released while simulating; results must not depend on who else simulates."""
    program = generate("zb_h1", 32, 128)
    cost = CostModel.uniform(32, 10, 11, 5, latency=3, occupancy=1)
    found: list[float] = []
    threads = [threading.Thread(target=lambda: found.append(simulate(program, cost).makespan)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [simulate(program, cost).makespan] * 4
