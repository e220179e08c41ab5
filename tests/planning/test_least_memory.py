"""The first plan holds no more than it gains from; what is free limits later ones."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import paths
import pytest
import torch
from hypothesis import given, settings
from strategies import cases

import adaptra
from adaptra.errors import PlanError
from adaptra.frontend.planned.activation_memory import limits_free
from adaptra.frontend.planned.first_plan import first_plan
from adaptra.planning.exact import solve_exactly
from adaptra.planning.least_memory import WITHIN, plan_least_memory, spare_memory
from adaptra.planning.planner import plan
from adaptra.planning.routes.steady_steps import PERIOD
from adaptra.program import Program
from adaptra.program.verify import verify
from adaptra.runtime.control.plans.events import ControlEvent, EventKind
from adaptra.runtime.launch.free_memory import free_on, left_in_groups
from adaptra.runtime.options import Options
from adaptra.simulation.case import Case
from adaptra.simulation.case_files import load_case
from adaptra.simulation.cost import CostModel
from adaptra.simulation.simulate import Simulation, lower_bound, simulate
from adaptra.sizes import MemoryLimit

CASES = sorted(paths.CASES.glob("*.json"))
README = Case(CostModel.uniform(4, 1, 1, 1), 16, (0, 1, 2, 3))


def of(program: Program, case: Case) -> Simulation:
    verify(program)
    found = simulate(program, case.cost)
    assert not found.over_memory
    return found


@pytest.mark.parametrize("path", [path for path in CASES if path.stem not in ("L02", "L07")], ids=lambda path: path.stem)
def test_a_hundredth_longer_at_most_and_on_no_rank_more_than_the_most_of_the_best(path: Path) -> None:
    case = load_case(path)
    best, least = of(plan(case), case), of(plan_least_memory(case), case)
    assert least.makespan <= (1 + WITHIN) * best.makespan
    assert max(least.peak_memory) <= max(best.peak_memory) and sum(least.peak_memory) <= sum(best.peak_memory)


@pytest.mark.parametrize(
    ("case", "most"),
    [
        (README, 4),
        (Case(CostModel.uniform(4, 1, 1, 1, latency=1), 16, (0, 1, 2, 3)), 7),
        (Case(CostModel.uniform(4, 1, 1, 1), 16, (0, 1, 1, 0)), 4),
        (Case(CostModel.uniform(2, 1, 1, 1), 32, (0, 1)), 2),
        (Case(CostModel.uniform(1, 1, 1, 1), 8, (0,)), 1),
    ],
    ids=["equal stages", "delays", "V", "two stages", "one stage"],
)
def test_as_many_microbatches_as_the_pipeline_is_deep(case: Case, most: float) -> None:
    assert max(of(plan_least_memory(case), case).peak_memory) == most


def test_bytes_of_the_fullest_rank_come_before_the_sum() -> None:
    """Where stage 2 holds ten times as much its rank decides, and the others hold no more than they need beside it."""
    even = CostModel.uniform(4, 1, 1, 1)
    heavy = replace(even, memory_forward=(1.0, 1.0, 10.0, 1.0), memory_input_grad=(0.5, 0.5, 5.0, 0.5))
    case = Case(heavy, 12, (0, 1, 2, 3))
    found = of(plan_least_memory(case), case)
    assert found.peak_memory[2] == max(found.peak_memory)
    less = replace(case, cost=heavy.limited((found.peak_memory[2] - 5,) * 4))
    assert lower_bound(less).value > (1 + WITHIN) * simulate(plan(case), heavy).makespan
    assert max(found.peak_memory[0], found.peak_memory[1], found.peak_memory[3]) <= 5


@pytest.mark.parametrize("seed", range(4))
def test_no_plan_that_holds_less_is_as_short(seed: int) -> None:
    """Half a microbatch less on the fullest rank costs more than a hundredth: proven."""
    pytest.importorskip("ortools", reason="needs OR-tools: pip install 'adaptra[exact]'")
    latency = (0.0, 3.0, 0.0, 5.0)[seed]
    cost = CostModel.uniform(3, 2, 2 + seed % 2, 1).with_latency(1, 2, latency).with_latency(1, 0, latency)
    case = Case(cost, 5, (0, 1, 2))
    best, least = of(plan(case), case), of(plan_least_memory(case), case)
    room = max(least.peak_memory) - 0.5
    if room < 1:
        return
    less = replace(case, cost=cost.limited((room,) * 3))
    found = solve_exactly(less, workers=1)
    assert found.proven and simulate(found.program, cost).makespan > (1 + WITHIN) * best.makespan


@settings(max_examples=40, deadline=None)
@given(case=cases(max_stages=4, max_microbatches=5))
def test_within_every_limit_of_every_case(case: Case) -> None:
    try:
        best = of(plan(case), case)
    except PlanError:
        return
    least = of(plan_least_memory(case), case)
    assert least.makespan <= (1 + WITHIN) * best.makespan * (1 + 1e-9)
    assert max(least.peak_memory) <= max(best.peak_memory) * (1 + 1e-9)


def test_forwards_are_put_off_where_that_takes_no_longer() -> None:
    case = Case(CostModel.uniform(4, 1, 1, 1), 8, (0, 1, 2, 3))
    everything = Program.of_pipeline("all", case.placement, 8, plan(case).orders)
    spared = spare_memory(case, everything, simulate(everything, case.cost).makespan)
    before, after = of(everything, case), of(spared, case)
    assert after.makespan <= before.makespan
    assert all(map(float.__le__, after.peak_memory, before.peak_memory)) and sum(after.peak_memory) < sum(before.peak_memory)


# ── what limits it, and what is told ─────────────────────────────────────────────────────────────────────────────────────────


def test_what_is_free_limits_later_plans_and_never_the_first_ones_need() -> None:
    plenty, scarce, none = (first_plan(Options(), README, MemoryLimit((room,) * 4)) for room in (100.0, 3.0, 0.0))
    assert (
        plenty.case.cost.memory_limit == MemoryLimit((100.0,) * 4)
        and max(simulate(plenty.program, README.cost).peak_memory) == 7
    )
    assert max(simulate(scarce.program, README.cost).peak_memory) <= 3.0 == max(scarce.case.cost.memory_limit or ())
    assert none.program == plenty.program
    assert none.case.cost.memory_limit == MemoryLimit(simulate(none.program, README.cost).peak_memory)
    slow = none.case.cost.with_latency(1, 2, 5.0)
    assert max(simulate(plan(replace(none.case, cost=slow)), slow).peak_memory) <= 7


def test_a_schedule_that_was_asked_for_is_not_refused_for_what_is_free() -> None:
    asked = first_plan(Options(schedule="gpipe"), README, MemoryLimit((3.0,) * 4))
    assert asked.program.name == "gpipe" and asked.case.cost.memory_limit == MemoryLimit((16.0,) * 4)
    with pytest.raises(PlanError, match="schedule gpipe: rank 0 holds activations of 16: expected at most 3"):
        first_plan(Options(schedule="gpipe"), replace(README, cost=README.cost.limited((3.0,) * 4)))


def compiled(**given: Any) -> adaptra.Pipeline:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU()) for _ in range(8)))
    batch = torch.randn(32, 64), torch.randn(32, 64)
    loss = torch.nn.functional.mse_loss
    return adaptra.compile(model, stages=4, microbatches=16, example_inputs=batch, loss=loss, **given)


def test_the_readmes_example_holds_few_of_its_16_microbatches_and_may_take_what_is_free() -> None:
    with compiled() as pipe:
        held = simulate(pipe.plan.program, pipe.plan.case.cost)
        assert max(held.peak_in_flight) <= 10
        assert all(limit > 1 << 20 for limit in pipe.plan.case.cost.memory_limit or ())
        best = PERIOD.plan(pipe.plan.case)
        assert PERIOD.of(pipe.plan.program, pipe.plan.case.cost) <= (1 + WITHIN) * PERIOD.of(best, pipe.plan.case.cost)


@pytest.mark.timed
def test_a_plan_for_a_slow_link_takes_more_and_its_events_say_how_much() -> None:
    faults = ["delay 1-2 30ms @2"]
    emulate = adaptra.EmulatedDevice(0.004, 0.004, 0.004)
    with compiled(options=adaptra.Options(faults=faults, emulate=emulate)) as pipe:
        before = max(simulate(pipe.plan.program, pipe.plan.case.cost).peak_in_flight)
        batch = torch.randn(32, 64), torch.randn(32, 64)
        for _ in range(20):
            pipe.step(*batch)
            if pipe.plan.version > 0:
                break
        switched = [event for event in pipe.events if event.kind is EventKind.SWITCHED]
        after = simulate(pipe.plan.program, pipe.plan.case.cost)
        assert before < max(after.peak_in_flight) <= 16
        assert switched[-1].in_flight == after.peak_in_flight
        assert switched[-1].memory is not None and len(switched[-1].memory) == 4 and min(switched[-1].memory) > 0
        assert f"at most {max(after.peak_in_flight)} microbatches in flight, " in str(switched[-1])


def test_what_is_free_leaves_room_for_gradients_and_the_optimizer() -> None:
    with compiled() as pipe:
        assert pipe._session is not None
        stages = pipe._session.compiled.train
        limits = limits_free((10**9,) * 4, stages, (0, 1, 2, 3))
        for limit, stage in zip(limits, stages, strict=True):
            assert 0.8e9 < limit <= 0.9e9 - 3 * stage.parameter_bytes
        assert limits_free((0,) * 4, stages, (0, 1, 2, 3)) == MemoryLimit((0.0,) * 4)


def test_control_groups_limit_what_is_free(tmp_path: Path) -> None:
    for name, most, used in (("a/b", "max", "10"), ("a", "1000", "300"), ("memory/c", "500", "600")):
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
        old = name.startswith("memory")
        (tmp_path / name / ("memory.limit_in_bytes" if old else "memory.max")).write_text(most + "\n")
        (tmp_path / name / ("memory.usage_in_bytes" if old else "memory.current")).write_text(used + "\n")
    assert left_in_groups("0::/a/b\n", tmp_path) == [700]
    assert left_in_groups("4:cpu,memory:/c\n9:pids:/c\n", tmp_path) == [0]
    assert left_in_groups("0::/elsewhere\n", tmp_path) == []
    assert 0 < free_on(torch.device("cpu")) < 1 << 50


def test_an_event_goes_through_its_record() -> None:
    event = ControlEvent(EventKind.SWITCHED, 1, 5, 2, "why", 1.0, None, (4, 2), (3 << 20, 1 << 20))
    assert str(event) == "step 5: switched plan 2: why; at most 4 microbatches in flight, 3.0 MiB on a rank"
    assert json.loads(json.dumps(event.to_json()))["memory"] == [3 << 20, 1 << 20]
