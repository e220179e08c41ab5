"""Checkpoints of a whole run: one number of stages saves, another goes on, bitwise as if nothing had happened."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as checkpoints
from errors_table import check_documented
from models import EXAMPLES
from processes import run_processes
from torch import nn
from training import MIXED, Optimizer, adam, compiled, differences, run_step, train, train_alone

import adaptra
from adaptra.errors import StateError

EXAMPLE = EXAMPLES["gpt_tied"]
ROWS, MICROBATCHES = 8, 4
BATCHES = [EXAMPLE.rows(ROWS, seed) for seed in range(4)]
FOREIGN = "optimizer: … of its parameters are not this pipeline's: expected an optimizer over pipe.parameters()"

NO_STEP = (
    "training state: its step is …: expected the number of steps that TrainingState.state_dict() has saved, by which dropout "
    "goes on"
)


def halving(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Its learning rate, which a scheduler halves after every step, is part of what goes on."""
    optimizer = adam(parameters)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    optimizer.register_step_post_hook(lambda *_: scheduler.step())
    return optimizer


MIXED_BATCHES = [MIXED.rows(ROWS, seed) for seed in range(4)]
"""With dropout, which must not begin anew, and statistics."""


def begin(rank: int, stages: int, folder: str) -> list[str]:
    """Train two steps and save."""
    torch.distributed.init_process_group("gloo")
    with compiled(MIXED, MIXED_BATCHES[0], stages=stages, microbatches=MICROBATCHES) as pipe:
        optimizer = adam(pipe.parameters())
        steps = [run_step(pipe, optimizer, batch) for batch in MIXED_BATCHES[:2]]
        checkpoints.save({"training": adaptra.TrainingState(pipe, optimizer)}, checkpoint_id=folder)
    return differences(steps, train_alone(MIXED, MIXED_BATCHES, MICROBATCHES)[:2], whole=False)


def refused_everywhere(training: adaptra.TrainingState, pipe: adaptra.Pipeline, rank: int) -> None:
    """One rank's state lacks its groups: all ranks refuse theirs, and none has changed."""
    good = training.state_dict()
    other = {name: one + 1 for name, one in good["model"].items()}
    before = [one.clone() for _, one in pipe.held_tensors()]
    with pytest.raises(StateError):
        training.load_state_dict({**good, "model": other, **({"groups": []} if rank == 1 else {})})
    assert all(torch.equal(one, was) for (_, one), was in zip(pipe.held_tensors(), before, strict=True))


def go_on(rank: int, stages: int, folder: str) -> list[str]:
    """Load into other stages and train two more."""
    torch.distributed.init_process_group("gloo")
    with compiled(MIXED, MIXED_BATCHES[0], stages=stages, microbatches=MICROBATCHES, model=MIXED.make(seed=1)) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=1.0)
        refused_everywhere(adaptra.TrainingState(pipe, optimizer), pipe, rank)
        checkpoints.load({"training": adaptra.TrainingState(pipe, optimizer)}, checkpoint_id=folder)
        steps = [run_step(pipe, optimizer, batch) for batch in MIXED_BATCHES[2:]]
    return differences(steps, train_alone(MIXED, MIXED_BATCHES, MICROBATCHES)[2:], whole=False)


@pytest.mark.processes
def test_what_two_ranks_saved_three_go_on_with(tmp_path: Path) -> None:
    assert run_processes(begin, 2, 2, str(tmp_path / "saved")) == [[], []]
    assert run_processes(go_on, 3, 3, str(tmp_path / "saved")) == [[], [], []]


def test_dropout_goes_on_where_it_was_also_after_a_change_of_cuts_and_back_in_time(one_thread: None) -> None:
    expected = train_alone(MIXED, MIXED_BATCHES, MICROBATCHES)
    with compiled(MIXED, MIXED_BATCHES[0], stages=2, split=["middle.3"], microbatches=MICROBATCHES) as pipe:
        optimizer = adam(pipe.parameters())
        steps = [run_step(pipe, optimizer, batch) for batch in MIXED_BATCHES[:2]]
        saved = copy.deepcopy(adaptra.TrainingState(pipe, optimizer).state_dict())
        assert saved["step"] == 2
        steps += [run_step(pipe, optimizer, batch) for batch in MIXED_BATCHES[2:]]
        assert differences(steps, expected) == []
        adaptra.TrainingState(pipe, optimizer).load_state_dict(copy.deepcopy(saved))
        assert differences([run_step(pipe, optimizer, batch) for batch in MIXED_BATCHES[2:]], expected[2:]) == []
    with compiled(MIXED, MIXED_BATCHES[0], stages=3, microbatches=MICROBATCHES, model=MIXED.make(seed=1)) as pipe:
        optimizer = adam(pipe.parameters())
        adaptra.TrainingState(pipe, optimizer).load_state_dict(saved)
        first = run_step(pipe, optimizer, MIXED_BATCHES[2])
        pipe.take_split(["middle.2", "middle.4"], optimizer)
        assert differences([first, run_step(pipe, optimizer, MIXED_BATCHES[3])], expected[2:]) == []
        assert adaptra.TrainingState(pipe, optimizer).state_dict()["step"] == 4


def test_a_run_with_steps_in_x_order_goes_on_with_as_many_updates(one_thread: None, tmp_path: Path) -> None:
    with compiled(EXAMPLE, BATCHES[0], stages=2, microbatches=MICROBATCHES) as pipe:
        training = adaptra.TrainingState(pipe, adam(pipe.parameters()))
        checkpoints.save({"training": training}, checkpoint_id=tmp_path / "equal")
        pipe.session.go_on_at(5, updates=3)
        checkpoints.save({"training": training}, checkpoint_id=tmp_path / "others")
    with compiled(EXAMPLE, BATCHES[0], stages=2, microbatches=MICROBATCHES) as pipe:
        training = adaptra.TrainingState(pipe, adam(pipe.parameters()))
        for name, step, updates in (("others", 5, 3), ("equal", 0, 0)):
            checkpoints.load({"training": training}, checkpoint_id=tmp_path / name)
            assert (pipe.session.training_step, pipe.updates) == (step, updates)


@pytest.mark.parametrize("step", [None, -1, 1.5, True, (1, -1), [1]])
def test_a_state_without_its_step_is_refused(one_thread: None, step: object) -> None:
    with compiled(EXAMPLE, BATCHES[0], stages=2, microbatches=MICROBATCHES) as pipe:
        training = adaptra.TrainingState(pipe, adam(pipe.parameters()))
        before = {name: one.clone() for name, one in pipe.state_dict().items()}
        other = {name: torch.zeros_like(one) for name, one in before.items()}
        with pytest.raises(StateError) as error:
            training.load_state_dict(training.state_dict() | {"model": other, "step": step})
        check_documented("StateError", str(error.value), NO_STEP)
        assert all(torch.equal(one, before[name]) for name, one in pipe.state_dict().items())


def test_without_a_launcher_a_state_dict_is_the_whole_run(one_thread: None) -> None:
    """The optimizer of the plain loop halves its rate after every step; the second pipeline gets the rate from the first."""
    expected = train_alone(EXAMPLE, BATCHES, MICROBATCHES, optimizer=halving)
    with compiled(EXAMPLE, BATCHES[0], stages=3, microbatches=MICROBATCHES) as pipe:
        optimizer = halving(pipe.parameters())
        assert differences([run_step(pipe, optimizer, batch) for batch in BATCHES[:2]], expected[:2]) == []
        saved = adaptra.TrainingState(pipe, optimizer).state_dict()
    with compiled(EXAMPLE, BATCHES[0], stages=2, microbatches=MICROBATCHES, model=EXAMPLE.make(seed=1)) as pipe:
        optimizer = halving(pipe.parameters())
        training = adaptra.TrainingState(pipe, optimizer)
        untouched = training.state_dict()["model"]
        assert not optimizer.state and optimizer.param_groups[0]["lr"] == 0.01
        assert all(torch.equal(one, EXAMPLE.make(seed=1).state_dict()[name]) for name, one in untouched.items())
        training.load_state_dict(saved)
        assert optimizer.param_groups[0]["lr"] == 0.0025
        assert differences([run_step(pipe, optimizer, batch) for batch in BATCHES[2:]], expected[2:]) == []


@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
        lambda parameters: torch.optim.AdamW(parameters, lr=0.01, foreach=True),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
        lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
        halving,
    ],
    ids=["fused", "foreach", "momentum", "adagrad", "scheduled"],
)
def test_any_optimizer_trains_bitwise_as_in_one_process(one_thread: None, make: Optimizer) -> None:
    expected = train_alone(EXAMPLE, BATCHES[:3], MICROBATCHES, optimizer=make)
    with compiled(EXAMPLE, BATCHES[0], stages=2, microbatches=MICROBATCHES) as pipe:
        assert differences(train(pipe, BATCHES[:3], make), expected) == []


def test_gradients_of_several_steps_add_up_as_those_of_more_microbatches(one_thread: None) -> None:
    """Two batches before the optimizer's step, with half the loss each, are one of twice the microbatches."""
    both = EXAMPLE.rows(2 * ROWS, 7)
    (ids,), kwargs, targets = both
    (expected,) = train_alone(EXAMPLE, [both], 2 * MICROBATCHES)
    with compiled(EXAMPLE, BATCHES[0], stages=2, microbatches=MICROBATCHES) as pipe:
        for half in (slice(None, ROWS), slice(ROWS, None)):
            pipe.step(ids[half], targets[half], **kwargs)
        for name, parameter in pipe.named_parameters():
            alone = dict(expected.gradients)[name]
            assert parameter.grad is not None and alone is not None
            assert torch.equal(parameter.grad / 2, alone), name


def test_an_optimizer_of_the_plain_model_is_refused(one_thread: None) -> None:
    with compiled(EXAMPLE, BATCHES[0], stages=2, microbatches=MICROBATCHES) as pipe:
        with pytest.raises(StateError) as error:
            adaptra.TrainingState(pipe, adam(EXAMPLE.make().parameters()))
        check_documented("StateError", str(error.value), FOREIGN)
