"""The updates that a loss takes by the line through the logarithms, with its interval, and where nothing can be said."""

from __future__ import annotations

import math
import random

import pytest

from adaptra.errors import CaseError
from adaptra.planning.synchrony.loss_curve import updates_to


def losses(steps: int, noise: float = 0.0, seed: int = 0, power: float = 0.3) -> dict[int, float]:
    chance = random.Random(seed)
    return {step: 5 * (step + 1) ** -power * math.exp(chance.gauss(0, noise)) for step in range(steps)}


def test_a_power_law_is_found_again() -> None:
    found = updates_to(0.5, losses(400))
    assert found.value == pytest.approx(10 ** (1 / 0.3), rel=0.01)
    assert found.low == pytest.approx(found.value, rel=0.01) and found.high == pytest.approx(found.value, rel=0.01)
    assert updates_to(2.0, losses(400)).value == pytest.approx(2.5 ** (1 / 0.3), rel=0.01), "one that is reached already"


def test_the_interval_has_the_true_number_as_often_as_it_says() -> None:
    true = 10 ** (1 / 0.3)
    found = [updates_to(0.5, losses(400, 0.2, seed)) for seed in range(200)]
    assert 180 <= sum(one.low <= true <= one.high for one in found) <= 199
    assert all(one.low < one.value < one.high for one in found)


def test_missing_losses_leave_the_line_where_it_is() -> None:
    whole = losses(400)
    kept = {step: one for step, one in whole.items() if step % 3}
    assert updates_to(0.5, kept).value == pytest.approx(updates_to(0.5, whole).value, rel=0.01)


@pytest.mark.parametrize(
    ("loss", "given", "message"),
    [
        (0.5, losses(20), "18 losses behind the first tenth of the updates: expected at least 20"),
        (0.5, {}, "0 losses behind the first tenth of the updates: expected at least 20"),
        (0.5, losses(100, 0.5, power=0.0), "the losses of 100 updates don't fall beyond chance: expected some that do"),
        (0.5, losses(100, power=-0.1), "the losses of 100 updates don't fall beyond chance: expected some that do"),
        (0.1, losses(400), "the line through the losses of 400 updates does not come to 0.1 in 100 times as many"),
        (0.0, losses(100), "a loss of 0 or less: expected losses above 0, as a power of the updates has no others"),
        (0.5, losses(99) | {99: -1.0}, "a loss of 0 or less: expected losses above 0, as a power of the updates has no others"),
    ],
)
def test_what_can_not_be_said_is_refused(loss: float, given: dict[int, float], message: str) -> None:
    with pytest.raises(CaseError) as caught:
        updates_to(loss, given)
    assert str(caught.value) == message
