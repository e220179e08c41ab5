"""An optimizer is attached once; its state then moves with the parameters."""

from __future__ import annotations

import pytest
import torch
from errors_table import check_documented
from training import MIXED, compiled, differences, run_step, train_alone

from adaptra.errors import PipelineError, StateError
from adaptra.program.roles import Roles

ROWS, MICROBATCHES = 16, 4
MISSING = "…: no optimizer: expected pipe.attach(optimizer) before it, or the optimizer as an argument"
FOREIGN = "optimizer: … of its parameters are not this pipeline's: expected an optimizer over pipe.parameters()"

pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_state_of_an_attached_optimizer_moves_with_a_cut() -> None:
    batches = [MIXED.rows(ROWS, seed=step) for step in range(4)]
    with compiled(MIXED, batches[0], stages=3, microbatches=MICROBATCHES, split=["middle.1", "middle.4"]) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
        pipe.attach(optimizer)
        found = []
        for step, batch in enumerate(batches):
            if step == 2:
                pipe.take_split(["middle.3", "middle.5"])
            found.append(run_step(pipe, optimizer, batch))
        assert pipe.split == ("middle.3", "middle.5")
    assert differences(found, train_alone(MIXED, batches, MICROBATCHES)) == []


def test_a_change_without_an_optimizer_is_refused_with_the_call_and_the_remedy() -> None:
    with compiled(MIXED, MIXED.rows(ROWS, seed=0), stages=2, microbatches=MICROBATCHES) as pipe:
        changes = {
            "take_split": lambda: pipe.take_split(["middle.3"]),
            "settle_split": pipe.settle_split,
            "take_roles": lambda: pipe.take_roles(Roles.initial(2, 2)),
            "settle_roles": pipe.settle_roles,
        }
        for call, change in changes.items():
            with pytest.raises(PipelineError, match=rf"^{call}: no optimizer") as caught:
                change()
            check_documented("PipelineError", str(caught.value), MISSING)
        with pytest.raises(StateError) as caught_foreign:
            pipe.attach(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))]))
        check_documented("StateError", str(caught_foreign.value), FOREIGN)


def test_the_optimizer_that_a_call_is_given_goes_before_the_attached_one() -> None:
    with compiled(MIXED, MIXED.rows(ROWS, seed=0), stages=2, microbatches=MICROBATCHES) as pipe:
        attached, given = (torch.optim.SGD(pipe.parameters(), lr=0.1) for _ in range(2))
        pipe.attach(attached)
        pipe.take_split(["middle.3"], given)
        own = {id(parameter) for parameter in pipe.parameters()}
        assert {id(parameter) for group in given.param_groups for parameter in group["params"]} == own
