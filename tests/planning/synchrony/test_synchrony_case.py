"""Cases and modes of synchronisation: what is read, and what is refused at the door."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from paths import DOCS

from adaptra.errors import CaseError, OptionError
from adaptra.planning.synchrony.case import FIELDS, SynchronyCase, parse_case
from adaptra.planning.synchrony.modes import KINDS, Deadline, Local, Mode, Synchronous, XOrder, check_mode, kind_of, parse_mode

MODES: list[Mode] = [Synchronous(), Synchronous(True), XOrder(7), XOrder(1), XOrder(groups="auto"), Deadline(0.9), Local(32)]


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_mode_is_its_text(mode: Mode) -> None:
    assert parse_mode(str(mode)) == mode
    assert kind_of(mode) in KINDS


def test_usual_modes_depend_on_who_is_slow() -> None:
    def names(case: SynchronyCase) -> list[str]:
        return [str(mode) for mode in case.all_modes]

    assert names(SynchronyCase(1, 1, {})) == ["exact"]
    assert names(SynchronyCase(2, 1, {})) == ["exact", "stealing", "asynchronous", "deadline=0.9", "local=32"]
    slow = SynchronyCase(8, 1, {0: 2, 3: 2})
    assert names(slow) == ["exact", "stealing", "x-order=6", "groups", "asynchronous", "deadline=0.9", "local=32"]
    assert names(SynchronyCase(8, 1, {}, modes=("local=4", "exact", "local=4"))) == ["exact", "local=4"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "c.json: missing field 'replicas'"),
        ({"replicas": 8}, "c.json: missing field 'phi'"),
        ({"replicas": 0, "phi": 1}, "c.json: field 'replicas': expected a whole number of at least 1, got 0"),
        ({"replicas": 8, "phi": 0}, "c.json: phi 0.0: expected a number above 0"),
        ({"replicas": 8, "phi": "x"}, "c.json: field 'phi': expected a finite number, got 'x'"),
        ({"replicas": 8, "phi": 1, "batch": -1}, "c.json: batch -1.0: expected a number above 0"),
        ({"replicas": 8, "phi": 1, "pauses": 2}, "c.json: pauses 2.0: expected a number of at least 0, at most 1"),
        ({"replicas": 8, "phi": 1, "exchange": -1}, "c.json: exchange -1.0: expected a number of at least 0, at most 1e+18"),
        ({"replicas": 8, "phi": 1e308, "batch": 1e-308}, "c.json: phi 1e+308: expected a number of 1e-18 to 1e+18"),
        ({"replicas": 8, "phi": 1, "batch": 1e-308}, "c.json: batch 1e-308: expected a number of 1e-18 to 1e+18"),
        ({"replicas": 8, "phi": 1, "slow": {"0": 1e200}}, "c.json: slow 0=1e+200: expected a factor of at most 1e+18"),
        (
            {"replicas": 8, "phi": 1, "microbatches": 0},
            "c.json: field 'microbatches': expected a whole number of at least 1, got 0",
        ),
        ({"replicas": 8, "phi": 1, "slow": {"8": 2}}, "c.json: slow 8: expected a replica of 0..7"),
        ({"replicas": 8, "phi": 1, "slow": {"0": 0.5}}, "c.json: slow 0=0.5: expected a factor of at least 1"),
        ({"replicas": 8, "phi": 1, "slow": {"0": "2"}}, "c.json: field 'slow.0': expected a factor of at least 1, got '2'"),
        (
            {"replicas": 8, "phi": 1, "slow": {"a": 2}},
            "c.json: field 'slow': expected numbers of replicas with their factors, got 'a'",
        ),
        ({"replicas": 8, "phi": 1, "slow": [2]}, "c.json: field 'slow': expected a JSON object, got [2]"),
        ({"replicas": 8, "phi": 1, "modes": ["x-order=9"]}, "c.json: mode x-order=9: expected 1 to 8 replicas in an update"),
        (
            {"replicas": 8, "phi": 1, "modes": ["deadline=2"]},
            "c.json: Deadline: quorum=2.0: expected a share above 0, and at most 1",
        ),
        ({"replicas": 8, "phi": 1, "modes": ["local=0"]}, "c.json: Local: every=0: expected a whole number of at least 1"),
        ({"replicas": 1, "phi": 1, "modes": ["local=2"]}, "c.json: mode local=2: expected at least 2 replicas, which exchange"),
        (
            {"replicas": 8, "phi": 1, "modes": ["fast"]},
            "c.json: mode 'fast': expected exact, stealing, groups, asynchronous, x-order=N, deadline=SHARE or local=STEPS",
        ),
        ({"replicas": 8, "phi": 1, "allow": ["all"]}, "c.json: allow 'all': expected some of exact, x-order, deadline, local"),
    ],
)
def test_a_case_that_is_wrong_is_refused_in_one_line(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(CaseError) as caught:
        parse_case(fields, "c.json")
    assert str(caught.value) == message


def test_an_unknown_field_is_named_with_those_there_are() -> None:
    with pytest.raises(CaseError, match=r"unknown field 'jiter': expected some of allow, batch, exchange, jitter, "):
        parse_case({"replicas": 8, "phi": 1, "jiter": 0.3}, "")


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        (XOrder(x=9), "mode x-order=9: expected 1 to 8 replicas in an update"),
        (XOrder(groups=((0, 1), (1,))), "groups ((0, 1), (1,)): expected each replica of 0..7 in one group"),
    ],
)
def test_modes_that_so_many_replicas_cannot_train_in_are_refused(mode: Mode, message: str) -> None:
    with pytest.raises(OptionError) as caught:
        check_mode(mode, 8)
    assert str(caught.value) == message


def test_the_documented_case_is_read_and_every_field_has_a_row() -> None:
    text = (DOCS / "formats.md").read_text().partition("## Cases of synchronisation")[2].partition("\n## ")[0]
    (example,) = re.findall(r"```json\n(.*?)```", text, re.DOTALL)
    assert parse_case(json.loads(example), "").allow == ("deadline",)
    rows = re.findall(r"^\| (`.*?) \|", text, re.MULTILINE)
    assert {field for row in rows for field in re.findall(r"`(\w+)`", row)} == set(FIELDS)
