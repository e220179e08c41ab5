"""Modes that are tried where something is slow: once for each regime, and never where nothing is."""

from __future__ import annotations

from typing import Any

import pytest
from errors_table import check_documented
from processes import run_processes
from test_x_order import MICROBATCHES, MODEL, adam, bits_of, rows_of
from training import call, compiled

import adaptra
from adaptra.errors import PipelineError

pytestmark = [pytest.mark.processes, pytest.mark.timed]

SLOW, FACTOR = 6, 2
"""The step from which the second replica is slow, and how much."""
UNTRIED = "…: no step has run in this mode: expected some, which show whether anything is slow"


def body(_rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    options = adaptra.Options(
        synchrony=adaptra.Auto((adaptra.Local(2),)),
        emulate=adaptra.EmulatedDevice(0.03, 0.03, 0.03),
        faults=[f"slow 1.0 {FACTOR}x @{SLOW}"],
    )
    with compiled(MODEL, rows_of(0, 0), stages=1, microbatches=MICROBATCHES, options=options) as pipe:
        optimizer = adam(pipe.parameters())
        pipe.attach(optimizer)
        batches = [args for args, _ in (call(rows_of(pipe.replica, 100 + number)) for number in range(2))]
        with pytest.raises(PipelineError) as caught:
            pipe.settle_synchrony(batches)
        found["untried"] = str(caught.value)

        def train(steps: int) -> None:
            for number in range(steps):
                args, kwargs = call(rows_of(pipe.replica, number))
                pipe.step(*args, **kwargs)
                optimizer.step()
                optimizer.zero_grad()

        train(SLOW)
        found["healthy"] = pipe.settle_synchrony(batches, rounds=3)
        train(8)
        trial = pipe.settle_synchrony(batches, rounds=3)
        found["slow"] = None if trial is None else (trial.regime, [one.name for one in trial.modes], str(trial))
        train(4)
        found["again"] = pipe.settle_synchrony(batches, rounds=3)
        pipe.take_synchrony("exact")
        found["bits"] = bits_of(pipe.named_parameters())
    return found


def test_a_trial_is_due_once_for_a_regime_and_never_where_nothing_is_slow() -> None:
    ranks = run_processes(body, 2)
    for one in ranks:
        check_documented("PipelineError", one["untried"], UNTRIED)
        assert one["healthy"] is None and one["again"] is None
        regime, modes, text = one["slow"]
        assert regime.startswith("rank 1 ") and modes == ["exact", "local=2"]
        assert text.endswith(f"; before: {regime}")
    assert ranks[0]["slow"] == ranks[1]["slow"] and ranks[0]["bits"] == ranks[1]["bits"]


def slow_by_turns(_rank: int, allowed: Any, microbatches: int) -> dict[str, Any]:
    """A trial of a mode where each replica is slow in every other step; exact steps follow."""
    turns = [f"slow {step % 2}.0 4x @{step}..{step + 1}" for step in range(300)]
    options = adaptra.Options(
        synchrony=adaptra.Auto((allowed,)), emulate=adaptra.EmulatedDevice(0.005, 0.005, 0.005), faults=turns
    )
    losses: list[float] = []
    with compiled(MODEL, rows_of(0, 0), stages=1, microbatches=microbatches, options=options) as pipe:
        optimizer = adam(pipe.parameters())
        pipe.attach(optimizer)

        def train(steps: int) -> None:
            for number in range(steps):
                args, kwargs = call(rows_of(pipe.replica, number))
                losses.append(float(pipe.step(*args, **kwargs)))
                optimizer.step()
                optimizer.zero_grad()

        train(8)
        batches = [args for args, _ in (call(rows_of(pipe.replica, 100 + number)) for number in range(3))]
        trial, mode = pipe.settle_synchrony(batches, rounds=3), pipe.synchrony
        pipe.take_synchrony("exact")
        train(3)
        return {"trial": trial, "mode": mode, "losses": losses, "bits": bits_of(pipe.named_parameters())}


def both_by_turns(rank: int) -> list[dict[str, Any]]:
    return [slow_by_turns(rank, one, 4) for one in (adaptra.Stealing(4), adaptra.Deadline(0.7))]


def test_what_answers_slowness_by_turns_is_tried_and_goes_on() -> None:
    ranks = run_processes(both_by_turns, 2)
    assert ranks[0] == ranks[1], "figures, losses and bits"
    stealing, deadline = ranks[0]
    for one, mode in ((stealing, adaptra.Stealing(4)), (deadline, adaptra.Deadline(0.7))):
        assert one["mode"] == mode
        assert one["trial"].regime.endswith("longer by turns") and not one["trial"].regime.startswith("rank")
        exact, other = (tried.rounds for tried in one["trial"].modes)
        assert all(pair[1].seconds < 0.8 * pair[0].seconds for pair in zip(exact, other, strict=True))
    exact, other = (tried.rounds for tried in stealing["trial"].modes)
    assert [one.after for one in exact] == [one.after for one in other], "stealing has the bits of exact"
    assert (deadline["losses"], deadline["bits"]) == (stealing["losses"], stealing["bits"]), "nothing is left of a trial"
