"""Sites that update by themselves stay in step: what they exchange is of the same steps, and goes on where it was saved."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from errors_table import check_documented
from models import Example, square_loss, vectors
from processes import run_processes
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from training import call, compiled

import adaptra
from adaptra.errors import AdaptraError, StateError

WIDTH, ROWS = 4, 4
PLAIN = Example("plain", lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)), vectors(WIDTH), square_loss)


DROPPED = Example(
    "dropped",
    lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH)),
    vectors(WIDTH),
    square_loss,
)


def train(pipe: adaptra.Pipeline, steps: int, first: int = 0, of_an_update: int = 1) -> None:
    """Make steps, and an update at the end of each so many of them."""
    inner = torch.optim.SGD(pipe.parameters(), lr=0.1)
    for step in range(first, first + steps):
        args, kwargs = call(PLAIN.rows(ROWS, 100 * pipe.replica + step))
        pipe.step(*args, **kwargs)
        if (step + 1) % of_an_update == 0:
            inner.step()
            inner.zero_grad()


def of_sites(local: adaptra.Local, example: Example = PLAIN, **arguments: Any) -> Any:
    """A pipeline of two layers for two sites."""
    given: dict[str, Any] = {"stages": 1, "microbatches": 2, **arguments}
    return compiled(example, example.rows(ROWS, 0), options=adaptra.Options(synchrony=local), **given)


def uneven(rank: int) -> str:
    """What a job says of which one site makes a step more than another one before all exchange."""
    both: dict[str, Any] = {"stages": 2, "placement": [0, 0]}
    with pytest.raises(AdaptraError) as caught, of_sites(adaptra.Local(2), **both) as pipe:
        train(pipe, 4 + rank)
        pipe.exchange()
    return str(caught.value)


@pytest.mark.processes
def test_sites_that_come_to_different_exchanges_are_told_so() -> None:
    row = (
        "exchange between sites: site 0 is at stage … after … steps, and site … at stage … after … steps: expected the same "
        "number of steps before it on all sites, or Local(quorum=...), with which they may differ"
    )
    for text in run_processes(uneven, 2):
        check_documented(StateError.__name__, text[text.index("exchange between") :], row)
        assert "site 0 is at stage 0 in exchange() after 4 steps, and site 1 at stage 0 in a step after 4 steps" in text


def replayed(_rank: int) -> dict[str, tuple[str, str]]:
    """What a job says to logs of its own that have other batches and fewer steps, after one that it has replayed."""

    def run(log: list[Any] | None = None, steps: int = 3) -> list[Any]:
        with of_sites(adaptra.Local(2)) as pipe:
            if log is not None:
                pipe.replay(log)
            train(pipe, steps)
            return [*pipe.exchange_log]

    log = run()
    assert run(log, steps=4) == log, "no exchange is due before the fifth step"
    found: dict[str, tuple[str, str]] = {}
    heavier = [{**one, "votes": [{**vote, "weight": 3.0} for vote in one["votes"]]} for one in log]
    for name, wrong in (("weight", heavier), ("longer", log)):
        with pytest.raises(AdaptraError) as caught:
            run(wrong, steps=5)
        found[name] = type(caught.value).__name__, str(caught.value)
    return found


@pytest.mark.processes
def test_a_log_is_not_replayed_with_other_batches_or_beyond_its_end() -> None:
    rows = {
        "weight": (
            "exchange … of stage …: this site has trained on … since the one before, and by the log that is replayed on …: "
            "expected the batches and the site of that run"
        ),
        "longer": (
            "a step after … steps: an exchange is due, and the log that is replayed has its last one after …: expected the "
            "steps and the Local(...) of that run"
        ),
    }
    for found in run_processes(replayed, 2):
        for name, row in rows.items():
            text = found[name][1]
            check_documented(StateError.__name__, text.removeprefix(text.partition("StateError: ")[0] + "StateError: "), row)


def saved_of(pipe: adaptra.Pipeline) -> tuple[Any, Any]:
    return pytree.tree_map_only(Tensor, torch.clone, (pipe.state_dict(), pipe.outer_state_dict()))


def parameters_of(pipe: adaptra.Pipeline) -> list[list[float]]:
    return [one.flatten().tolist() for one in pipe.parameters()]


def resumed(_rank: int) -> dict[str, Any]:
    """What a run with dropout has in the end, and one that goes on from its file, with the number of its updates or without."""
    found: dict[str, Any] = {}
    with of_sites(adaptra.Local(2), DROPPED) as pipe:
        train(pipe, 3)
        state, outer = saved_of(pipe)
        train(pipe, 3, 3)
        found["whole"] = parameters_of(pipe), pipe.updates
    earlier = {name: value for name, value in outer.items() if name not in ("step", "site", "waiting")}
    for name, one in (("resumed", outer), ("of an earlier version", earlier)):
        with of_sites(adaptra.Local(2), DROPPED) as pipe:
            pipe.load_state_dict(state)
            with pytest.raises(StateError, match="outer state: "):
                pipe.load_outer_state_dict({**outer, "step": -1})
            with pytest.raises(StateError) as caught:
                pipe.load_outer_state_dict({**outer, "site": 1 - pipe.replica})
            found["site"] = str(caught.value)
            pipe.load_outer_state_dict(one)
            pipe.load_state_dict(state)
            with pytest.raises(StateError) as caught:
                pipe.exchange()
            found["order"] = str(caught.value)
            pipe.load_outer_state_dict(one)
            train(pipe, 3, 3)
            found[name] = parameters_of(pipe), pipe.updates
    with of_sites(adaptra.Local(2)) as pipe:
        pipe.load_outer_state_dict(pipe.outer_state_dict())
        pipe.load_state_dict(pipe.state_dict())
        found["order in a step"] = text_of(lambda: train(pipe, 1))
    return found


@pytest.mark.processes
def test_dropout_goes_on_from_what_a_rank_has_saved() -> None:
    for found in run_processes(resumed, 2):
        assert found["whole"][1] == 6
        assert found["resumed"] == found["whole"]
        assert found["of an earlier version"] == found["whole"]
        row = "outer state: of site …: expected that of site …, as each has learnt something else"
        check_documented("StateError", found["site"], row)
        row = (
            "load_outer_state_dict before load_state_dict, which makes sites equal, so what it has loaded is lost: expected it "
            "after load_state_dict"
        )
        check_documented("StateError", found["order"], row)
        check_documented("StateError", found["order in a step"], row)


MODES = {"all": adaptra.Local(3), "quorum": adaptra.Local(3, quorum=2)}


def accumulated(_rank: int) -> dict[str, Any]:
    """After how many steps sites have exchanged whose updates have two each, and what is said where they have too many."""
    found: dict[str, Any] = {}
    log: list[Any] = []
    for name, mode in MODES.items():
        with of_sites(mode) as pipe:
            train(pipe, 9, of_an_update=2)
            log = [*pipe.exchange_log]
        found[name] = [one["steps"] for one in log]
    with of_sites(MODES["all"]) as pipe:
        train(pipe, 4, of_an_update=2)
        state, outer = saved_of(pipe)
    with of_sites(MODES["all"]) as pipe:
        pipe.load_state_dict(state)
        pipe.load_outer_state_dict(outer)
        train(pipe, 3, 4, of_an_update=2)
        found["resumed"] = [one["steps"] for one in pipe.exchange_log]
    with of_sites(MODES["quorum"]) as pipe:
        pipe.replay(log)
        train(pipe, 9, of_an_update=2)
        found["replayed"] = [one["steps"] for one in pipe.exchange_log]

    def never(mode: adaptra.Local) -> None:
        with of_sites(mode) as pipe:
            train(pipe, 10, of_an_update=20)

    def amid() -> None:
        with of_sites(adaptra.Local(3)) as pipe:
            train(pipe, 1, of_an_update=2)
            pipe.exchange()
            train(pipe, 1, 1, of_an_update=2)

    def beyond() -> None:
        with of_sites(MODES["quorum"]) as pipe:
            pipe.replay(log[:1])
            train(pipe, 12)

    for name, mode in MODES.items():
        found[f"never, {name}"] = text_of(partial(never, mode))
    found["amid"], found["beyond"] = text_of(amid), text_of(beyond)
    return found


def text_of(call: Callable[[], None]) -> str:
    """The text of the error of whichever rank has it."""
    with pytest.raises(AdaptraError) as caught:
        call()
    text = str(caught.value)
    return text[text.find("StateError: ") + len("StateError: ") :] if "StateError: " in text else text


@pytest.mark.processes
def test_exchanges_wait_for_the_end_of_an_update() -> None:
    held = (
        "…: … has a gradient of earlier steps: expected optimizer.step() and optimizer.zero_grad() before it, as an exchange "
        "changes the parameters that the gradient is of"
    )
    waits = (
        "exchange of stage …: it has waited … steps, as … has a gradient of the ones before: expected optimizer.step() and "
        "optimizer.zero_grad() at least once in every=… steps"
    )
    for found in run_processes(accumulated, 2):
        assert found["all"] == [4, 6]
        assert found["resumed"] == [4, 6]
        assert found["quorum"] and all(steps % 2 == 0 for steps in found["quorum"])
        assert found["replayed"] == found["quorum"]
        check_documented("StateError", found["never, all"], waits)
        check_documented("StateError", found["never, quorum"], waits)
        check_documented("StateError", found["amid"], held)
        assert "steps: an exchange is due, and the log that is replayed has its last one after" in found["beyond"]
