"""What a trial refuses before it tries anything, and what it leaves of the state that is not the pipeline's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from errors_table import check_documented, error_of
from models import Example, square_loss, vectors
from processes import run_processes
from torch import nn
from training import call, compiled

import adaptra
from adaptra.errors import PlanError

pytestmark = pytest.mark.processes

MICROBATCHES, WIDTH = 2, 8
EXAMPLE = Example(
    "two layers", lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)), vectors(WIDTH), square_loss
)
NORMED = Example("normed", lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)), vectors(WIDTH), square_loss)
DEADLINE, STEALING = adaptra.Deadline(0.7), adaptra.Stealing()


def batch(replica: int, step: int, rows: int = 2 * MICROBATCHES) -> tuple[Any, ...]:
    args, _ = call(EXAMPLE.rows(rows, 100 * replica + step))
    return args


def job(example: Example = EXAMPLE, mode: Any = "exact") -> Any:
    options = adaptra.Options(synchrony=mode)
    return compiled(example, example.rows(2 * MICROBATCHES, 0), stages=1, microbatches=MICROBATCHES, options=options)


def sgd(pipe: adaptra.Pipeline, rate: float = 0.1) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(pipe.parameters(), lr=rate)
    pipe.attach(optimizer)
    return optimizer


def train(pipe: adaptra.Pipeline, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        pipe.step(*batch(pipe.replica, step))
        optimizer.step()
        optimizer.zero_grad()


def state_of(pipe: adaptra.Pipeline) -> dict[str, bytes]:
    return {name: one.detach().numpy().tobytes() for name, one in pipe.state_dict().items()}


def refused_at_the_door(rank: int) -> dict[str, tuple[str, str]]:
    """Each refusal leaves the state and the mode as they are, and steps go on."""
    found: dict[str, tuple[str, str]] = {}
    with job(NORMED) as pipe:
        sgd(pipe)
        told: list[str] = []
        found["buffers"] = error_of(
            lambda: pipe.settle_synchrony(
                [batch(0, 0)], allow=[adaptra.Local(2), STEALING], update=lambda: told.append("stepped")
            )
        )
        assert not told and pipe.synchrony == "exact", "no mode was tried"
    with job(mode=adaptra.Auto((DEADLINE,))) as pipe:
        optimizer = sgd(pipe)
        train(pipe, optimizer, range(2))
        before = state_of(pipe)
        ragged = [batch(pipe.replica, 0), batch(pipe.replica, 1, 3)]
        found["batch"] = error_of(lambda: pipe.settle_synchrony(ragged, allow=[DEADLINE]))
        found["by name"] = error_of(
            lambda: pipe.settle_synchrony([{"inputs": one[0], "targets": one[1]} for one in ragged], allow=[DEADLINE])
        )
        given = [batch(pipe.replica, 0)]
        found["source"] = error_of(lambda: pipe.settle_synchrony(given, allow=[DEADLINE] if rank == 0 else None))
        assert state_of(pipe) == before and pipe.synchrony == "exact"
        pipe.step(*ragged[1])
        found["trained"] = error_of(lambda: pipe.settle_synchrony(given, allow=[DEADLINE]))
        optimizer.step()
        optimizer.zero_grad()
        train(pipe, optimizer, range(2, 3))
    with job(mode=adaptra.Auto((STEALING,))) as pipe:
        sgd(pipe)
        pipe.step(*batch(pipe.replica, 0))
        if rank == 1:  # as if it had none in this mode
            pipe.session.workers[0].monitor._kept.clear()
        found["untried"] = error_of(lambda: pipe.settle_synchrony(given))
    return found


SHAPE = (
    "settle_synchrony: deadline=… with …: expected training batches of the shape for which the pipeline was compiled, as "
    "those that are deferred to a step are computed with its own"
)
REFUSED: dict[str, str] = {
    "buffers": (
        "synchrony=stealing with the buffer …, which forwards change in microbatch order: expected a model without such buffers"
    ),
    "batch": SHAPE,
    "by name": SHAPE,
    "untried": "…: no step has run in this mode: expected some, which show whether anything is slow",
    "trained": SHAPE,
    "source": "…: nothing has moved, since the … of rank … is …, and that of rank 0 …: expected the same on every rank",
}


def log_of_the_users_steps(_rank: int) -> tuple[Any, ...]:
    """The log of a stretch with a deadline before a trial that ends in exact, and after it."""
    with job(mode=DEADLINE) as pipe:
        optimizer = sgd(pipe)
        train(pipe, optimizer, range(1))
        pipe.defer_nothing()
        train(pipe, optimizer, range(1, 2))
        before = [*pipe.exchange_log]
        trial = pipe.settle_synchrony([batch(pipe.replica, 2)], allow=[STEALING, DEADLINE], rounds=3)
        assert trial is not None
        found = pipe.synchrony, before, pipe.exchange_log
        pipe.take_synchrony("exact")
        return found


def refused_in_the_midst(_rank: int) -> tuple[Any, ...]:
    """A mode that is refused only once others have been tried: the state is as before, and updates are exact."""
    with job() as pipe:
        optimizer = sgd(pipe)
        train(pipe, optimizer, range(1))
        before, changes = state_of(pipe), pipe.session.synchrony

        def planned(mode: Any, *others: Any) -> Any:
            if mode == STEALING and pipe.synchrony == adaptra.Local(2):
                raise PlanError("no program fits")
            return type(changes).planned(changes, mode, *others)

        changes.planned = planned  # type: ignore[method-assign]
        kind = error_of(lambda: pipe.settle_synchrony([batch(pipe.replica, 1)], allow=[adaptra.Local(2), STEALING], rounds=3))[
            0
        ]
        found = kind, pipe.synchrony, state_of(pipe) == before
        train(pipe, optimizer, range(1, 2))
        return found


def scheduled(_rank: int) -> dict[str, Any]:
    """Rates and an average of the parameters, both of the user's update, without a trial and with one before a step."""
    found: dict[str, Any] = {}
    for name in ("none", "trial"):
        with job() as pipe:
            optimizer = sgd(pipe)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.1)
            average = torch.optim.swa_utils.AveragedModel(nn.ParameterList(pipe.parameters()))

            def update(average: Any = average, optimizer: Any = optimizer, scheduler: Any = scheduler) -> None:
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                average.update_parameters(average.module)

            rates: list[float] = []
            for step in range(4):
                if name == "trial" and step == 1:
                    given: Any = {"batches": [batch(pipe.replica, 9)], "allow": [STEALING], "rounds": 3, "update": update}
                    wrong: Any = {**given, "keep": [scheduler, 3]}
                    found["keep"] = error_of(lambda wrong=wrong: pipe.settle_synchrony(**wrong))
                    found["forgotten"] = error_of(lambda given=given: pipe.settle_synchrony(**given))
                    pipe.settle_synchrony(**given, keep=[scheduler, average])
                pipe.step(*batch(pipe.replica, step))
                update()
                rates.append(optimizer.param_groups[0]["lr"])
            averaged = {key: one.numpy().tobytes() for key, one in average.state_dict().items()}
            found[name] = rates, averaged, state_of(pipe)
    return found


def body(rank: int) -> dict[str, Any]:
    return {
        "door": refused_at_the_door(rank),
        "log": log_of_the_users_steps(rank),
        "midst": refused_in_the_midst(rank),
        "scheduled": scheduled(rank),
    }


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_processes(body, 2)


@pytest.mark.parametrize("what", REFUSED)
def test_what_a_mode_can_not_have_is_refused_before_any_is_tried(ranks: list[dict[str, Any]], what: str) -> None:
    for one in ranks:
        kind, text = one["door"][what]
        check_documented(kind, text, REFUSED[what])


def test_where_the_modes_come_from_is_the_same_on_all_ranks(ranks: list[dict[str, Any]]) -> None:
    assert (
        "the source of modes of rank 1 is Options(synchrony=adaptra.Auto(...)), and that of rank 0 allow="
        in (ranks[0]["door"]["source"][1])
    )


def test_the_log_after_a_trial_is_that_of_the_users_own_steps(ranks: list[dict[str, Any]]) -> None:
    for one in ranks:
        mode, before, after = one["log"]
        assert len(before) == 2 and after == ([] if mode == DEADLINE else before)


def test_a_mode_that_is_refused_later_leaves_exact_updates_of_the_state_before(ranks: list[dict[str, Any]]) -> None:
    for one in ranks:
        assert one["midst"] == ("PlanError", "exact", True)


def test_what_the_users_update_changes_is_put_back(ranks: list[dict[str, Any]]) -> None:
    """Stealing has the bits of exact, so whichever goes on, no later step may differ."""
    for one in ranks:
        rates, _, _ = one["scheduled"]["none"]
        assert rates == pytest.approx([0.1, 0.1, 0.01, 0.01])
        assert one["scheduled"]["trial"] == one["scheduled"]["none"]


@pytest.mark.parametrize(
    ("what", "row"),
    [
        (
            "keep",
            "settle_synchrony: keep=…: expected a list of what has state_dict() and load_state_dict(), such as a scheduler",
        ),
        (
            "forgotten",
            "settle_synchrony: update=… and no keep=, with an optimizer whose rate follows a scheduler: expected "
            "keep=[scheduler], as later steps would go on from a trial's; or keep=[] if update does not step it",
        ),
    ],
)
def test_what_can_not_be_put_back_is_refused(ranks: list[dict[str, Any]], what: str, row: str) -> None:
    for one in ranks:
        kind, text = one["scheduled"][what]
        check_documented(kind, text, row)
