"""The plans of about thirty named situations: letter by letter what they were, and as good as their page says."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import pytest
from golden_files import check_golden
from paths import DOCS
from situations import SITUATIONS, Situation, document

from adaptra.planning.exact import solve_exactly
from adaptra.program.schedules import generate
from adaptra.program.verify import verify
from adaptra.simulation.cost import Blocking
from adaptra.simulation.simulate import lower_bound, simulate


@pytest.mark.parametrize("situation", SITUATIONS, ids=lambda situation: situation.name)
def test_each_plan_is_what_it_was(situation: Situation, golden: Callable[[str, str], None]) -> None:
    golden(f"plan_{situation.name}.sched", str(situation.plan()))


@pytest.mark.parametrize("situation", SITUATIONS, ids=lambda situation: situation.name)
def test_each_plan_is_within_its_limits_and_close_to_the_bound(situation: Situation) -> None:
    case, program = situation.case, situation.plan()
    verify(program)
    run = simulate(program, case.cost)
    assert not run.over_memory
    assert max(run.peak_in_flight) <= (situation.in_flight or case.microbatches)
    if situation.in_flight is None:
        assert lower_bound(case).value * (1 - 1e-9) <= run.makespan <= lower_bound(case).value * 1.05
    if case.placement == tuple(range(case.cost.stages)):
        for name in ("gpipe", "1f1b", "zb_h1", "zb_h2"):
            known = simulate(generate(name, case.cost.stages, case.microbatches), case.cost)
            fits = not known.over_memory and max(known.peak_in_flight) <= (situation.in_flight or case.microbatches)
            assert not fits or run.makespan <= known.makespan


@pytest.mark.skipif(find_spec("ortools") is None, reason="needs OR-tools: pip install 'adaptra[exact]'")
@pytest.mark.parametrize(
    "situation", [s for s in SITUATIONS if s.case.cost.blocking is Blocking.NONE], ids=lambda situation: situation.name
)
def test_the_exact_solver_proves_that_no_plan_is_shorter(situation: Situation) -> None:
    found = solve_exactly(situation.case, in_flight=situation.in_flight, workers=1)
    assert found.proven
    assert simulate(situation.plan(), situation.case.cost).makespan == found.makespan


def test_names_are_unique_and_the_page_shows_them_all(request: pytest.FixtureRequest) -> None:
    assert len({situation.name for situation in SITUATIONS}) == len(SITUATIONS) >= 30
    check_golden("plans.md", document(), accept=bool(request.config.getoption("--accept-golden")), folder=DOCS)
