"""Several pipelines of one model share what they both hold, or the second one is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from as_backend import caught
from errors_table import check_documented
from models import EXAMPLES
from processes import run_processes
from torch import Tensor, nn
from training import adam, loss_of, microbatches_of
from training import compiled as pipeline_of

import adaptra

TIED = EXAMPLES["gpt_tied"]
BATCHES = [TIED.rows(rows, seed) for seed, rows in enumerate((8, 4, 8, 4))]

pytestmark = pytest.mark.usefixtures("one_thread")

OTHER_RANKS = (
    "model: another open pipeline holds … on …, this one would on …: expected the same, as each would train what the other "
    "does not see; close() the other first, or cut both alike by split="
)
STALE = (
    "model: another rank has … as an earlier pipeline trained it, this one as it was before: expected the trained model on "
    "every rank; load that pipeline's full_state_dict() into it"
)
MOVES = (
    "…: another open pipeline holds … too: expected one pipeline of a model where tensors move between ranks; close() the "
    "other first"
)
DOCUMENTED = {"other ranks": OTHER_RANKS, "stale": STALE, "moves": MOVES}


def alone() -> tuple[list[Tensor], dict[str, Tensor]]:
    """Losses and the state after steps of plain torch, two microbatches each."""
    model = TIED.make()
    optimizer = adam(model.parameters())
    losses: list[Tensor] = []
    for batch in BATCHES:
        parts = [loss_of(TIED, model, part) for part in microbatches_of(batch, 2)]
        for loss in parts:
            (loss / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(torch.stack([one.detach() for one in parts]).mean())
    return losses, model.state_dict()


def in_turn(long: adaptra.Pipeline, short: adaptra.Pipeline) -> list[str]:
    """Train with two pipelines of different shapes in turn; what is not bitwise as alone."""
    optimizer = adam(long.parameters())
    losses: list[Tensor] = []
    for index, batch in enumerate(BATCHES):
        losses.append((short if index % 2 else long).step(batch[0], batch[2]))
        optimizer.step()
        optimizer.zero_grad()
    expected, wanted = alone()
    states = [*long.held_tensors(), *short.held_tensors()]
    assert states
    return [f"step {i}" for i in range(len(losses)) if losses[i] != expected[i]] + [
        name for name, one in states if not torch.equal(one, wanted[name])
    ]


def compiled(model: nn.Module, batch: Any, **arguments: Any) -> Any:
    return pipeline_of(TIED, batch, stages=2, microbatches=2, model=model, **arguments)


def test_pipelines_of_two_shapes_train_one_model_bitwise_tied_copies_too() -> None:
    model = TIED.make()
    with compiled(model, BATCHES[0]) as long, compiled(model, BATCHES[1]) as short:
        assert in_turn(long, short) == []


class Repeated(nn.Module):
    """One layer, used three times."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.between = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for one in self.between:
            x = one(self.layer(x)).tanh()
        return self.layer(x)


X, Y = torch.ones(8, 4), torch.zeros(8, 4)


def repeated(model: nn.Module, *split: str) -> adaptra.Pipeline:
    loss, stages = nn.functional.mse_loss, len(split) + 1
    return adaptra.compile(model, stages=stages, microbatches=2, example_inputs=(X, Y), loss=loss, split=split)


def test_another_number_of_copies_is_refused_until_the_first_pipeline_is_closed() -> None:
    model = Repeated()
    with repeated(model, "between.0", "between.1") as three:
        assert len([name for name, _ in three.named_parameters() if name == "layer.weight"]) == 3
        error = caught(lambda: repeated(model, "between.1"))
        check_documented(type(error).__name__, str(error), OTHER_RANKS)
        repeated(Repeated(), "between.1").close()
    with repeated(model, "between.1") as two:
        assert two.step(X, Y).isfinite()


def test_a_pipeline_that_nobody_has_any_more_is_in_nobodys_way() -> None:
    model = Repeated()
    repeated(model, "between.0", "between.1")
    with repeated(model, "between.1") as two:
        assert two.step(X, Y).isfinite()


def test_tensors_do_not_move_under_another_pipeline() -> None:
    model = TIED.make()
    with compiled(model, BATCHES[0]) as long, compiled(model, BATCHES[1]):
        optimizer = adam(long.parameters())
        error = caught(lambda: long.take_split(["blocks.3"], optimizer))
        check_documented(type(error).__name__, str(error), MOVES)


def over_processes(rank: int) -> tuple[list[str], list[tuple[str, str]], list[str]]:
    torch.distributed.init_process_group("gloo")
    model = TIED.make()
    errors: list[tuple[str, str]] = []

    def refused(mistake: Callable[[], object]) -> None:
        try:
            mistake()
        except adaptra.errors.AdaptraError as error:
            errors.append((type(error).__name__, str(error)))

    def elsewhere() -> adaptra.Pipeline:
        args, _, targets = BATCHES[0]
        given = (args, targets)
        return adaptra.compile(model, stages=2, microbatches=2, example_inputs=given, loss=TIED.loss, split=["blocks.3"])

    def over_one_memory() -> adaptra.Pipeline:
        first, last = nn.Linear(4, 4), nn.Linear(4, 4)
        last.weight = nn.Parameter(first.weight.data.t())
        given = torch.ones(2, 4), torch.ones(2, 4)
        loss = nn.functional.mse_loss
        return adaptra.compile(
            nn.Sequential(first, last), stages=2, microbatches=2, example_inputs=given, loss=loss, split=["1"]
        )

    with compiled(model, BATCHES[0], split=["blocks.2"]) as long, compiled(model, BATCHES[1], split=["blocks.2"]) as short:
        unequal = in_turn(long, short)
        refused(elsewhere)
        whole = [long.full_state_dict()]
    refused(elsewhere)
    refused(over_one_memory)
    torch.distributed.broadcast_object_list(whole)
    model.load_state_dict(whole[0])
    with elsewhere() as pipe:
        _, wanted = alone()
        after = [name for name, one in pipe.held_tensors() if not torch.equal(one, wanted[name])]
    return unequal, errors, after


@pytest.mark.processes
def test_pipelines_over_processes_share_what_lies_on_the_same_ranks() -> None:
    first, second = run_processes(over_processes, 2)
    for unequal, ((kind, message), _, over_one_memory), after in (first, second):
        assert unequal == [] and after == []
        assert over_one_memory[0] == "OptionError" and "'0.weight' and '1.weight' are two tensors" in over_one_memory[1]
        check_documented(kind, message, OTHER_RANKS)
    messages = [errors[1] for _, errors, _ in (first, second)]
    (stale,) = [one for one in messages if one[0] == "OptionError"]
    check_documented(stale[0], stale[1], STALE)
    assert [one[0] for one in messages if one is not stale] == ["LaunchError"], messages
