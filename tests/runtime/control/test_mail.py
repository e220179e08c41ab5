"""Mail on the wire: the text of every kind, and what is refused."""

from __future__ import annotations

import json
from typing import Any, get_args

import pytest

from adaptra.errors import ControlError
from adaptra.runtime.control.mail import (
    MAX_TEXT,
    BatchChecksums,
    BatchMismatch,
    Confirmed,
    Failed,
    Joined,
    LogGrew,
    Mail,
    Measured,
    Proposed,
    Refused,
    Term,
    Withdrawn,
    from_json,
    to_json,
)
from adaptra.runtime.control_store.schema import encode
from adaptra.runtime.detection.measurement import StepMeasurement

STEP = StepMeasurement(1, 7, 0.5, (), ())

WIRE: list[tuple[Mail, dict[str, Any]]] = [
    (Measured(STEP), {"mail": "measured", "measurement": STEP.to_json()}),
    (Proposed(3, {"any": "plan"}), {"mail": "proposed", "version": 3, "plan": {"any": "plan"}}),
    (Confirmed(1, 3, "ab"), {"mail": "confirmed", "rank": 1, "version": 3, "digest": "ab"}),
    (Refused(1, 3, "no room"), {"mail": "refused", "rank": 1, "version": 3, "why": "no room"}),
    (Withdrawn(3), {"mail": "withdrawn", "version": 3}),
    (Joined(1, 4, -1), {"mail": "joined", "rank": 1, "term": 4, "reached": -1}),
    (Term(4), {"mail": "term", "term": 4}),
    (LogGrew(5, 9, 3), {"mail": "log", "position": 5, "until": 9, "version": 3}),
    (
        BatchChecksums(1, "step", 0, {"inputs": 17}),
        {"mail": "given", "rank": 1, "call": "step", "number": 0, "numbers": [["inputs", 17]]},
    ),
    (BatchMismatch("other rows"), {"mail": "differed", "error": "other rows"}),
    (Failed(1, "broken"), {"mail": "failed", "rank": 1, "error": "broken"}),
]


def test_these_are_all_kinds_of_mail() -> None:
    assert {type(mail) for mail, _ in WIRE} == set(get_args(Mail))


@pytest.mark.parametrize(("mail", "expected"), WIRE, ids=[expected["mail"] for _, expected in WIRE])
def test_the_text_of_each_kind_is_read_back_to_equal_mail(mail: Mail, expected: dict[str, Any]) -> None:
    text = encode(to_json(mail))
    assert json.loads(text) == expected and [*json.loads(text)] == [*expected], "in this order"
    assert from_json(text.encode()) == mail


@pytest.mark.parametrize(("mail", "expected"), WIRE, ids=[expected["mail"] for _, expected in WIRE])
def test_a_missing_field_is_named(mail: Mail, expected: dict[str, Any]) -> None:
    *_, last = expected
    with pytest.raises(ControlError, match=last):
        from_json(json.dumps({name: value for name, value in expected.items() if name != last}).encode())


def test_a_long_explanation_is_cut() -> None:
    assert to_json(Failed(0, "x" * 2 * MAX_TEXT))["error"] == "x" * MAX_TEXT
    assert to_json(Refused(0, 1, "x" * 2 * MAX_TEXT))["why"] == "x" * MAX_TEXT
