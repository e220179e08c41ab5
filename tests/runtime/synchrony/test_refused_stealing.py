"""Jobs in which no replica can take another one's microbatches are refused, by one line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from errors_table import check_documented
from models import Example, square_loss, vectors
from processes import run_processes
from test_refused_sites import ROWS, WIDTH, message, of_compile, wrong
from torch import nn
from training import compiled

import adaptra
from adaptra.frontend.arguments.arguments import CompileArguments
from adaptra.frontend.planned.stealing import check_stealing
from adaptra.planning.routes.joined_programs import join
from adaptra.program.schedules import generate

NORMED = Example("normed", lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)), vectors(WIDTH), square_loss)
PLAIN = Example("plain", lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)), vectors(WIDTH), square_loss)

REFUSED: list[tuple[str, Callable[[], object]]] = [
    *(
        ("Stealing: most=…: expected a whole number of at least 1, or None", lambda most=most: adaptra.Stealing(most))
        for most in wrong(0, 1.5, True, "2")
    ),
    (
        "synchrony=Stealing(…) with survive=True: expected a job without it, as a step that is done again may be shared "
        "otherwise",
        of_compile(synchrony=adaptra.Stealing(), survive=True),
    ),
    (
        "synchrony=Stealing(…) with lossy_bf16='slow': expected True or False, as each replica plans which messages round, and "
        "others' microbatches would round otherwise",
        of_compile(synchrony=adaptra.Stealing(), lossy_bf16="slow"),
    ),
    (
        "synchrony=Stealing(…) with a schedule of several replicas: expected one of a single pipeline, as it is decided in "
        "each step who computes what",
        of_compile(synchrony=adaptra.Stealing(), schedule=join([generate("1f1b", 2, 2)] * 2)),
    ),
    (
        "synchrony=Stealing(…) with a function that returns no loss: expected a model whose loss adaptra.compile knows",
        lambda: CompileArguments(
            nn.Linear(2, 2), 1, 2, None, None, None, None, None, adaptra.Options(synchrony=adaptra.Stealing()), with_loss=False
        ),
    ),
    ("synchrony=Stealing(…) with …: expected several", of_compile(synchrony=adaptra.Stealing())),
]


@pytest.mark.parametrize(("row", "call"), REFUSED, ids=[row[:50] for row, _ in REFUSED])
def test_it_is_refused(row: str, call: Callable[[], object]) -> None:
    kind, text = message(call)
    check_documented(kind, text, row)


def refused_by_a_job(_rank: int) -> dict[str, tuple[str, str]]:
    def make(example: Example, stages: Any, microbatches: int, **arguments: Any) -> tuple[str, str]:
        def compile_it() -> None:
            options = adaptra.Options(synchrony=adaptra.Stealing())
            batch = example.rows(ROWS, 0)
            with compiled(example, batch, stages=stages, microbatches=microbatches, options=options, **arguments):
                pass

        return message(compile_it)

    def in_order() -> None:
        with compiled(PLAIN, PLAIN.rows(ROWS, 0), stages=1, microbatches=2) as pipe:
            assert pipe._session is not None
            local = pipe._session.local
            check_stealing(adaptra.Stealing(), local.planned, local.launched.world, in_order=True)

    return {
        "in order": message(in_order),
        "buffers": make(NORMED, 1, 2),
        "microbatches": make(PLAIN, 1, 1),
        "several": make(PLAIN, 2, 4, placement=[0, 0]),
        "hosts": make(PLAIN, 2, 4, replicas=2, transport="delegate"),
    }


@pytest.mark.processes
def test_a_job_refuses_what_others_can_not_compute() -> None:
    rows = {
        "in order": (
            "synchrony=Stealing(…) with a transport that has one queue for all messages between two ranks, as NCCL has: "
            "expected another one"
        ),
        "buffers": (
            "synchrony=Stealing(…) with the buffer …, which forwards change in microbatch order: expected a model without such "
            "buffers"
        ),
        "microbatches": (
            "synchrony=Stealing(…) with … microbatches: expected more than the … stages, as a replica keeps as many of its "
            "first ones"
        ),
        "several": "synchrony=Stealing(…) with several stages on a rank: expected one on each",
        "hosts": "synchrony=Stealing(…) with a rank that hosts several workers: expected a rank for each",
    }
    for found in run_processes(refused_by_a_job, 2):
        assert found.keys() == rows.keys()
        for name, row in rows.items():
            check_documented(found[name][0], found[name][1], row)
