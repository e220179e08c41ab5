"""Training in a pipeline is bitwise training in one process: every model, every plan, before, during and after a switch.

Here ranks are threads; test_training_processes.py has them as processes over gloo.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import EXAMPLES, Batch, Example, TiedBlocks, begin_blocks, square_loss, tied_blocks, vectors
from strategies import programs
from torch import Tensor, nn
from training import MIXED, Step, adam, call, compiled, differences, loss_of, microbatches_of, run_step, train, train_alone

import adaptra
from adaptra.errors import BatchError, PipelineError, ScheduleError, StateError
from adaptra.graph.ops.random_state import RandomKey, reference_randomness
from adaptra.planning.planner import plan
from adaptra.program import Op, Program
from adaptra.program.schedules import gpipe, one_f_one_b
from adaptra.runtime.control.plans.events import ControlEvent, EventKind
from adaptra.runtime.control.plans.plan import Plan
from adaptra.simulation.case import Case
from adaptra.simulation.cost import CostModel

STAGES = 4
ROWS = 24

pytestmark = pytest.mark.usefixtures("one_thread")


CASES = [
    *((name, stages, torch.float32) for name in EXAMPLES for stages in (2, 4)),
    *((name, 4, torch.bfloat16) for name in EXAMPLES),
]


@pytest.mark.parametrize(("name", "stages", "dtype"), CASES, ids=lambda value: str(value).removeprefix("torch."))
def test_a_pipeline_trains_bitwise_as_one_process(name: str, stages: int, dtype: torch.dtype) -> None:
    """Losses, gradients, parameters and buffers of every step."""
    example = EXAMPLES[name]
    batches = [example.rows(8, seed, dtype) for seed in range(3)]
    expected = train_alone(example, batches, 4, dtype=dtype)
    with compiled(example, batches[0], stages=stages, microbatches=4, dtype=dtype) as pipe:
        assert differences(train(pipe, batches), expected) == []


def test_gradients_add_up_over_steps_until_they_are_zeroed() -> None:
    """As autograd's do; a tied parameter's too, whose sum is taken on one stage and copied to the others."""
    batches = [MIXED.rows(12, seed) for seed in range(3)]
    model = MIXED.make()
    for step, batch in enumerate(batches):
        for k, part in enumerate(microbatches_of(batch, 3)):
            with reference_randomness(RandomKey(0, step, k)):
                loss = loss_of(MIXED, model, part)
            (loss / 3).backward()
    expected = dict(model.named_parameters())
    with compiled(MIXED, batches[0], stages=STAGES, microbatches=3) as pipe:
        for batch in batches:
            pipe.step(*call(batch)[0])
        for name, parameter in pipe.named_parameters():
            alone = expected[name].grad
            assert parameter.grad is not None and alone is not None and torch.equal(parameter.grad, alone), name


# Rule 1: plans never change numbers.


@cache
def batches_of_mixed() -> list[Batch]:
    return [MIXED.rows(ROWS, seed) for seed in range(2)]


@cache
def mixed_alone(microbatches: int) -> list[Step]:
    return train_alone(MIXED, batches_of_mixed(), microbatches)


def slow_case(microbatches: int, stages: int = STAGES) -> Case:
    """A link that is slow in one direction, and a slow stage."""
    cost = CostModel.uniform(stages, 1.0, 1.2, 0.8, latency=0.1).with_latency(1, 2, 5.0)
    cost = replace(cost, forward=(1.0, 1.0, 2.5, 1.0)[:stages])
    return Case(cost, microbatches, tuple(range(stages)))


def schedule_of(name: str, microbatches: int) -> str | Program:
    match name:
        case "gpipe, fused":
            return gpipe(STAGES, microbatches, split=False)
        case "1f1b, fused":
            return one_f_one_b(STAGES, microbatches, split=False)
        case "adapted":
            return plan(slow_case(microbatches))
        case "adapted, little memory":
            return plan(slow_case(microbatches), in_flight=2)
        case _:
            return name


SCHEDULES = ["gpipe", "gpipe, fused", "1f1b", "1f1b, fused", "zb_h1", "zb_h2", "adapted", "adapted, little memory"]


@pytest.mark.parametrize(
    ("schedule", "microbatches"),
    [*((schedule, 8) for schedule in SCHEDULES), *((schedule, 3) for schedule in SCHEDULES[2:7]), ("1f1b", 1), ("adapted", 1)],
)
def test_every_plan_gives_the_same_numbers(schedule: str, microbatches: int) -> None:
    """Also with fewer microbatches than stages."""
    options = adaptra.Options(schedule=schedule_of(schedule, microbatches))
    batches = batches_of_mixed()
    with compiled(MIXED, batches[0], stages=STAGES, microbatches=microbatches, options=options) as pipe:
        assert differences(train(pipe, batches), mixed_alone(microbatches)) == []


@settings(max_examples=8)
@given(programs(placed=st.sampled_from([(0, 1, 2)]), lowered=False).filter(lambda program: ROWS % program.microbatches == 0))
def test_any_valid_program_gives_the_same_numbers(program: Program) -> None:
    batches = batches_of_mixed()
    with compiled(
        MIXED,
        batches[0],
        stages=3,
        microbatches=program.microbatches,
        options=adaptra.Options(schedule=program, adapt=False),
    ) as pipe:
        assert differences(train(pipe, batches), mixed_alone(program.microbatches)) == []


def test_a_program_that_could_change_numbers_is_refused() -> None:
    """Accumulation in microbatch order is what makes numbers independent of the plan."""
    given = one_f_one_b(2, 3)
    first, *others = given.orders
    swapped = tuple(Op(op.stage, op.kind, {0: 1, 1: 0}.get(op.microbatch, op.microbatch)) for op in first)
    program = Program.of_pipeline("swapped", given.placement, given.microbatches, (swapped, *others))
    with (
        pytest.raises(ScheduleError, match="order"),
        compiled(MIXED, MIXED.rows(6, 0), stages=2, microbatches=3, options=adaptra.Options(schedule=program)),
    ):
        pass


def is_for_the_slow_edge(plan: Plan) -> bool:
    return "edge 1→2 slow" in plan.reason or "edge 2→1 slow" in plan.reason


@pytest.mark.timed
def test_a_switch_of_plans_changes_no_number_and_comes_at_one_step_on_all_ranks() -> None:
    """A link turns slow; the controller measures it, plans and switches by itself. Rules 1 and 4.

    Evaluations in between change nothing.
    """
    events: list[ControlEvent] = []
    options = adaptra.Options(
        schedule="1f1b",
        faults=["delay 1-2 30ms @6"],
        emulate=adaptra.EmulatedDevice(0.003, 0.003, 0.003),
        on_event=events.append,
    )
    first = MIXED.rows(ROWS, 0)
    steps: list[Step] = []
    plans: list[Plan] = []
    with compiled(MIXED, first, stages=STAGES, microbatches=8, options=options) as pipe:
        optimizer = adam(pipe.parameters())
        while sum(map(is_for_the_slow_edge, plans)) < 3:
            if len(steps) == 60:  # on a busy machine a plan from before may bear the delay already
                assert plans[-1].version > 0, f"no switch within {len(steps)} steps: {list(map(str, events))}"
                break
            steps.append(run_step(pipe, optimizer, MIXED.rows(ROWS, len(steps))))
            plans.append(pipe.plan)
            pipe.eval_step(*call(first)[0])
    versions = [plan.version for plan in plans]
    assert versions == sorted(versions) and versions[0] == 0
    switched = [event for event in events if event.kind is EventKind.SWITCHED]
    assert Counter((event.step, event.version) for event in switched) == {
        (versions.index(version), version): STAGES for version in versions if version > 0
    }
    assert {event.rank for event in switched} == set(range(STAGES))
    batches = [MIXED.rows(ROWS, seed) for seed in range(len(steps))]
    assert differences(steps, train_alone(MIXED, batches, 8)) == []


# Right where torch.distributed.pipelining 2.13 is silently wrong or dies.


def test_tied_weights_are_not_trained_apart() -> None:
    """All copies stay bitwise equal, to each other and to the one weight of the plain model."""
    example = EXAMPLES["gpt_tied"]
    batches = [example.rows(8, seed) for seed in range(4)]
    expected = train_alone(example, batches, 4)
    with compiled(example, batches[0], stages=STAGES, microbatches=4) as pipe:
        copies = [parameter for name, parameter in pipe.named_parameters() if name == "tokens.weight"]
        assert len(copies) == 2 and copies[0] is not copies[1]
        steps = train(pipe, batches)
        assert differences(steps, expected) == []
        assert all(torch.equal(copy, expected[-1].state["head.weight"]) for copy in copies)
        assert not torch.equal(copies[0], example.make().state_dict()["tokens.weight"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_a_tied_weight_used_several_times_on_each_stage_trains_bitwise(stages: int, dtype: torch.dtype) -> None:
    example = tied_blocks(stages, 14)
    batches = [example.rows(8, seed, dtype) for seed in range(3)]
    expected = train_alone(example, batches, 4, dtype=dtype)
    with compiled(example, batches[0], stages=stages, microbatches=4, dtype=dtype, split=begin_blocks(stages)) as pipe:
        assert differences(train(pipe, batches), expected) == []


@pytest.mark.parametrize("last", ["layer", "without gradient"])
def test_a_stage_whose_uses_of_a_tied_weight_have_no_gradient_trains_bitwise(last: str) -> None:
    """Its copy takes the steps that the others take, or none if there is no gradient at all; the owner may be such a stage."""
    uses = [["without gradient"], ["without gradient", last], ["without gradient"], [last, last]]
    example = Example("tied_blocks", lambda: TiedBlocks(uses), vectors(8), square_loss)
    batches = [example.rows(8, seed) for seed in range(3)]
    with compiled(example, batches[0], stages=4, microbatches=4, split=begin_blocks(4)) as pipe:
        assert differences(train(pipe, batches), train_alone(example, batches, 4)) == []


def test_dropout_is_off_in_evaluation() -> None:
    example = EXAMPLES["gpt_dropout"]
    batch = example.rows(8, 0)
    args, _ = call(batch)
    plain = example.make().eval()
    parts = microbatches_of(batch, 4)
    with torch.no_grad():
        expected = torch.stack([loss_of(example, plain, part) for part in parts])
    with compiled(example, batch, stages=STAGES, microbatches=4) as pipe:
        assert torch.equal(pipe.eval_step(*args), expected.mean())
        assert torch.equal(pipe.eval_step(*args), expected.mean())
        assert not torch.equal(pipe.step(*args), expected.mean())


@pytest.mark.parametrize(("changed", "name"), [({"times": 3}, "times"), ({"double": True}, "double")])
def test_a_changed_integer_or_boolean_argument_is_not_ignored(changed: dict[str, int], name: str) -> None:
    """The graph has the first value built in; another one is refused, and the next step runs as if nothing had been."""
    example = EXAMPLES["options"]
    (x, times), kwargs, _ = batch = example.rows(8, 0)
    expected = train_alone(example, [batch], 4)
    with compiled(example, batch, stages=STAGES, microbatches=4) as pipe:
        with pytest.raises(BatchError, match=rf"inputs: {name} is {changed[name]}, but .* compiled with {name}="):
            given: dict[str, Any] = {**kwargs, **{k: v for k, v in changed.items() if k != "times"}}
            pipe.step((x, changed.get("times", times)), **given)
        assert differences(train(pipe, [batch]), expected) == []


def test_inputs_and_targets_of_different_rows_are_not_accepted() -> None:
    """Neither in training nor in evaluation; a smaller last batch of both is another shape."""
    example = EXAMPLES["skip_mlp"]
    batch = example.rows(8, 0)
    (x,), _, targets = batch
    with compiled(example, batch, stages=STAGES, microbatches=4) as pipe:
        for run in (pipe.step, pipe.eval_step):
            for inputs, wanted in ((x[:4], targets), (x, targets[:4])):
                with pytest.raises(BatchError, match="rows"):
                    run(inputs, wanted)
        assert differences(train(pipe, [batch]), train_alone(example, [batch], 4)) == []


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h2"])
def test_losses_are_in_microbatch_order(schedule: str) -> None:
    """Each microbatch has a loss that only it can have."""
    example = Example(
        "sum", lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), vectors(4), lambda out, t: out.mean() * 0 + t.mean()
    )
    x, targets = torch.ones(12, 4), torch.arange(6.0).repeat_interleave(2)
    with compiled(example, ((x,), {}, targets), stages=2, microbatches=6, options=adaptra.Options(schedule=schedule)) as pipe:
        assert pipe.step(x, targets).item() == 2.5
        assert pipe.microbatch_losses.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_a_stage_behind_a_frozen_one_gets_its_gradients(schedule: str) -> None:
    example = EXAMPLES["frozen_upstream"]
    batches = [example.rows(8, seed) for seed in range(2)]
    with compiled(
        example,
        batches[0],
        stages=STAGES,
        microbatches=4,
        split=["layers.2", "layers.4", "layers.6"],
        options=adaptra.Options(schedule=schedule),
    ) as pipe:
        steps = train(pipe, batches)
    assert differences(steps, train_alone(example, batches, 4)) == []
    found = {name for name, gradient in steps[0].gradients if gradient is not None}
    assert found == {"layers.4.weight", "layers.4.bias", "layers.6.weight", "layers.6.bias"}


def test_a_stage_may_end_in_a_view() -> None:
    example = EXAMPLES["views"]
    batches = [example.rows(8, seed) for seed in range(2)]
    split = ["layers.1", "layers.2", "layers.3"]
    with compiled(example, batches[0], stages=STAGES, microbatches=4, split=split) as pipe:
        assert differences(train(pipe, batches), train_alone(example, batches, 4)) == []


def test_an_exception_on_one_rank_ends_the_step_on_all() -> None:
    """The last stage's loss fails while the other ranks wait for its gradients."""
    example = EXAMPLES["gpt"]
    batch = example.rows(8, 0)
    (inputs, targets), _ = call(batch)
    with compiled(example, batch, stages=STAGES, microbatches=4) as pipe:
        pipe.step(inputs, targets)
        wrong = targets.clone()
        wrong[5, 3] = 1000
        begun = time.monotonic()
        with pytest.raises(IndexError, match="1000 is out of bounds") as caught:
            pipe.step(inputs, wrong)
        assert time.monotonic() - begun < 100, "a rank waited for its op's own limit"
        assert caught.value.__notes__ == ["in step 1: rank 3 at 3F2"]
        with pytest.raises(PipelineError, match=r"this pipeline has failed .* IndexError"):
            pipe.step(inputs, targets)


# Checkpoints.


def test_a_checkpoint_has_the_plain_models_names_and_loads_into_it() -> None:
    """Every alias of a tied parameter too."""
    example = EXAMPLES["gpt_tied"]
    batches = [example.rows(8, seed) for seed in range(2)]
    plain = example.make(seed=1)
    with compiled(example, batches[0], stages=STAGES, microbatches=4) as pipe:
        assert list(pipe.state_dict().keys() ^ plain.state_dict().keys()) == []
        trained = train(pipe, batches[:1])[-1]
        plain.load_state_dict(pipe.state_dict())
    assert all(torch.equal(value, trained.state[name]) for name, value in plain.state_dict().items())


@pytest.mark.parametrize("name", ["gpt_tied", "resnet", "inplace"])
def test_training_goes_on_from_the_plain_models_checkpoint(name: str) -> None:
    """Parameters, all copies of tied ones, and buffers, those with no dimension too."""
    example = EXAMPLES[name]
    batches = [example.rows(8, seed) for seed in range(2)]
    other = example.make(seed=1)
    train_alone(example, [example.rows(8, 7)], 4, model=other)
    saved = {key: value.clone() for key, value in other.state_dict().items()}
    expected = train_alone(example, batches, 4, model=other)
    with compiled(example, batches[0], stages=STAGES, microbatches=4) as pipe:
        pipe.load_state_dict(saved)
        assert differences(train(pipe, batches), expected) == []


def test_a_checkpoint_that_does_not_fit_changes_nothing() -> None:
    example = EXAMPLES["resnet"]
    batch = example.rows(8, 0)
    with compiled(example, batch, stages=STAGES, microbatches=4) as pipe:
        before = {name: value.clone() for name, value in pipe.state_dict().items()}
        good = {name: torch.randn_like(value) if value.is_floating_point() else value for name, value in before.items()}
        cases: list[tuple[dict[str, Any], str]] = [
            (good | {"head.biased": torch.zeros(10)}, r"unknown \['head.biased'\]"),
            ({name: value for name, value in good.items() if name != "head.bias"}, r"missing \['head.bias'\], unknown nothing"),
            (good | {"head.bias": torch.zeros(1)}, r"head.bias has shape \[1\]: expected \[10\]"),
            (good | {"head.bias": [0.0] * 10}, "head.bias has shape none: it is a list"),
        ]
        for state, message in cases:
            with pytest.raises(StateError, match=message):
                pipe.load_state_dict(state)
            after = pipe.state_dict()
            assert all(torch.equal(value, after[name]) for name, value in before.items())
        pipe.load_state_dict({"head.bias": torch.ones(10), "unknown": torch.zeros(1)}, strict=False)
        assert pipe.state_dict()["head.bias"].tolist() == [1.0] * 10
        assert torch.equal(pipe.state_dict()["head.weight"], before["head.weight"])


# Evaluation.


@pytest.mark.parametrize(
    "name", ["gpt_dropout", "gpt_tied", "skip_mlp", "resnet", "options", "frozen_upstream", "views", "noise"]
)
def test_evaluation_is_bitwise_the_plain_models_and_leaves_no_trace(name: str) -> None:
    """Outputs and loss; buffers are unchanged, and training goes on as if there had been no evaluation."""
    example = EXAMPLES[name]
    batches = [example.rows(8, seed) for seed in range(3)]
    with compiled(example, batches[0], stages=3, microbatches=4) as pipe:
        optimizer = adam(pipe.parameters())
        steps: list[Step] = []
        for batch in batches:
            steps.append(run_step(pipe, optimizer, batch))
            before = steps[-1].state
            plain = example.make().eval()
            plain.load_state_dict(before)
            losses, outputs = evaluate_alone(example, plain, batch)
            given, named = call(batch)
            assert torch.equal(pipe.eval_step(*given, **named), losses.mean())
            if example.loss is not None:
                assert torch.equal(pipe.eval_step(given[0], **named), torch.cat(outputs))
            after = pipe.state_dict()
            assert all(torch.equal(value, after[key]) for key, value in before.items())
            assert all(parameter.grad is None for parameter in pipe.parameters())
    assert differences(steps, train_alone(example, batches, 4)) == []


def evaluate_alone(example: Example, model: nn.Module, batch: Batch) -> tuple[Tensor, list[Any]]:
    """The losses and the outputs of the microbatches, in plain torch."""
    with torch.no_grad():
        parts = microbatches_of(batch, 4)
        outputs = [model(*args, **kwargs) for args, kwargs, _ in parts]
        losses = [
            out["loss"] if example.loss is None else example.loss(out, part[2])
            for out, part in zip(outputs, parts, strict=True)
        ]
    return torch.stack(losses), outputs


def test_a_buffer_that_the_model_changes_in_evaluation_too_changes_as_in_plain_torch() -> None:
    example = EXAMPLES["inplace"]
    batch = example.rows(8, 0)
    plain = example.make().eval()
    losses, _ = evaluate_alone(example, plain, batch)
    with compiled(example, batch, stages=2, microbatches=4) as pipe:
        assert torch.equal(pipe.eval_step(*call(batch)[0]), losses.mean())
        assert pipe.state_dict()["calls"].item() == plain.state_dict()["calls"].item() == 4.0


def test_the_seed_decides_the_random_numbers() -> None:
    batch = MIXED.rows(ROWS, 0)
    losses: list[Tensor] = []
    for seed in (0, 1):
        with compiled(MIXED, batch, stages=2, microbatches=4, options=adaptra.Options(seed=seed)) as pipe:
            assert differences(train(pipe, [batch]), train_alone(MIXED, [batch], 4, seed=seed)) == []
            losses.append(pipe.microbatch_losses)
    assert not torch.equal(*losses)
