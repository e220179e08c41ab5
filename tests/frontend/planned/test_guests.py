"""The first plan of a job with guests: others compute for them, or their process has memory for both."""

from __future__ import annotations

from typing import Any

import pytest
from chained import compile_example
from models import EXAMPLES

import adaptra
from adaptra.frontend.planned.stage_planning import PipelineSpec, PlannedPipeline
from adaptra.runtime.worker.stages.loss_reduction import Reduction
from adaptra.runtime.world.world import World
from adaptra.sizes import MemoryLimit

WORLD = World.of_fewer(5, 2, 3)
"""Worker 5 is a guest of process 1, so two workers there have the memory of one process."""


def planned(
    name: str, placed: tuple[int, ...] = (0, 1), memory: Any = None, world: World = WORLD, **options: Any
) -> PlannedPipeline:
    example = EXAMPLES[name]
    stages = compile_example(example, example.make(), example.rows(2, 0), len(placed))
    given: dict[str, Any] = {"replicas": 3, "guests": world.guests, "crowd": world.crowd}
    limit = None if memory is None else MemoryLimit.given(memory, 2)
    return PipelineSpec(placed, 4, limit, True, (), adaptra.Options(**options), Reduction.MEAN, **given).prepare(stages)


@pytest.mark.parametrize("adapt", [True, False])
@pytest.mark.parametrize("name", ["skip_mlp", "resnet", "gpt_tied"])
def test_other_replicas_compute_for_a_guest(name: str, adapt: bool) -> None:
    """Also where stages change buffers or share weights, and where nothing is planned later."""
    assert (WORLD.guests, WORLD.crowd) == (frozenset({5}), (1, 2))
    plan = planned(name, memory=3, adapt=adapt).initial
    assert [op.kind.name for op in plan.program.orders[5]] == ["REDUCE", "STEP"]
    assert plan.case.cost.memory_limit is not None and tuple(plan.case.cost.memory_limit) == (3, 3)


@pytest.mark.parametrize(
    ("name", "placed", "options", "limits"),
    [
        ("skip_mlp", (0, 1), {"share": False}, (12, 6)),
        ("skip_mlp", (0, 1), {"schedule": "gpipe"}, (12, 6)),
        ("gpt_tied", (0, 1, 1, 0), {"world": World.of_fewer(4, 2, 3)}, (6, 6)),
    ],
)
def test_a_guest_that_computes_shares_the_memory_of_its_process(
    name: str, placed: tuple[int, ...], options: dict[str, Any], limits: tuple[int, int]
) -> None:
    found = planned(name, placed, memory=12, **options)
    limit = found.initial.case.cost.memory_limit
    assert found.initial.program.is_one_pipeline and not found.factory.planning.guests
    assert limit is not None and tuple(limit) == limits
