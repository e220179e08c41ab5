"""What can't be done in x-order is refused, by one line, and a replica that is gone is missed by name."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from errors_table import check_documented
from processes import run_processes
from test_x_order import MICROBATCHES, MODEL, adam, bits_of, rows_of
from training import call, compiled

import adaptra
from adaptra.errors import AdaptraError, StateError

pytestmark = [pytest.mark.processes, pytest.mark.timed]

ROWS_OF: dict[str, str] = {
    "part": (
        "…: the optimizer lacks …: expected a single one of all trainable parameters, as other replicas go on with its state"
    ),
    "scaler": (
        "…: a gradient scaler under Options(synchrony=XOrder(…)): expected none, or one with enabled=False, as each replica's "
        "would scale by the number of its own steps; bfloat16 needs none"
    ),
    "taken with a scaler": (
        "…: a gradient scaler under Options(synchrony=XOrder(…)): expected none, or one with enabled=False, as each replica's "
        "would scale by the number of its own steps; bfloat16 needs none"
    ),
    "tried with a scaler": (
        "…: a gradient scaler under Options(synchrony=XOrder(…)): expected none, or one with enabled=False, as each replica's "
        "would scale by the number of its own steps; bfloat16 needs none"
    ),
    "no optimizer": "…: no optimizer: expected pipe.attach(optimizer) before the first step",
    "two steps": (
        "…: the optimizer has not made update …: expected one optimizer.step() after each pipe.step(), as other replicas "
        "make it"
    ),
    "exchange": (
        "…: the optimizer has not made update …: expected one optimizer.step() after each pipe.step(), as other replicas "
        "make it"
    ),
    "no step": ("optimizer.step(): there is no update to make: expected one after each pipe.step(), as other replicas make it"),
    "another optimizer": (
        "attach: another optimizer has made updates, and replicas are at different ones: expected one optimizer for all, or "
        "pipe.load_state_dict() on all ranks before"
    ),
    "state too early": "…: replicas may be at different updates: expected pipe.exchange() on all ranks before",
    "timeline too early": "…: replicas may be at different updates: expected pipe.exchange() on all ranks before",
    "state of another mode": (
        "outer state: …: expected that of pipe.outer_state_dict() in x-order, which has steps and updates"
    ),
    "schedule": (
        "optimizer.step(): update … has other settings on another replica: …: expected the same on all; what follows a "
        "schedule follows pipe.updates, which is the same on all"
    ),
    "gone": (
        "replica … has left with update …, which replica … lacks: expected pipe.exchange() on all ranks before the first of "
        "them closes its pipeline"
    ),
    "state": "optimizer …: its state … of … is a …: expected tensors and numbers alone, which can move to another rank",
    "state later": "replica … has update …, which replica … lacks: unmovable: …",
    "log": "… with … updates to come: the log that is replayed has none there",
    "log of others": "replay: update … of the log has replicas …: expected the log of replica … of …",
    "log of another point": (
        "replay: update … of the log follows update … of replica …, which has update … there: expected the whole log of a run, "
        "before the first step"
    ),
    "log of other batches": (
        "update …: replica … has trained on a weight of … in this step, and the log that is replayed has …: expected the "
        "batches of that run, as gradients count by weight"
    ),
    "hooks": (
        "replica … has gradient hooks of …: expected hooks of the same parameters in all replicas, as their copies would "
        "become different; register them on every rank, and let the hook look at pipe.replica"
    ),
}

OF_ALL = "replay: a log of … updates, where each update has all … replicas: expected the log of such a run, which is empty"

KINDS = {
    **dict.fromkeys(("hooks", "scaler", "taken with a scaler", "tried with a scaler"), "OptionError"),
    **{what: "StateError" for what in ROWS_OF if what.startswith(("log", "part", "state", "timeline"))},
}


RATES = 0.00101, 0.00104  # whose texts in torch are the same


class History(torch.optim.SGD):
    """Keeps a list of each parameter from some step on."""

    def __init__(self, parameters: Any, first: int) -> None:
        super().__init__(parameters, lr=0.1)
        self.left = first

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        self.left -= 1
        for one in self.param_groups[0]["params"] if self.left <= 0 else ():
            self.state[one]["history"] = [1.0]


def in_order(**options: Any) -> Any:
    given = adaptra.Options(synchrony=adaptra.XOrder(1, **options))
    return compiled(MODEL, rows_of(0, 0), stages=1, microbatches=MICROBATCHES, options=given)


def step(pipe: adaptra.Pipeline, number: int = 0, batch: Any = None) -> None:
    args, kwargs = call(rows_of(pipe.replica, number) if batch is None else batch)
    pipe.step(*args, **kwargs)


def refused(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def note(what: str, run: Callable[[], object]) -> None:
        try:
            run()
        except AdaptraError as error:
            found[what] = str(error)

    with compiled(MODEL, rows_of(0, 0), stages=1, microbatches=MICROBATCHES, options=adaptra.Options()) as pipe:
        optimizer = adam(pipe.parameters())
        pipe.attach(optimizer)
        scaler, order = pipe.grad_scaler(init_scale=2.0**127, growth_interval=2), adaptra.XOrder(1)
        note("taken with a scaler", lambda: pipe.take_synchrony(order))
        batches = [args for args, _ in (call(rows_of(pipe.replica, number)) for number in range(2))]
        note("tried with a scaler", lambda: pipe.settle_synchrony(batches, allow=[order], rounds=3))
        for number in range(2):  # as before
            step(pipe, number)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        pipe.take_synchrony(adaptra.XOrder(2))  # which is exact
    with in_order() as pipe:
        note("scaler", pipe.grad_scaler)
        assert not pipe.grad_scaler(enabled=False).is_enabled()
        note("part", lambda: pipe.attach(torch.optim.SGD([*pipe.parameters()][:2], lr=0.1)))
        note("no optimizer", lambda: step(pipe))
    with in_order() as pipe:
        optimizer = adam(pipe.parameters())
        pipe.attach(optimizer)
        for state in ({"steps": 3}, {"steps": 3, "updates": -1}, {"steps": 3, "stages": {}}, None):
            note("state of another mode", lambda state=state: pipe.load_outer_state_dict(state))  # type: ignore[arg-type]
        note("no step", optimizer.step)
        step(pipe)
        note("timeline too early", pipe.timeline)
        note("exchange", pipe.exchange)
        note("state too early", pipe.outer_state_dict)
        note("another optimizer", lambda: pipe.attach(adam(pipe.parameters())))
        note("two steps", lambda: step(pipe, 1))
    with in_order() as pipe:
        groups: Any = [{"params": [*pipe.parameters()], "norm": lambda one: one}]  # which lies elsewhere on each rank
        optimizer = torch.optim.SGD(groups, lr=torch.tensor(RATES[rank]))
        pipe.attach(optimizer)
        step(pipe)
        # The first one to make the update can't know.
        note("schedule", lambda: (time.sleep(1.5 * rank), optimizer.step()))
    with in_order() as pipe:
        pipe.attach(adam(pipe.parameters()))
        if rank == 0:
            next(pipe.parameters()).register_hook(lambda gradient: 2 * gradient)
        note("hooks", lambda: step(pipe))
    with in_order() as pipe:
        optimizer = adam(pipe.parameters())
        pipe.attach(optimizer)
        for number in range(1 + rank):
            step(pipe, number)
            optimizer.step()
            if rank == 0:
                time.sleep(1.0)  # in which the other one makes an update alone

        def lacks() -> None:
            step(pipe, 3)

        if rank == 0:
            time.sleep(2.0)
            note("gone", lacks)
    with in_order() as pipe:
        optimizer = History(pipe.parameters(), first=1)
        pipe.attach(optimizer)
        step(pipe)
        note("state", optimizer.step)
    with in_order() as pipe:
        optimizer = History(pipe.parameters(), first=2)
        pipe.attach(optimizer)

        def train(late: float, steps: int) -> None:
            for number in range(steps):
                time.sleep(late * number)
                step(pipe, number)
                optimizer.step()

        # Of the other replica it is chance whether it hears of the error in a step or as it waits for all.
        note("state later" if rank else "other's", lambda: (train(1.0 * rank, 3 - rank), pipe.exchange()))
    with in_order() as pipe:
        optimizer = adam(pipe.parameters())
        pipe.attach(optimizer)
        pipe.replay([])
        note("log", lambda: step(pipe))
    with in_order() as pipe:
        optimizer = adam(pipe.parameters())
        pipe.attach(optimizer)
        for number in range(2):
            step(pipe, number)
            optimizer.step()
        pipe.exchange()
        log = [*pipe.exchange_log]
        note("log of another point", lambda: pipe.replay(log))
        strange = [{**log[0], "votes": [{**vote, "site": 2 * vote["site"]} for vote in log[0]["votes"]]}]
        note("log of others", lambda: pipe.replay(strange))
    with in_order() as pipe:
        pipe.attach(adam(pipe.parameters()))
        note("log of another point", lambda: pipe.replay(log[1:]))
        pipe.replay(log)
        note("log of other batches", lambda: step(pipe, batch=MODEL.rows(6, 0)))
    return found


def test_what_can_not_be_done_in_x_order_is_refused_in_words() -> None:
    ranks = run_processes(refused, 2)
    for what, row in ROWS_OF.items():
        texts = [one[what] for one in ranks if what in one]
        assert texts, what
        kind = KINDS.get(what, "PipelineError")
        for text in texts:  # or another replica's error has it
            check_documented(kind, text.partition(f"{kind}: ")[2] or text, row)
    assert all("lacks 2.weight, 2.bias, 4.weight and 1 more: " in one["part"] for one in ranks)
    first, second = (f"tensor({torch.tensor(one).item()})" for one in RATES)
    assert f"group 0: lr={second} here, {first} there" in ranks[1]["schedule"] and "schedule" not in ranks[0]


def alike(rank: int) -> dict[str, Any]:
    """All replicas in each update is exact; a loaded state begins again; other reductions."""
    found: dict[str, Any] = {}
    for name, options in {
        "exact": adaptra.Options(),
        "all": adaptra.Options(synchrony=adaptra.XOrder(2)),
        "not old": adaptra.Options(synchrony=adaptra.XOrder(1, staleness=0)),
    }.items():
        with compiled(MODEL, rows_of(0, 0), stages=1, microbatches=MICROBATCHES, options=options) as pipe:
            optimizer = adam(pipe.parameters())
            pipe.attach(optimizer)
            for number in range(3):
                time.sleep(0.1 * rank)
                step(pipe, number)
                optimizer.step()
                optimizer.zero_grad()
            found[name] = pipe.updates, bits_of(pipe.named_parameters())
            if name == "all":
                pipe.exchange()
                assert pipe.exchange_log == []
                pipe.replay([])
                try:
                    pipe.replay([{}])
                except StateError as error:
                    check_documented("StateError", str(error), OF_ALL)
                else:
                    raise AssertionError("a log of such a run is empty")
            if name != "not old":
                continue
            saved = {name: one.clone() for name, one in pipe.state_dict().items()}
            state = optimizer.state_dict()
            pipe.load_state_dict(saved)
            if rank == 0:  # the others take it
                optimizer.load_state_dict(state)
            else:
                optimizer.state.clear()
            step(pipe, 3)
            optimizer.step()
            found["went on"] = pipe.updates, bits_of(pipe.named_parameters())
    return found


def test_all_in_each_update_is_exact_and_a_loaded_state_begins_again() -> None:
    one, other = run_processes(alike, 2)
    assert one == other
    assert one["exact"] == one["all"] == one["not old"]
    assert one["went on"][0] == 4 and one["went on"][1] != one["exact"][1]


def changed(rank: int) -> list[Any]:
    """Parameters after steps, with changes to x-order and back between them, and a trial."""
    found: list[Any] = []
    with compiled(MODEL, rows_of(0, 0), stages=1, microbatches=MICROBATCHES, options=adaptra.Options()) as pipe:
        optimizer = adam(pipe.parameters())
        pipe.attach(optimizer)

        def train(steps: range) -> None:
            for number in steps:
                time.sleep(0.1 * rank * (pipe.synchrony != "exact"))
                step(pipe, number)
                optimizer.step()
                optimizer.zero_grad()
            found.append((pipe.synchrony, pipe.updates, bits_of(pipe.named_parameters())))

        train(range(2))
        pipe.take_synchrony(adaptra.XOrder(1, staleness=2))
        train(range(2, 5))
        pipe.take_synchrony("exact")
        train(range(5, 7))
        log, updates = pipe.exchange_log, pipe.updates
        made = next(one["number"] for one in log if one["votes"][0]["is_last"]) - 1  # exchanges are no updates
        assert made >= 3 and updates == 2 + made + 2
        batches = [args for args, _ in (call(rows_of(pipe.replica, number)) for number in range(7, 9))]
        trial = pipe.settle_synchrony(batches, allow=[adaptra.XOrder(1)], rounds=3)
        assert pipe.updates == updates
        train(range(9, 10))
        pipe.take_synchrony("exact")
        found.append(bits_of(pipe.named_parameters()))
    assert any(len(one["votes"]) == 1 for one in log), "a replica was late"
    assert trial is not None and [one.name for one in trial.modes] == ["exact", "asynchronous"]
    return found


def test_a_running_job_changes_to_x_order_and_back() -> None:
    one, other = run_processes(changed, 2)
    for of_rank, of_other in ((one, other), (other, one)):
        exact = [each for each in of_rank[:-1] if each[0] == "exact"]
        assert all(each in of_other for each in exact)
    assert one[-1] == other[-1]
