"""A user whose replicas compute nothing for each other can read why."""

from __future__ import annotations

from typing import Any

import pytest
from chained import compile_example
from models import EXAMPLES

import adaptra
from adaptra.frontend.planned.stage_planning import PipelineSpec, PlannedPipeline
from adaptra.runtime.worker.stages.loss_reduction import Reduction

V = (0, 1, 1, 0)


def planned(name: str, placed: tuple[int, ...] = (0, 1), spec: dict[str, Any] | None = None, **options: Any) -> PlannedPipeline:
    """The plan of a job of two replicas."""
    given: dict[str, Any] = {"replicas": 2, **(spec or {})}
    example = EXAMPLES[name]
    stages = compile_example(example, example.make(), example.rows(2, 0), len(placed))
    return PipelineSpec(placed, 4, None, True, (), adaptra.Options(**options), Reduction.MEAN, **given).prepare(stages)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"share": False}, "Options(share=False)"),
        ({"adapt": False}, "Options(adapt=False)"),
        ({"lossy_bf16": "slow"}, "under Options(lossy_bf16='slow') each replica plans which messages round"),
        ({"spec": {"in_order": True}}, "a transport has one queue for all messages between two ranks, as NCCL has"),
        (
            {"lossy_bf16": True, "placed": V},
            "under Options(lossy_bf16=True) stages of one rank send each other exact values, and routes would round them",
        ),
    ],
)
def test_a_job_that_does_not_share_says_why(given: dict[str, Any], why: str) -> None:
    found = planned("skip_mlp", **given)
    assert found.alone == (f"no replica computes microbatches of another one's slow worker: {why}",)
    assert found.factory.planning.replicas == 1


@pytest.mark.parametrize(
    ("name", "placed", "options", "changing", "at_home"),
    [
        ("skip_mlp", (0, 1), {}, set(), set()),
        ("skip_mlp", (0, 1), {"delegate": True}, set(), set()),
        ("skip_mlp", (0, 1), {"lossy_bf16": True}, set(), set()),
        ("resnet", (0, 1), {}, {0, 1}, set()),
        ("resnet", V, {}, {0, 1, 2, 3}, set()),
        ("gpt_tied", (0, 1), {}, set(), set()),
        ("gpt_tied", V, {}, set(), {0, 3}),
    ],
)
def test_a_job_that_shares_says_which_stages_do_not(
    name: str, placed: tuple[int, ...], options: dict[str, Any], changing: set[int], at_home: set[int]
) -> None:
    found = planned(name, placed, **options)
    planning = found.factory.planning
    assert planning.replicas == 2
    assert (planning.changing, planning.at_home) == (changing, at_home)
    assert len(found.alone) == len(at_home)
    for stage, line in zip(sorted(at_home), found.alone, strict=True):
        assert line.startswith(f"no replica computes another one's microbatches on stage {stage}, which shares ")
        assert line.endswith("with another stage, and its rank has several stages")


def test_a_pipeline_alone_says_nothing() -> None:
    assert planned("skip_mlp", spec={"replicas": 1}).alone == ()
    assert planned("skip_mlp", spec={"replicas": 1}, share=False).alone == ()
