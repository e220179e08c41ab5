"""The limit of microbatches in flight was called memory, which still works with a warning."""

from __future__ import annotations

from typing import Any

import pytest

from adaptra.passes.adapt_order import AdaptOrder
from adaptra.planning.explaining.comparison import compare, sweep_delay
from adaptra.planning.planner import plan
from adaptra.planning.published import paper_rule, uniform_slack
from adaptra.planning.robust import robust_plan
from adaptra.simulation.cost import Case, CostModel

COST = CostModel.uniform(3, 1.0, 1.0, 1.0)
CASE = Case(COST, 6, (0, 1, 2))


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (plan, (CASE,)),
        (paper_rule, (CASE,)),
        (uniform_slack, (CASE,)),
        (compare, (CASE, ["paper", "adapted"])),
        (AdaptOrder, ()),
    ],
)
def test_the_former_keyword_gives_the_same_and_names_the_present_one(function: Any, arguments: tuple[Any, ...]) -> None:
    with pytest.warns(DeprecationWarning, match=rf"{function.__name__}\(memory=…\) is now in_flight=…") as warned:
        found = function(*arguments, memory=2)
    assert found == function(*arguments, in_flight=2) != function(*arguments, in_flight=1)
    assert warned[0].filename == __file__


@pytest.mark.parametrize("function", [plan, sweep_delay, robust_plan, AdaptOrder])
def test_both_keywords_are_refused(function: Any) -> None:
    with pytest.raises(TypeError, match="got both 'in_flight' and 'memory', its former name"):
        function(memory=2, in_flight=2)
