from __future__ import annotations

import io
import logging

import pytest
from chained import compile_example
from models import EXAMPLES
from rich.console import Console

import adaptra
from adaptra.progress import shown_progress

TOLD = [
    ("captured", 1, 2),
    ("cut into stages", 1, 1),
    ("captured", 2, 2),
    ("differentiated", 1, 2),
    ("differentiated", 2, 2),
    ("traced for evaluation", 1, 2),
    ("traced for evaluation", 2, 2),
]


def test_a_compilation_tells_of_every_part_that_is_done() -> None:
    example = EXAMPLES["skip_mlp"]
    told: list[tuple[str, int, int]] = []
    compile_example(example, example.make(), example.rows(3, 0), 2, progress=lambda *one: told.append(one))
    assert told == TOLD


def test_compile_logs_how_far_it_is(caplog: pytest.LogCaptureFixture) -> None:
    example = EXAMPLES["skip_mlp"]
    (inputs,), _, targets = example.rows(4, 0)
    caplog.set_level(logging.INFO, "adaptra.progress")
    with adaptra.compile(
        example.make(), stages=2, microbatches=2, example_inputs=(inputs, targets), loss=example.loss, transport="local"
    ):
        logged = [record.getMessage() for record in caplog.records if record.name == "adaptra.progress"]
    assert logged == [f"{what}: {done} of {total}" for what, done, total in (*TOLD, ("planned", 1, 1))]


def screen(*, is_terminal: bool) -> tuple[Console, io.StringIO]:
    written = io.StringIO()
    return Console(file=written, force_terminal=is_terminal, width=80, _environ={"TERM": "xterm"}), written


def test_bars_are_shown_on_a_terminal() -> None:
    console, written = screen(is_terminal=True)
    with shown_progress(console, after=0.0) as progress:
        progress("captured", 2, 2)
        progress("differentiated", 3, 7)
    text = written.getvalue()
    assert "captured" in text
    assert "differentiated" in text
    assert "3/7" in text


@pytest.mark.parametrize(("is_terminal", "after"), [(False, 0.0), (True, 1e9)], ids=["no terminal", "soon done"])
def test_nothing_is_shown_elsewhere_or_of_what_is_soon_done(is_terminal: bool, after: float) -> None:
    console, written = screen(is_terminal=is_terminal)
    with shown_progress(console, after=after) as progress:
        progress("captured", 2, 2)
    assert written.getvalue() == ""
