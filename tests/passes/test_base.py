"""Pipelines: their text form, the errors of it, and that the runner verifies what passes make."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest

from adaptra.errors import PassError, ScheduleError
from adaptra.passes import (
    PASSES,
    AdaptOrder,
    FuseBackward,
    InsertComm,
    LowerComm,
    Pass,
    PassPipeline,
    SplitBackward,
    parse_pipeline,
)
from adaptra.passes.base import Count, EdgeSet, Word
from adaptra.program import Program
from adaptra.program.schedules import one_f_one_b
from adaptra.simulation.cost import CostModel

COST = CostModel.uniform(2, 10, 10, 10)


@pytest.mark.parametrize(
    ("text", "passes"),
    [
        ("split-backward", (SplitBackward(),)),
        ("adapt-order{in_flight=12}", (AdaptOrder(in_flight=12),)),
        ("adapt-order{in_flight=4+3+2}", (AdaptOrder(in_flight=(4, 3, 2)),)),
        ("adapt-order{in_flight=12,effort=1000}", (AdaptOrder(in_flight=12, effort=1000),)),
        ("insert-comm", (InsertComm(),)),
        ("insert-comm{receives=late}", (InsertComm(receives="late"),)),
        ("insert-comm{ahead=3}", (InsertComm(ahead=3),)),
        ("lower-comm{slow=1>2+2>1}", (LowerComm(slow=((1, 2), (2, 1))),)),
        ("lower-comm{slow=0>1,lane=rdma}", (LowerComm(slow=((0, 1),), lane="rdma"),)),
        (
            "split-backward,adapt-order{in_flight=12},insert-comm,lower-comm{slow=1>2}",
            (SplitBackward(), AdaptOrder(12), InsertComm(), LowerComm(((1, 2),))),
        ),
    ],
)
def test_text_form_parses_and_prints(text: str, passes: tuple[Pass, ...]) -> None:
    assert parse_pipeline(text) == PassPipeline(passes)
    assert str(PassPipeline(passes)) == text


def test_options_at_their_default_may_be_written() -> None:
    assert parse_pipeline("insert-comm{receives=ahead},lower-comm{lane=delegate}") == PassPipeline((InsertComm(), LowerComm()))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "pipeline '': column 1: 'the end': expected PASS or PASS{OPTION=VALUE,…}"),
        ("split-backward,", "pipeline 'split-backward,': column 16: 'the end': expected PASS or PASS{OPTION=VALUE,…}"),
        ("split-backward zz", "pipeline 'split-backward zz': column 15: ' zz': expected ',' or the end"),
        (
            "adapt",
            "pipeline 'adapt': column 1: pass 'adapt': "
            "expected one of adapt-order, fuse-backward, insert-comm, insert-crossing, lower-comm, split-backward",
        ),
        (
            "split-backward,insert-comm{receives=soon}",
            "pipeline 'split-backward,insert-comm{receives=soon}': column 16: "
            "insert-comm: receives=soon: expected receives=ahead or late",
        ),
        (
            "adapt-order{in_flight}",
            "pipeline 'adapt-order{in_flight}': column 1: adapt-order: option 'in_flight': expected OPTION=VALUE",
        ),
        (
            "adapt-order{in_flight=1,in_flight=2}",
            "pipeline 'adapt-order{in_flight=1,in_flight=2}': column 1: adapt-order: option 'in_flight' is given twice",
        ),
        (
            "adapt-order{budget=1}",
            "pipeline 'adapt-order{budget=1}': column 1: adapt-order: option 'budget': expected one of effort, in_flight, seed",
        ),
    ],
)
def test_bad_text_is_refused_with_token_and_form(text: str, message: str) -> None:
    with pytest.raises(PassError) as error:
        parse_pipeline(text)
    assert str(error.value) == message


def test_every_pass_is_named_as_its_file() -> None:
    for name, known in PASSES.items():
        assert known.name == name
        assert known.__module__ == f"adaptra.passes.{name.replace('-', '_')}"


@pytest.mark.parametrize(
    ("form", "text"), [(Count(0), "0"), (Count(3), "12"), (EdgeSet(), "0>1+12>11"), (Word("a|b", "a or b"), "a")]
)
def test_option_forms_print_what_they_parse(form: Count | EdgeSet | Word, text: str) -> None:
    assert form.print(form.parse(text)) == text


@pytest.mark.parametrize("text", ["split-backward", "insert-comm{receives=late}", "insert-comm{ahead=2},lower-comm{slow=0>1}"])
def test_a_pass_that_says_so_does_not_look_at_costs(text: str) -> None:
    passes = parse_pipeline(text)
    assert not any(step.uses_cost for step in passes.passes)
    unreadable: Any = None
    assert passes.apply(one_f_one_b(2, 4, split=False), unreadable) == passes.apply(one_f_one_b(2, 4, split=False), COST)


def test_other_passes_use_costs_unless_they_say_so() -> None:
    assert all(step.uses_cost for step in (AdaptOrder(), FuseBackward(), InsertComm(), LoseLastOp()))


@dataclass(frozen=True)
class LoseLastOp(Pass):
    """A pass with a bug."""

    name: ClassVar[str] = "lose-last-op"

    def apply(self, program: Program, cost: CostModel) -> Program:
        return replace(program, orders=(program.orders[0][:-1], *program.orders[1:]))


def test_the_runner_names_the_pass_that_broke_the_program() -> None:
    with pytest.raises(AssertionError, match=r"bug in pass lose-last-op: its result does not verify: .*0W3"):
        PassPipeline((SplitBackward(), LoseLastOp())).apply(one_f_one_b(2, 4), COST)


def test_the_runner_refuses_an_invalid_program() -> None:
    program = LoseLastOp().apply(one_f_one_b(2, 4), COST)
    with pytest.raises(ScheduleError):
        PassPipeline((SplitBackward(),)).apply(program, COST)
