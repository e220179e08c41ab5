"""What is known of deferred microbatches outlives the workers: where the model changes, ranks change roles, and steps go on."""

from __future__ import annotations

import gc
import logging
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from errors_table import check_documented, error_of
from models import Example, square_loss, vectors
from processes import run_processes
from torch import nn
from training import call, compiled

import adaptra

pytestmark = [pytest.mark.processes, pytest.mark.timed]

MICROBATCHES, STEPS, WIDTH = 4, 6, 8
EXAMPLE = Example(
    "frozen by turns",
    lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2), nn.Linear(WIDTH, WIDTH)),
    vectors(WIDTH),
    square_loss,
)
FREED, SWAPPED = 1, 3
"""The step before which a layer is frozen, with something deferred; and that before which ranks change roles."""


def rows_of(replica: int, step: int) -> Any:
    return EXAMPLE.rows(2 * MICROBATCHES, 100 * replica + step)


def options(slow: str | None) -> adaptra.Options:
    return adaptra.Options(
        synchrony=adaptra.Deadline(0.7),
        share=False,
        faults=() if slow is None else (f"slow {slow} 40ms @0..{STEPS}",),
        emulate=adaptra.EmulatedDevice(0.002, 0.002, 0.002),
    )


def run(slow: str | None, log: Sequence[Any] = ()) -> dict[str, Any]:
    """Steps with a change of the model and of the roles, each behind a call that is about the step to come."""
    found: dict[str, Any] = {"bits": [], "deferred": []}
    model = EXAMPLE.make(torch.float32)
    with compiled(EXAMPLE, rows_of(0, 0), stages=1, microbatches=MICROBATCHES, model=model, options=options(slow)) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.05)
        if log:
            pipe.replay(log)
        for step in range(STEPS):
            if step == FREED:
                next(iter(model.parameters())).requires_grad_(False)
            if step == SWAPPED:
                assert pipe.roles is not None
                pipe.take_roles(pipe.roles.swapped(0, 1), optimizer)
            args, kwargs = call(rows_of(pipe.replica, step))
            if step == STEPS - 1:
                pipe.defer_nothing()
                next(iter(model.parameters())).requires_grad_(True)
            pipe.step(*args, **kwargs)
            optimizer.step()
            optimizer.zero_grad()
            found["bits"].append({name: one.detach().numpy().tobytes() for name, one in pipe.state_dict().items()})
            if step == SWAPPED - 2:
                pipe.defer_nothing()
        found["log"] = [*pipe.exchange_log]
    return found


def refused(rank: int) -> tuple[str, str]:
    """What a replay is refused for where ranks have other logs. Then all replay the same one."""
    with compiled(EXAMPLE, rows_of(0, 0), stages=1, microbatches=MICROBATCHES, options=options(None)) as pipe:
        logs = [[{"number": 1, "parts": [{"first": 0, "count": count}] * 2}] for count in (2, 3)]
        found = error_of(lambda: pipe.replay(logs[rank]))
        pipe.replay(logs[0])
        args, kwargs = call(rows_of(pipe.replica, 0))
        pipe.step(*args, **kwargs)
        assert pipe.exchange_log == logs[0]
        pipe.defer_nothing()
        pipe.step(*args, **kwargs)
    return found


def warned(_rank: int) -> list[str]:
    """What the log says of a state without what is deferred, and of an end without a close."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("adaptra").addHandler(handler)
    example: Any = {"example_inputs": (rows_of(0, 0)[0], rows_of(0, 0)[2]), "loss": EXAMPLE.loss, "options": options("1.0")}
    pipe = adaptra.compile(EXAMPLE.make(torch.float32), stages=1, microbatches=MICROBATCHES, **example)
    args, kwargs = call(rows_of(pipe.replica, 0))
    pipe.step(*args, **kwargs)
    for _ in range(2):
        pipe.full_state_dict()
        pipe.state_dict()
    del pipe
    gc.collect()
    logging.getLogger("adaptra").removeHandler(handler)
    return [line for line in lines if "deferred" in line]


def body(rank: int) -> dict[str, Any]:
    first = run("1.0")
    return {"first": first, "again": run(None, first["log"]), "refused": refused(rank), "warned": warned(rank)}


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_processes(body, 2)


def test_each_microbatch_is_in_one_step_whatever_changes_meanwhile(ranks: list[dict[str, Any]]) -> None:
    log = ranks[0]["first"]["log"]
    assert [one["number"] for one in log] == [*range(1, STEPS + 1)], "it goes on over both changes"
    done = [0, 0]
    for step, entry in enumerate(log):
        assert [part["first"] for part in entry["parts"]] == done
        done = [part["first"] + part["count"] for part in entry["parts"]]
        begun = (step + 1) * MICROBATCHES
        if step == FREED - 1:
            assert done != [begun, begun], "something was deferred to the step for which the model changed"
        if step in (SWAPPED - 1, STEPS - 1):
            assert done == [begun, begun], "the step deferred nothing, though the workers were new"
    assert ranks[1]["first"]["log"] == log and ranks[1]["first"]["bits"] == ranks[0]["first"]["bits"]


def test_a_log_is_replayed_over_changes(ranks: list[dict[str, Any]]) -> None:
    for one in ranks:
        assert one["again"]["log"] == one["first"]["log"] and one["again"]["bits"] == one["first"]["bits"]


def test_ranks_that_replay_other_logs_are_refused(ranks: list[dict[str, Any]]) -> None:
    row = "…: nothing has moved, since the … of rank … is …, and that of rank 0 …: expected the same on every rank"
    for one in ranks:
        kind, text = one["refused"]
        check_documented(kind, text, row)
        assert text.startswith("replay: nothing has moved, since the log of rank 1 is one of 1 steps with the digest ")


def test_the_log_warns_of_what_is_not_in_a_state_and_of_what_is_never_computed(ranks: list[dict[str, Any]]) -> None:
    for replica, one in enumerate(ranks):
        full, own, *ended = one["warned"]
        assert full.startswith("full_state_dict: ") and own.startswith("state_dict: ")
        assert "microbatches are deferred to the next step, and are not in this state" in full
        assert ended or replica == 0, "the slow replica has deferred some"
        for text in ended:
            assert f"microbatches of replica {replica} were deferred to a step that does not come" in text
