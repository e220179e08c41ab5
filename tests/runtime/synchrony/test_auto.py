"""Modes that are tried where something is slow: once for each regime, and never where nothing is."""

from __future__ import annotations

from typing import Any

import pytest
from errors_table import check_documented
from processes import run_processes
from test_x_order import MICROBATCHES, MODEL, adam, bits_of, rows_of
from training import call, compiled

import adaptra
from adaptra.errors import AdaptraError, PipelineError

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
        args, kwargs = call(rows_of(pipe.replica, 0))
        pipe.step(*args, **kwargs)
        with pytest.raises(AdaptraError, match="gradient"):
            pipe.settle_synchrony(batches, rounds=3)
        optimizer.zero_grad()
        trial = pipe.settle_synchrony(batches, rounds=3)
        found["slow"] = None if trial is None else (trial.regime, [one.name for one in trial.modes], str(trial))
        train(4)
        found["again"] = pipe.settle_synchrony(batches, rounds=3)
        pipe.take_synchrony("exact")
        found["bits"] = bits_of(pipe.named_parameters())
    return found


def test_a_trial_is_due_once_for_a_regime_and_never_where_nothing_is_slow() -> None:
    """One that is refused before it tries anything has not been there."""
    ranks = run_processes(body, 2)
    for one in ranks:
        check_documented("PipelineError", one["untried"], UNTRIED)
        assert one["healthy"] is None and one["again"] is None
        regime, modes, text = one["slow"]
        assert regime.startswith("rank 1 ") and modes == ["exact", "local=2"]
        assert text.endswith(f"; before: {regime}")
    assert ranks[0]["slow"] == ranks[1]["slow"] and ranks[0]["bits"] == ranks[1]["bits"]


STEALING, DEADLINE = adaptra.Stealing(4), adaptra.Deadline(0.7)


def slow_by_turns(_rank: int) -> dict[str, Any]:
    """A trial where each replica is slow in every other step."""
    turns = [f"slow {step % 2}.0 4x @{step}..{step + 1}" for step in range(300)]
    options = adaptra.Options(
        synchrony=adaptra.Auto((DEADLINE, STEALING)), emulate=adaptra.EmulatedDevice(0.005, 0.005, 0.005), faults=turns
    )
    with compiled(MODEL, rows_of(0, 0), stages=1, microbatches=4, options=options) as pipe:
        optimizer = adam(pipe.parameters())
        pipe.attach(optimizer)
        for number in range(8):
            args, kwargs = call(rows_of(pipe.replica, number))
            pipe.step(*args, **kwargs)
            optimizer.step()
            optimizer.zero_grad()
        batches = [args for args, _ in (call(rows_of(pipe.replica, 100 + number)) for number in range(3))]
        trial, mode = pipe.settle_synchrony(batches, rounds=3), pipe.synchrony
        pipe.take_synchrony("exact")
        return {"trial": trial, "mode": mode, "bits": bits_of(pipe.named_parameters())}


def test_what_answers_slowness_by_turns_is_tried_and_goes_on() -> None:
    found, other = run_processes(slow_by_turns, 2)
    assert found == other, "figures, mode and bits"
    # A busy machine makes one rank slower on the whole, and sums longer, beside that.
    assert "longer by turns" in found["trial"].regime
    exact, deadline, stealing = (tried.rounds for tried in found["trial"].modes)
    assert all(
        one.seconds < 0.8 * pair.seconds for rounds in (deadline, stealing) for one, pair in zip(rounds, exact, strict=True)
    )
    assert [(one.before, one.after) for one in stealing] == [(one.before, one.after) for one in exact], "the bits of exact"
    assert [one.before for one in deadline] == [one.before for one in exact], "nothing is left of a round"
    assert [one.after for one in deadline] != [one.after for one in exact]
    assert found["mode"] == (DEADLINE, STEALING)[found["trial"].chosen - 1]
