"""Mail on the wire: the text of every kind, and what is refused."""

from __future__ import annotations

import json
import re
from typing import Any, get_args

import pytest

from adaptra.errors import ControlError
from adaptra.runtime.control.mail.mail import (
    MAX_TEXT,
    BatchChecksums,
    BatchMismatch,
    Confirmed,
    Failed,
    Gathered,
    Joined,
    LogGrew,
    Mail,
    Measured,
    Proposed,
    Refused,
    Spread,
    TellAnew,
    Term,
    Withdrawn,
    from_json,
    to_json,
)
from adaptra.runtime.control_store.schema import encode
from adaptra.runtime.measuring.measurement import StepMeasurement

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
        BatchChecksums(1, "step", 0, {"inputs": 17}, 3),
        {"mail": "given", "rank": 1, "call": "step", "number": 0, "numbers": [["inputs", 17]], "step": 3},
    ),
    (BatchMismatch("other rows"), {"mail": "differed", "error": "other rows"}),
    (Failed(1, "broken"), {"mail": "failed", "rank": 1, "error": "broken"}),
    (
        Gathered(0, 1, 9, 12, (0.5, 0.25), (STEP,), ((3, "ab", None), (4, "cd", (1, 9)))),
        {
            "mail": "gathered",
            "root": 0,
            "sender": 1,
            "step": 9,
            "told": 12,
            "seconds": [0.5, 0.25],
            "news": [STEP.to_json()],
            "votes": [[3, "ab", None], [4, "cd", [1, 9]]],
        },
    ),
    (
        Spread(2, (Withdrawn(3), TellAnew())),
        {"mail": "spread", "root": 2, "mails": [{"mail": "withdrawn", "version": 3}, {"mail": "anew"}]},
    ),
    (TellAnew(), {"mail": "anew"}),
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


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("seconds", [0.5, -1], "field 'seconds': expected seconds, got -1"),
        ("news", [{}], "measurement: missing field 'rank'"),
        ("votes", [[3, "ab"]], "field 'votes': expected a version, a digest and ranks or null"),
        ("votes", [[3, "ab", [-1]]], "field 'votes': expected a version, a digest and ranks or null"),
        ("step", -2, "field 'step': expected a whole number of at least -1, got -2"),
    ],
)
def test_a_report_that_is_none_is_refused(field: str, value: object, message: str) -> None:
    text = to_json(Gathered(0, 1, 9, 12, (0.5,), (), ())) | {field: value}
    with pytest.raises(ControlError, match=re.escape(message)):
        from_json(json.dumps(text).encode())


def test_only_mail_for_all_ranks_is_spread() -> None:
    text = {"mail": "spread", "root": 0, "mails": [to_json(Failed(1, "broken"))]}
    with pytest.raises(ControlError, match="field 'mails': expected mail that goes to all ranks, got 'failed'"):
        from_json(json.dumps(text).encode())


def test_a_long_explanation_is_cut() -> None:
    assert to_json(Failed(0, "x" * 2 * MAX_TEXT))["error"] == "x" * MAX_TEXT
    assert to_json(Refused(0, 1, "x" * 2 * MAX_TEXT))["why"] == "x" * MAX_TEXT
