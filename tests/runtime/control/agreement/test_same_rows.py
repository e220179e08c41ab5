"""Ranks of a replica that are given different rows are told so: they would train inputs on the targets of other rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from errors_table import check_documented
from models import EXAMPLES
from processes import run_processes
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from training import compiled

from adaptra import TrainingState
from adaptra.errors import BatchError
from adaptra.runtime.control.agreement.same_rows import SameRows, is_due, numbers_of
from adaptra.runtime.control.mail.mail import BatchChecksums, from_json, to_json
from adaptra.runtime.control_store.schema import encode

MICROBATCHES = 2
DIFFERENT = (
    "… …: rank … was given other … than rank …: expected the same rows on all ranks of a replica; give a DistributedSampler "
    "num_replicas=pipe.replicas and rank=pipe.replica, and whatever shuffles the same seed"
)

APART = (
    "… …: rank … is at step … of the training, rank … at step …: expected one checkpoint for all ranks, in which each finds "
    "its own stages as of the same step"
)


def caught(run: Any) -> str:
    try:
        run()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def train(rank: int) -> dict[str, Any]:
    """Ranks that shuffle as under DDP, that give only what is read, that follow the recipe, and that evaluate other rows."""
    torch.distributed.init_process_group("gloo")
    example = EXAMPLES["skip_mlp"]
    (inputs,), _, targets = batch = example.rows(4 * MICROBATCHES, 0)
    data = TensorDataset(*(torch.cat([one] * 6) + torch.arange(24 * MICROBATCHES)[:, None] for one in (inputs, targets)))
    found: dict[str, Any] = {}

    def epochs(pipe: Any, sampler: Any, count: int) -> int:
        steps = 0
        for epoch in range(count):
            sampler.set_epoch(epoch)
            for x, y in DataLoader(data, batch_size=4 * MICROBATCHES, sampler=sampler, drop_last=True):
                found["steps"] = steps = steps + 1
                pipe.step(x, y)
        return steps

    def compiled_pipe() -> Any:
        return compiled(example, batch, stages=2, microbatches=MICROBATCHES)

    with compiled_pipe() as pipe:
        sampler = DistributedSampler(data, num_replicas=pipe.replicas, rank=pipe.replica)
        assert epochs(pipe, sampler, 3) == 18  # as documented
        for _ in range(12):
            pipe.step(*((inputs, None) if rank == 0 else (None, targets)))
        pipe.eval_step(inputs if rank == 0 else None, targets)
    with compiled_pipe() as pipe:
        found["sampler"] = caught(lambda: epochs(pipe, DistributedSampler(data), 20))
        found["sampler"] = found["steps"], found["sampler"]
    with compiled_pipe() as pipe:
        pipe.eval_step(inputs, targets)

        def evaluate() -> None:
            pipe.eval_step(inputs, targets.flip(0) if rank else targets)
            for _ in range(50):
                pipe.step(inputs, targets)

        found["evaluated"] = caught(evaluate)
    with compiled_pipe() as pipe:
        pipe.step(inputs, targets)
        state: Any = TrainingState(pipe, torch.optim.SGD(pipe.parameters()))
        state.load_state_dict(state.state_dict() | {"step": 7 + rank})
        found["loaded"] = caught(lambda: [pipe.step(inputs, targets) for _ in range(50)])
    return found


@pytest.mark.processes
def test_ranks_of_a_replica_with_other_rows_are_told_all_of_them() -> None:
    results = run_processes(train, 2)
    for found in results:
        steps, message = found["sampler"]
        assert "step 0: rank 1 was given other inputs and targets than rank 0: expected the same rows" in message
        assert steps < 50
        assert "eval_step 1: rank 1 was given other targets than rank 0" in found["evaluated"]
        assert "step 1: rank 0 is at step 7 of the training, rank 1 at step 8: expected one checkpoint" in found["loaded"]


def test_what_several_ranks_were_given_is_compared() -> None:
    x, y = torch.arange(12.0).reshape(6, 2), torch.arange(6)
    rows = SameRows([4, 5, 6])

    def tell(rank: int, number: int, given: dict[str, Any]) -> None:
        mail = from_json(encode(to_json(BatchChecksums(rank, "step", number, numbers_of(given), 0))).encode())
        assert isinstance(mail, BatchChecksums)
        rows.add(mail)

    for number in range(200):  # more than are kept: rank 2 never tells of most of these
        tell(0, number, {"inputs": (x, {"mask": y}), "targets": None})
        tell(1, number, {"targets": y, "inputs": None, "scale": 3.0})
    tell(2, 199, {"inputs": (x.clone(), {"mask": y}), "targets": y.clone()})
    messages: list[str] = []
    for rank, mask in enumerate((y, y.clone(), y.roll(1))):
        given = {"inputs": (x, {"mask": mask}), "targets": y if rank else y[1:]}
        if rank < 2:
            tell(rank, 300, given)
            continue
        with pytest.raises(BatchError) as error:
            tell(rank, 300, given)
        messages.append(str(error.value))
    (message,) = messages
    assert message.startswith("step 300: rank 5 was given other targets than rank 4, rank 6 was given other inputs[1]['mask']")
    check_documented("BatchError", message, DIFFERENT)


def test_ranks_that_go_on_at_different_steps_are_told_so() -> None:
    rows = SameRows([4, 5])
    for rank in range(2):
        rows.add(BatchChecksums(rank, "step", 0, {}, 8))
    rows.add(BatchChecksums(0, "step", 1, {}, 9))
    with pytest.raises(BatchError) as error:
        rows.add(BatchChecksums(1, "step", 1, {}, 5))
    check_documented("BatchError", str(error.value), APART)
    assert str(error.value).startswith("step 1: rank 4 is at step 9 of the training, rank 5 at step 5: ")


def test_the_first_calls_are_compared_and_then_some() -> None:
    assert [call for call in range(301) if is_due(call)] == [*range(10), 100, 200, 300]
