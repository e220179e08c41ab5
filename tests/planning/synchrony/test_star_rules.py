"""STAR's rules against a table of what they choose and predict, and what the rules can't be trusted in."""

from __future__ import annotations

import csv

import pytest
from paths import ROOT

from adaptra.planning.synchrony.star import StarRule, star_choice, star_groups, star_references

with (ROOT / "bench" / "traces" / "star_modes.csv").open() as _file:
    ROWS = [*csv.DictReader(_file)]


def times_of(row: dict[str, str]) -> list[float]:
    slow = int(row["stragglers"])
    return [0.3] * (int(row["n"]) - slow) + [0.3 * float(row["slowdown"])] * slow


@pytest.mark.parametrize("rule", StarRule)
def test_every_row_is_reproduced(rule: StarRule) -> None:
    assert len(ROWS) == 128
    for row in ROWS:
        said = star_choice(rule, times_of(row), float(row["phi"]), 128)
        choices = {"first": said.first, "best": said.best}
        for name, x in choices.items():
            if (column := f"{rule.value}_{name}") in row:
                assert x == int(row[column]), row
                assert said.of_all(x) == pytest.approx(float(row[f"{column}_of_all"]), abs=1e-4), row


def test_every_row_of_groups_is_reproduced() -> None:
    for row in ROWS:
        sizes, cost = star_groups(times_of(row), float(row["phi"]), 128, 0.05)
        assert "+".join(map(str, sizes)) == row["groups"] and cost == pytest.approx(float(row["groups_of_all"]), abs=1e-4)


def test_the_third_rule_is_asynchronous_where_nobody_is_slow() -> None:
    assert star_choice(StarRule.EVENTS, [0.3] * 8, 1000, 128).first == 1
    assert star_choice(StarRule.FASTEST, [0.3] * 8, 1000, 128).first == 8


def test_the_third_rule_is_no_reference_where_it_would_take_minutes() -> None:
    assert "events" in star_references([0.3] * 8, 1000, 128, 0.05)
    assert "events" not in star_references([0.3] * 65, 1000, 128, 0.05)
