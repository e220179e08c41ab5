"""Trials of modes of synchronisation in a running job: the decision, and what is left of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from errors_table import check_documented, error_of
from processes import run_processes
from test_mode_changes import adam
from training import MIXED, call, compiled

import adaptra
from adaptra.planning.synchrony.trial import Trial, TrialRound, TriedMode, choose

pytestmark = pytest.mark.processes

ROWS, MICROBATCHES, STEPS, AT, ROUNDS = 8, 2, 6, 3, 3
MEAN = adaptra.Local(2, outer=adaptra.Outer(lr=1.0, momentum=0.0, nesterov=False))
"""Local steps whose exchange takes the mean of the sites' parameters."""
FAR = adaptra.Local(2, outer=adaptra.Outer(lr=1000.0, momentum=0.0, nesterov=False))
"""Local steps whose exchange goes far too far."""


def batch(replica: int, step: int) -> tuple[Any, ...]:
    args, _ = call(MIXED.rows(ROWS, 100 * replica + step))
    return args


def run(before: Any, broadcast: bool = True, pause: float = 0.0, scales: bool = False) -> dict[str, Any]:
    """A rank's state after each step, with a trial or a given change before one step.

    Args:
        before: The mode to take before that step, or the modes to try; None for neither.
        broadcast: Whether the first replica's buffers count.
        pause: The seconds that each exact update takes longer.
        scales: Whether gradients are scaled.
    """
    events: list[adaptra.ControlEvent] = []
    options = adaptra.Options(on_event=events.append, broadcast_buffers=broadcast)
    states: list[Any] = []
    found: dict[str, Any] = {}
    with compiled(MIXED, MIXED.rows(ROWS, 0), stages=2, microbatches=MICROBATCHES, options=options) as pipe:
        optimizer = adam(pipe.parameters())
        scaler = pipe.grad_scaler(growth_interval=2) if scales else None

        def update() -> None:
            if pipe.synchrony == "exact":
                time.sleep(pause)
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad(set_to_none=False)

        for step in range(STEPS):
            if step == AT and isinstance(before, list):
                given = [batch(pipe.replica, 50 + number) for number in range(4)]
                how: dict[str, Any] = {"update": update} if pause else {}
                found["trial"] = pipe.settle_synchrony(given, optimizer, allow=before, rounds=ROUNDS, **how)
            elif step == AT and before is not None:
                mode: Any = before
                pipe.take_synchrony(mode, optimizer)
            loss = pipe.step(*batch(pipe.replica, step))
            update()
            state = {name: one.detach().clone() for name, one in pipe.held_tensors()}
            stepped = [(name, optimizer.state.get(one)) for name, one in pipe.named_parameters()]
            moments = {name: one["exp_avg_sq"].clone() for name, one in stepped if one is not None}
            states.append((loss, state, moments, None if scaler is None else scaler.state_dict()))
        found["mode"] = pipe.synchrony
    found["states"] = states
    found["told"] = [str(one.text) for one in events if one.kind.value == "trial"]
    return found


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(same(*pair) for pair in zip(one, other, strict=True))
    return one == other


def compared(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """The second run, with the steps after which its state was another than the first one's."""
    pairs = zip(one["states"], other.pop("states"), strict=True)
    return {**other, "differ": [step for step, pair in enumerate(pairs) if not same(*pair)]}


def refused(rank: int) -> dict[str, tuple[str, str]]:
    """What a trial is refused for; the pipeline goes on."""
    found: dict[str, tuple[str, str]] = {}
    with compiled(MIXED, MIXED.rows(ROWS, 0), stages=2, microbatches=MICROBATCHES) as pipe:
        pipe.attach(adam(pipe.parameters()))
        given: Any = [batch(pipe.replica, 0)]
        wrong: Any = {"batches": ([], given[0][0], [3]), "allow": ([], ["exact"], MEAN), "rounds": (2, 3.0, True)}
        for name, values in wrong.items():
            for number, value in enumerate(values):
                arguments: Any = {"allow": [MEAN], "rounds": 3, "batches": given, name: value}
                batches = arguments.pop("batches")
                found[f"{name} {number}"] = error_of(lambda batches=batches, of=arguments: pipe.settle_synchrony(batches, **of))
        found["other"] = error_of(lambda: pipe.settle_synchrony(given, allow=[MEAN], rounds=3 + rank))
        found["sites"] = error_of(lambda: pipe.settle_synchrony(given, allow=[adaptra.Local(2, sites=3)]))
        pipe.step(*given[0])
        one: Any = [] if rank == 1 else given
        found["alone"] = error_of(lambda: pipe.settle_synchrony(one, allow=[MEAN]))
        pipe.step(*given[0])

    def of_step(step: int, replica: int) -> tuple[Any, ...]:
        return batch(replica, step)

    options: Any = {"stages": 2, "microbatches": MICROBATCHES, "batches": of_step}
    with adaptra.compile(MIXED.make(), loss=MIXED.loss, **options) as pipe:
        pipe.step()
        found["compile"] = error_of(lambda: pipe.settle_synchrony(given, adam(pipe.parameters()), allow=[MEAN]))
    return found


def body(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, options in {"usual": {}, "scaled": {"broadcast": False, "scales": True}}.items():
        found[name] = compared(run(None, **options), run([FAR], **options))
    found["faster"] = compared(run(MEAN), run([FAR, MEAN], pause=0.2))
    found["refused"] = refused(rank)
    return found


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return run_processes(body, 4)


@pytest.mark.parametrize("name", ["usual", "scaled"])
def test_a_trial_that_ends_in_exact_changes_no_bit(found: list[dict[str, Any]], name: str) -> None:
    """Dropout, BatchNorm's statistics, moments and the scale are what they would have been."""
    for rank in found:
        assert rank[name]["mode"] == "exact"
        assert not rank[name]["differ"]


def test_a_mode_that_is_surely_faster_goes_on_as_if_it_had_been_taken(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["faster"]["mode"] == MEAN
        assert not rank["faster"]["differ"]


def test_all_ranks_know_the_same_figures(found: list[dict[str, Any]]) -> None:
    trials: list[Trial] = [rank["faster"]["trial"] for rank in found]
    assert all(one == trials[0] for one in trials)
    exact, far, mean = trials[0].modes
    assert [one.name for one in trials[0].modes] == ["exact", "local=2", "local=2"]
    assert all(one.seconds >= 2 * 0.2 for one in exact.rounds)
    assert far.rounds[0].after > 10 * far.rounds[0].before
    assert mean.rounds[0].before == pytest.approx(exact.rounds[0].before, rel=0.05), (
        "but for each site's statistics of BatchNorm"
    )
    told = found[3]["faster"]["told"]
    assert told == [str(trials[0])] and told[0].startswith("local=2 goes on; 3 rounds of 2 steps: exact ")


ROWS_OF_ERRORS = {
    "batches": (
        "settle_synchrony: batches=…: expected a list of batches, each a tuple of inputs and targets or a mapping of keywords"
    ),
    "allow": "settle_synchrony: allow=…: expected a list of adaptra.Stealing(...), Deadline(...), Local(...) or XOrder(...)",
    "rounds": "settle_synchrony: rounds=…: expected a whole number of at least 3",
    "compile": (
        "settle_synchrony: compile(batches=...) gives each step its batch: expected a pipeline whose steps are given theirs"
    ),
    "other": "…: nothing has moved, since the … of rank … is …, and that of rank 0 …: expected the same on every rank",
    "sites": "Local(sites=…) with … replicas: expected sites of equally many replicas",
}


@pytest.mark.parametrize("what", ROWS_OF_ERRORS)
def test_a_trial_is_refused(found: list[dict[str, Any]], what: str) -> None:
    for rank in found:
        refusals = [one for name, one in rank["refused"].items() if name.split()[0] == what]
        assert refusals
        for kind, text in refusals:
            check_documented(kind, text, ROWS_OF_ERRORS[what])


def test_what_one_rank_is_given_keeps_all(found: list[dict[str, Any]]) -> None:
    kind, text = found[1]["refused"]["alone"]
    check_documented(kind, text, ROWS_OF_ERRORS["batches"])
    for rank in (found[0], *found[2:]):
        kind, text = rank["refused"]["alone"]
        check_documented(kind, text, "…: nothing has moved, since rank … can't: …")


def mode(name: str, seconds: Sequence[float], afters: Sequence[float]) -> TriedMode:
    rounds = [TrialRound(one, 2.0, after) for one, after in zip(seconds, afters, strict=True)]
    return TriedMode(name, tuple(rounds))


EXACT = mode("exact", (1.0, 1.1, 0.9), (1.8, 1.8, 1.8))


@pytest.mark.parametrize(
    ("others", "chosen"),
    [
        ((mode("tie", (1.0, 1.1, 0.9), (1.8, 1.8, 1.8)),), 0),
        ((mode("within the noise", (0.9, 1.2, 0.8), (1.8, 1.8, 1.8)),), 0),
        ((mode("twice as fast", (0.5, 0.55, 0.45), (1.8, 1.8, 1.8)),), 1),
        ((mode("fast, and learns nothing", (0.1, 0.1, 0.1), (2.0, 2.0, 2.0)),), 0),
        ((mode("diverges", (0.1, 0.1, 0.1), (float("nan"),) * 3),), 0),
        ((mode("diverges", (0.1, 0.1, 0.1), (float("inf"),) * 3),), 0),
        ((mode("twice", (0.5, 0.55, 0.45), (1.8,) * 3), mode("thrice", (0.33, 0.36, 0.3), (1.8,) * 3)), 2),
    ],
)
def test_exact_wins_what_noise_can_not_tell_apart(others: Sequence[TriedMode], chosen: int) -> None:
    assert choose([EXACT, *others]) == chosen
