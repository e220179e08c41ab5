"""The options in groups: flat for users, and each field says whether all ranks must agree on it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from dataclasses import fields, replace
from typing import Any

import pytest

import adaptra
from adaptra.errors import OptionError
from adaptra.frontend.arguments.arguments import CompileArguments
from adaptra.program import Program
from adaptra.program.schedules import generate
from adaptra.runtime.options.options import GROUPS
from adaptra.runtime.options.rank_agreement import agreed_values, describe_value, has_statement

OTHERS: dict[str, Any] = {
    "adapt": False,
    "share": False,
    "schedule": "gpipe",
    "expected_delays": {(1, 2): {0.0: 0.9, 0.06: 0.1}},
    "seed": 1,
    "faults": ["delay 1-2 60ms @8"],
    "emulate": adaptra.EmulatedDevice(0.1, 0.1, 0.1),
    "delegate": [(1, 2)],
    "lossy_bf16": "slow",
    "survive": True,
    "inner": "aot_eager",
    "shapes": 4,
    "broadcast_buffers": False,
    "deterministic": True,
    "reduce": adaptra.Reduce(algorithm="auto", memory=1 << 20),
    "noise_scale": True,
    "synchrony": adaptra.Local(8, sites=2),
}
"""Another value than the default of every option that must be equal on all ranks."""

PER_RANK: dict[str, Any] = {
    "planning_seconds": 1.0,
    "timeout": 1.0,
    "addresses": ["10.0.0.1"],
    "captured": "error",
    "on_event": print,
    "telemetry": adaptra.Telemetry(metrics_port=9000),
}
"""Another value than the default of every other option."""


@pytest.mark.parametrize("kind", [adaptra.Options, CompileArguments])
def test_every_field_says_whether_it_must_be_equal_on_all_ranks(kind: Any) -> None:
    assert not [one.name for one in fields(kind) if not has_statement(one)]


def test_every_option_is_in_one_group() -> None:
    counts = Counter(one.name for group in GROUPS for one in fields(group))
    assert counts == Counter(one.name for one in fields(adaptra.Options))
    assert set(counts.values()) == {1}
    assert set(counts) == OTHERS.keys() | PER_RANK.keys()


@pytest.mark.parametrize("name", OTHERS)
def test_an_agreed_option_changes_the_compared_values_and_only_its_own(name: str) -> None:
    usual, other = adaptra.Options(), replace(adaptra.Options(), **{name: OTHERS[name]})
    before, after = agreed_values(usual, "options."), agreed_values(other, "options.")
    assert {key for key, value in after.items() if before[key] != value} == {f"options.{name}"}


@pytest.mark.parametrize("name", PER_RANK)
def test_an_option_of_one_rank_is_not_compared(name: str) -> None:
    usual, other = adaptra.Options(), replace(adaptra.Options(), **{name: PER_RANK[name]})
    assert agreed_values(usual) == agreed_values(other)


def test_a_group_checks_its_own_fields() -> None:
    given: dict[str, Any] = {name: object() for name in (OTHERS.keys() | PER_RANK.keys()) - {"inner"}}
    for group in GROUPS:
        for name in given.keys() & {one.name for one in fields(group)}:
            with pytest.raises(OptionError, match=f"^{name}=<object") as alone:
                group(**{name: given[name]})
            with pytest.raises(OptionError) as flat:
                adaptra.Options(**{name: given[name]})
            assert str(alone.value) == str(flat.value)


def test_short_values_are_compared_as_they_are() -> None:
    assert describe_value("1f1b") == "1f1b"
    assert describe_value([(1, 2)]) == describe_value(((1, 2),)) == "[(1, 2)]"
    assert describe_value(None) == "None"


def test_long_values_are_cut_and_differ_by_a_hash() -> None:
    program = generate("1f1b", 4, 16)
    last = program.orders[-1]
    other = Program.of_pipeline(program.name, program.placement, program.microbatches, (*program.orders[:-1], last[:-1]))
    shown = [describe_value(one) for one in (program, other)]
    assert shown[0] != shown[1] and shown[0].startswith("schedule 1f1b ") and max(map(len, shown)) < 100
    assert not any("\n" in one for one in shown)
    assert describe_value("x" * 100) == "x" * 100 and describe_value("x" * 101).endswith(")")


def test_every_process_describes_a_value_alike() -> None:
    script = """
import adaptra
from adaptra.program.schedules import generate
from adaptra.runtime.options.rank_agreement import agreed_values
device = adaptra.EmulatedDevice((0.1,) * 64, 0.2, 0.3)
print(agreed_values(adaptra.Options(schedule=generate("zb_h1", 4, 8), emulate=device, faults=["delay 1-2 60ms @8"] * 9)))
"""
    found = {
        subprocess.run(
            [sys.executable, "-c", script],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1 and "(hash " in found.pop()
