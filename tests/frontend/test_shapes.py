"""Batches of other sizes than the example: bitwise equal to one process, compiled once, and the oldest forgotten."""

from __future__ import annotations

import copy
import logging
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from shaped import CLASSES, LOSSES, MICROBATCHES, batch, gradients, make, mean, summed, weighted
from torch import Tensor, nn

import adaptra
from adaptra.errors import PlanError
from adaptra.frontend.shapes.kept import most_shapes
from adaptra.program.schedules import generate
from adaptra.runtime.control.plans.events import EventKind


def compiled(reduction: str = "mean", **how: Any) -> adaptra.Pipeline:
    return adaptra.compile(
        how.pop("model", None) or make(),
        stages=how.pop("stages", 3),
        microbatches=MICROBATCHES,
        example_inputs=batch(8, 6),
        loss=LOSSES[reduction],
        reduction=reduction,
        options=adaptra.Options(**how),
    )


def alone(model: nn.Module, tokens: Tensor, labels: Tensor, reduction: str) -> Tensor:
    """One process, microbatch by microbatch: the rows are split by tensor_split, and a mean is weighted by rows."""
    rows, parts = len(tokens), min(len(tokens), MICROBATCHES)
    losses: list[Tensor] = []
    for x, y in zip(tokens.tensor_split(parts), labels.tensor_split(parts), strict=True):
        loss = mean(model(x), y) if reduction == "mean" else summed(model(x), y)
        if reduction == "mean":
            loss = loss / parts if rows % parts == 0 else loss * (len(x) / rows)
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses).sum()


SHAPES = [(8, 6), (8, 9), (10, 6), (3, 6), (7, 5), (1, 4), (8, 9), (8, 6)]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_every_shape_trains_bitwise_as_one_process(reduction: str) -> None:
    plain = make()
    ours, theirs = [], []
    with compiled(reduction) as pipe:
        here, there = (torch.optim.SGD(one.parameters(), lr=0.05) for one in (pipe, plain))
        for number, (rows, length) in enumerate(SHAPES):
            given = batch(rows, length, number)
            ours.append(pipe.step(*given))
            theirs.append(alone(plain, *given, reduction))
            expected = gradients(plain)
            assert all(torch.equal(one, expected[name]) for name, one in gradients(pipe).items()), (rows, length)
            for optimizer in (here, there):
                optimizer.step()
                optimizer.zero_grad()
    assert torch.allclose(torch.stack(ours), torch.stack(theirs), rtol=1e-6, atol=0)


def test_the_loss_of_uneven_rows_is_that_of_the_batch() -> None:
    given = batch(10, 6)
    with compiled() as pipe:
        loss = pipe.step(*given)
        parts = [mean(make()(x), y) for x, y in zip(*(one.tensor_split(MICROBATCHES) for one in given), strict=True)]
        rows = [3, 3, 2, 2]
        assert torch.equal(loss, torch.stack([one * (size / 10) for one, size in zip(parts, rows, strict=True)]).sum())
        assert torch.equal(pipe.microbatch_losses, torch.stack(parts))
        assert torch.allclose(loss, mean(make()(given[0]), given[1]), rtol=1e-6, atol=0)


def test_weights_count_rows_that_do_not_divide() -> None:
    given = batch(7, 5)
    with compiled("weighted") as pipe:
        loss = pipe.step(*given)
        plain = make()
        total, weight = weighted(plain(given[0]), given[1])
        (total / weight).backward()
        assert torch.allclose(loss, total / weight, rtol=1e-6, atol=0)
        expected = gradients(plain)
        assert all(torch.allclose(one, expected[name], rtol=1e-4, atol=1e-6) for name, one in gradients(pipe).items())


def test_evaluations_take_any_shape_with_and_without_targets() -> None:
    with compiled() as pipe:
        for rows, length in [(8, 6), (5, 7), (2, 3), (8, 9), (5, 7)]:
            tokens, labels = batch(rows, length)
            parts = tokens.tensor_split(min(rows, MICROBATCHES))
            model = make().eval()
            outputs = torch.cat([model(one) for one in parts])
            assert torch.equal(pipe.eval_step(tokens), outputs)
            assert torch.allclose(pipe.eval_step(tokens, labels), mean(outputs, labels), rtol=1e-6, atol=0)


def test_each_shape_is_compiled_once_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    order = [(rows, length) for rows in (8, 6) for length in (4, 5, 6)] * 3
    random.Random(0).shuffle(order)
    with caplog.at_level(logging.INFO, "adaptra"), compiled() as pipe:
        for rows, length in order:
            pipe.step(*batch(rows, length))
        first, *others = pipe.shapes
    told = [one.getMessage() for one in caplog.records if "compiled plan 0: batches of" in one.getMessage()]
    assert len(told) == 5, "every shape but that of the example"
    assert first.rows == (2, 2, 2, 2)
    assert (first.seconds, first.steps) == (0.0, 3)
    assert {one.rows for one in others} == {(2, 2, 2, 2), (2, 2, 1, 1)}
    assert all(one.steps == 3 and one.seconds > 0 for one in others)
    assert "tokens [6, 4], targets [6, 4]" in {one.name for one in others}


def test_the_least_recently_used_shape_is_forgotten_and_compiled_again() -> None:
    with compiled(shapes=2) as pipe:
        losses = {length: pipe.step(*batch(8, length)) for length in (4, 5)}
        pipe.step(*batch(8, 4))
        pipe.step(*batch(8, 7))
        assert [one.name for one in pipe.shapes[1:]] == ["tokens [8, 4], targets [8, 4]", "tokens [8, 7], targets [8, 7]"]
        assert torch.equal(pipe.step(*batch(8, 5)), losses[5])
        assert torch.equal(pipe.step(*batch(8, 6)), mean_of_parts(8, 6)), "the first one always stays"
        compilations = [one for one in pipe.events if one.kind is EventKind.COMPILED]
        assert [one.step for one in compilations] == [0, 0, 2, 3], "each names the last step before it"
        assert all(one.text.startswith("batches of tokens [8,") and one.text.endswith(" s") for one in compilations)
        forgotten = [one.text for one in pipe.events if one.kind is EventKind.FORGOTTEN]
        assert forgotten[0] == "batches of tokens [8, 5], targets [8, 5]: 2 shapes are kept"
        assert len(forgotten) == 2


def test_more_shapes_than_are_kept_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """Every step compiles, as two are kept of four that take turns."""
    with caplog.at_level(logging.WARNING, "adaptra"), compiled(shapes=2, stages=1) as pipe:
        counts = []
        for length in (4, 5, 6, 7, 8, 4, 5):
            pipe.step(*batch(8, length))
            counts.append(sum("shapes of batches were compiled" in one.getMessage() for one in caplog.records))
    assert counts == [0, 0, 0, 1, 1, 1, 1], "that of the example is none of them"
    (text,) = [one.getMessage() for one in caplog.records if "shapes of batches were compiled" in one.getMessage()]
    assert text.startswith("3 shapes of batches were compiled, in ") and "; 2 are kept, and" in text
    assert all(one in text for one in ("pad_to_multiple_of=", "group rows by length", "Options(shapes=...)"))


def test_as_many_shapes_are_kept_as_memory_allows() -> None:
    with compiled(stages=1) as pipe:
        stages = pipe.session.compiled
        assert most_shapes(None, stages) == 128
        assert most_shapes(3, stages) == 3
        assert stages.captured is not None
        nodes = stages.captured.analysis.nodes
        large = replace(stages, captured=replace(stages.captured, analysis=replace(stages.captured.analysis, nodes=nodes * 20)))
        assert 16 < most_shapes(None, large) < 128


def mean_of_parts(rows: int, length: int) -> Tensor:
    parts = zip(*(one.chunk(MICROBATCHES) for one in batch(rows, length)), strict=True)
    return torch.stack([mean(make()(x), y) for x, y in parts]).mean()


class Dropping(nn.Module):
    """Has dropout between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, 8)
        self.drop = nn.Dropout(0.5)
        self.output = nn.Linear(8, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.output(self.drop(self.embedding(tokens)))


@pytest.mark.parametrize("stages", [1, 2])
def test_random_numbers_do_not_depend_on_the_shapes_before(stages: int) -> None:
    torch.manual_seed(0)
    model = Dropping()
    with (
        compiled(model=copy.deepcopy(model), stages=stages) as one,
        compiled(model=copy.deepcopy(model), stages=3 - stages) as other,
    ):
        for pipe in (one, other):
            pipe.step(*batch(6, 4))
        other.eval_step(*batch(5, 3))
        assert torch.equal(one.step(*batch(7, 5)), other.step(*batch(7, 5)))


def test_a_cut_that_moves_compiles_shapes_again_for_the_new_stages() -> None:
    with compiled(stages=2) as pipe:
        before = pipe.step(*batch(5, 7))
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.0)
        pipe.take_split(["layers.1"], optimizer)
        assert torch.equal(pipe.step(*batch(5, 7)), before)


def test_a_new_plan_runs_all_shapes_and_steps_of_others_are_not_detected_as_slow() -> None:
    """Batches 40 times as long alternate with short ones, and another plan comes in between."""
    lengths = [(8, 6), (8, 240), (7, 6)]
    with compiled(stages=2) as pipe, compiled(stages=2, adapt=False) as still:
        for number in range(60):
            rows, length = lengths[number % 3]
            if number == 20:
                for worker in pipe.session.workers:
                    worker.controller.suggest(generate("gpipe", 2, MICROBATCHES), "a test")
            assert torch.equal(pipe.step(*batch(rows, length, number)), still.step(*batch(rows, length, number))), number
            expected = gradients(still)
            assert all(torch.equal(one, expected[name]) for name, one in gradients(pipe).items()), number
        assert pipe.plan.version > 0
        assert not [one for one in pipe.events if one.kind is EventKind.DETECTED and "slower" in one.text]
        timeline = pipe.timeline()
        assert timeline is not None and timeline.program.microbatches == MICROBATCHES


@pytest.mark.timed
def test_a_slow_link_is_found_where_no_batch_has_the_shape_of_the_example() -> None:
    device, first_slow = adaptra.EmulatedDevice(0.004, 0.004, 0.004), 8
    with compiled(stages=2, emulate=device, faults=[f"delay 0-1 60ms @{first_slow}"]) as pipe:
        for _ in range(first_slow + 6):
            pipe.step(*batch(8, 7))
        calibration, *found = [one for one in pipe.events if one.kind is EventKind.DETECTED]
        assert "calibrated" in calibration.text
        assert [one for one in found if one.step >= first_slow and "edge 0→1 slow" in one.text], [*map(str, pipe.events)]


def test_fewer_rows_than_microbatches_have_a_program_and_a_timeline_of_their_own() -> None:
    with compiled(stages=2) as pipe:
        pipe.step(*batch(3, 6))
        timeline = pipe.timeline()
        assert timeline is not None and timeline.program.microbatches == 3
        assert pipe.microbatch_losses.shape == (3,)


def test_a_shape_that_does_not_fit_the_memory_is_refused_and_training_goes_on() -> None:
    model = make()
    with adaptra.compile(
        model, stages=2, microbatches=MICROBATCHES, example_inputs=batch(8, 6), loss=mean, memory="200 KiB"
    ) as pipe:
        before = pipe.step(*batch(8, 6))
        with pytest.raises(PlanError, match="for one microbatch"):
            pipe.step(*batch(8, 600))
        assert torch.equal(pipe.step(*batch(8, 6)), before)
        assert len(pipe.shapes) == 1
