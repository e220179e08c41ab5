"""Jobs in which it can't be decided within a step who computes what are refused, and calls that would lose microbatches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from errors_table import check_documented, error_of
from models import Example, square_loss, vectors
from processes import run_processes
from test_refused_sites import ROWS, WIDTH, of_compile, wrong
from torch import nn
from training import call, compiled

import adaptra
from adaptra.frontend.arguments.arguments import CompileArguments
from adaptra.frontend.planned.open_tails import check_within_step
from adaptra.planning.routes.joined_programs import join
from adaptra.program.schedules import generate
from adaptra.runtime.launch import free_memory

NORMED = Example("normed", lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)), vectors(WIDTH), square_loss)
PLAIN = Example("plain", lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)), vectors(WIDTH), square_loss)


class Observing(nn.Module):
    """Counts its forwards while it observes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.seen: torch.Tensor
        self.register_buffer("seen", torch.zeros(()))
        self.observes = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.observes:
            self.seen += 1.0
        return self.layer(x) + self.seen


DEADLINE, STEALING = adaptra.Deadline(0.7), adaptra.Stealing()


def refused_by_a_pipeline(call: Callable[[adaptra.Pipeline], object]) -> None:
    with compiled(PLAIN, PLAIN.rows(ROWS, 0), stages=1, microbatches=2) as pipe:
        call(pipe)


REFUSED: list[tuple[str, Callable[[], object]]] = [
    *(
        ("Stealing: most=…: expected a whole number of at least 1, or None", lambda most=most: adaptra.Stealing(most))
        for most in wrong(0, 1.5, True, "2")
    ),
    (
        "synchrony=… with survive=True: expected a job without it, as a step that is done again may have other microbatches",
        of_compile(synchrony=adaptra.Stealing(), survive=True),
    ),
    (
        "synchrony=stealing with lossy_bf16='slow': expected True or False, as each replica plans which messages round, and "
        "others' microbatches would round otherwise",
        of_compile(synchrony=adaptra.Stealing(), lossy_bf16="slow"),
    ),
    (
        "synchrony=… with a schedule of several replicas: expected one of a single pipeline, as it is decided in "
        "each step who computes what",
        of_compile(synchrony=adaptra.Stealing(), schedule=join([generate("1f1b", 2, 2)] * 2)),
    ),
    (
        "synchrony=stealing with a function that returns no loss: expected a model whose loss adaptra.compile knows",
        lambda: CompileArguments(
            nn.Linear(2, 2), 1, 2, None, None, None, None, None, adaptra.Options(synchrony=adaptra.Stealing()), with_loss=False
        ),
    ),
    ("synchrony=… with …: expected several", of_compile(synchrony=adaptra.Stealing())),
    ("synchrony=… with …: expected several", of_compile(synchrony=adaptra.Auto((adaptra.Stealing(),)))),
    *(
        ("Deadline: quorum=…: expected a share above 0, and at most 1", lambda quorum=quorum: adaptra.Deadline(quorum))
        for quorum in wrong(0, 1.5, float("nan"), "0.9", True)
    ),
    (
        "synchrony=deadline=… with noise_scale=True: expected False, as replicas have other numbers of microbatches in each "
        "step",
        of_compile(synchrony=DEADLINE, noise_scale=True),
    ),
    (
        "synchrony=… with survive=True: expected a job without it, as a step that is done again may have other microbatches",
        of_compile(synchrony=DEADLINE, survive=True),
    ),
    ("synchrony=… with …: expected several", of_compile(synchrony=DEADLINE)),
    (
        "defer_nothing: steps have no deadline: expected Options(synchrony=adaptra.Deadline(...))",
        lambda: refused_by_a_pipeline(lambda pipe: pipe.defer_nothing()),
    ),
]


@pytest.mark.parametrize(("row", "call"), REFUSED, ids=[row[:50] for row, _ in REFUSED])
def test_it_is_refused(row: str, call: Callable[[], object]) -> None:
    kind, text = error_of(call)
    check_documented(kind, text, row)


def refused_by_a_job(_rank: int) -> dict[str, tuple[str, str]]:
    def make(example: Example, stages: Any, microbatches: int, mode: Any = STEALING, **arguments: Any) -> tuple[str, str]:
        def compile_it() -> None:
            options = adaptra.Options(synchrony=mode)
            batch = example.rows(ROWS, 0)
            with compiled(example, batch, stages=stages, microbatches=microbatches, options=options, **arguments):
                pass

        return error_of(compile_it)

    def in_order() -> None:
        with compiled(PLAIN, PLAIN.rows(ROWS, 0), stages=1, microbatches=2) as pipe:
            assert pipe._session is not None
            local = pipe._session.local
            check_within_step(adaptra.Stealing(), local.planned, local.launched.world, in_order=True)

    def followed() -> tuple[str, str]:
        example = Example("observing", Observing, vectors(WIDTH), square_loss)
        model: Any = example.make()
        options, (args, kwargs) = adaptra.Options(synchrony=STEALING), call(example.rows(ROWS, 0))
        with compiled(example, example.rows(ROWS, 0), stages=1, microbatches=2, model=model, options=options) as pipe:
            pipe.step(*args, **kwargs)
            model.observes = True
            return error_of(lambda: pipe.step(*args, **kwargs))

    def of_a_list() -> tuple[str, str]:
        args, _, targets = NORMED.rows(ROWS, 0)
        options: dict[str, Any] = {"options": adaptra.Options(synchrony=STEALING), "microbatches": 2, "loss": square_loss}
        return error_of(lambda: adaptra.compile([NORMED.make().eval()], stages=1, example_inputs=(args, targets), **options))

    def frozen() -> None:
        """Statistics that are only used are no such buffers."""
        model: Any = NORMED.make()
        model[1].eval()
        options, (args, kwargs) = adaptra.Options(synchrony=STEALING), call(NORMED.rows(ROWS, 0))
        with compiled(NORMED, NORMED.rows(ROWS, 0), stages=1, microbatches=2, model=model, options=options) as pipe:
            pipe.step(*args, **kwargs)

    def too_large() -> tuple[tuple[str, str], tuple[str, str]]:
        free_on = free_memory.free_on
        with compiled(PLAIN, PLAIN.rows(ROWS, 0), stages=1, microbatches=2) as pipe:
            optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
            free_memory.free_on = lambda device: 1 << 10  # type: ignore[assignment]
            later = error_of(lambda: pipe.take_synchrony(STEALING, optimizer))
            at_first = make(PLAIN, 1, 2)
            free_memory.free_on = free_on
            pipe.take_synchrony(STEALING, optimizer)
        return at_first, later

    frozen()
    at_first, later = too_large()
    return {
        "list": of_a_list(),
        "memory": at_first,
        "memory of a running job": later,
        "in order": error_of(in_order),
        "followed": followed(),
        "buffers": make(NORMED, 1, 2),
        "microbatches": make(PLAIN, 1, 1),
        "one microbatch": make(PLAIN, 1, 1, DEADLINE),
        "several": make(PLAIN, 2, 4, placement=[0, 0]),
        "hosts": make(PLAIN, 2, 4, replicas=2, transport="delegate"),
    }


@pytest.mark.processes
def test_a_job_refuses_what_others_can_not_compute() -> None:
    buffers = (
        "synchrony=stealing with the buffer …, which forwards change in microbatch order: expected a model without such buffers"
    )
    memory = "synchrony=stealing: it needs … of memory on the host of rank …, where … are free: expected that it fits"
    rows = {
        "in order": (
            "synchrony=… with a transport that has one queue for all messages between two ranks, as NCCL has: "
            "expected another one"
        ),
        "list": (
            "synchrony=stealing with the buffer …, which a stage given as a module may change: expected a model without such "
            "buffers"
        ),
        "memory": memory,
        "memory of a running job": memory,
        "buffers": buffers,
        "followed": buffers,
        "microbatches": (
            "synchrony=stealing with … microbatches: expected more than the … stages, as a replica keeps as many of its "
            "first ones"
        ),
        "one microbatch": (
            "synchrony=deadline=… with … microbatches: expected at least 2, as a replica computes one in each step"
        ),
        "several": "synchrony=… with several stages on a rank: expected one on each",
        "hosts": "synchrony=… with a rank that hosts several workers: expected a rank for each",
    }
    for found in run_processes(refused_by_a_job, 2):
        assert found.keys() == rows.keys()
        for name, row in rows.items():
            check_documented(found[name][0], found[name][1], row)


MICROBATCHES = 4


def refused_while_some_are_deferred(_rank: int) -> dict[str, tuple[str, str]]:
    options = adaptra.Options(
        synchrony=DEADLINE,
        share=False,
        faults=("slow 1.0 50ms @0..2",),
        emulate=adaptra.EmulatedDevice(0.002, 0.002, 0.002),
    )
    rows = 2 * MICROBATCHES
    found: dict[str, tuple[str, str]] = {}
    with compiled(PLAIN, PLAIN.rows(rows, 0), stages=1, microbatches=MICROBATCHES, options=options) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)

        def step(count: int = rows, *, outputs: bool = False) -> None:
            args, kwargs = call(PLAIN.rows(count, pipe.replica))
            pipe.step(*args, **kwargs, outputs=outputs)
            optimizer.step()
            optimizer.zero_grad()

        step()
        saved = adaptra.TrainingState(pipe, optimizer)
        found["saved"] = error_of(saved.state_dict)
        found["changed"] = error_of(lambda: pipe.take_synchrony("exact", optimizer))
        entry = {"number": 1, "parts": [{"first": 0, "count": MICROBATCHES}] * 2}
        found["log"] = error_of(lambda: pipe.replay([entry]))
        pipe.defer_nothing()
        step()
        assert saved.state_dict()["step"] == 2
        args, kwargs = call(PLAIN.rows(rows + 4, pipe.replica))
        pipe.eval_step(*args, **kwargs)
        found["shape"] = error_of(lambda: step(rows + 4))
    with compiled(PLAIN, PLAIN.rows(rows, 0), stages=1, microbatches=MICROBATCHES, options=options) as pipe:
        args, kwargs = call(PLAIN.rows(rows, 0))
        pipe.replay([{"number": 1, "parts": [{"first": 0, "count": MICROBATCHES - 1}] * 2}])
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        found["replayed"] = error_of(lambda: pipe.take_synchrony("exact", optimizer))
        found["outputs"] = error_of(lambda: pipe.step(*args, **kwargs, outputs=True))
    return found


@pytest.mark.processes
def test_what_would_lose_deferred_microbatches_is_refused() -> None:
    deferred = (
        "…: … microbatches are deferred to the next step: expected a call after a step that defers nothing, for which all "
        "ranks call pipe.defer_nothing() before"
    )
    rows = {
        "saved": deferred,
        "changed": deferred,
        "replayed": ("…: the log that is replayed has … more steps: expected a change of mode after its last one"),
        "log": (
            "log of a deadline: entry … has the microbatches …, each a first one and a count: expected that replicas go on "
            "from …, and are at most … behind …"
        ),
        "outputs": (
            "outputs: … of … microbatches were computed here in this step: expected that all ranks of a pipeline ask for "
            "outputs in the same steps, and in those of the run whose log is replayed"
        ),
        "shape": (
            "a batch of …: expected batches of the shape for which the pipeline was compiled, as those that were deferred to a "
            "step are computed with its own under synchrony=deadline=…"
        ),
    }
    first, second = run_processes(refused_while_some_are_deferred, 2)
    for name, row in rows.items():
        for found in (first, second):
            kind, text = found[name]
            if kind != "PeerLostError":  # the other rank was first
                check_documented(kind, text, row)
        assert "PeerLostError" not in (first[name][0], second[name][0]) or first[name][0] != second[name][0]


def refused_outputs(_rank: int) -> list[tuple[bool, tuple[str, str]]]:
    """Outputs on the first stage's rank alone, and then on the last one's alone, in each mode."""
    found: list[tuple[bool, tuple[str, str]]] = []
    rows = 2 * MICROBATCHES
    args, kwargs = call(PLAIN.rows(rows, 0))
    for mode in (STEALING, adaptra.Deadline(1.0)):
        options = adaptra.Options(synchrony=mode, share=False)
        with compiled(PLAIN, PLAIN.rows(rows, 0), stages=2, microbatches=MICROBATCHES, options=options) as pipe:
            pipe.step(*args, **kwargs, outputs=pipe.rank % 2 == 0)
            _, outputs = pipe.step(*args, **kwargs, outputs=True)
            is_last = outputs is not None

            def twice(pipe: adaptra.Pipeline = pipe, is_last: bool = is_last) -> None:
                for _ in range(2):  # another rank may hear of it only in the next step
                    pipe.step(*args, **kwargs, outputs=is_last)

            found.append((is_last, error_of(twice)))
    return found


@pytest.mark.processes
def test_outputs_on_the_last_stage_alone_are_refused() -> None:
    row = (
        "outputs: this rank asks for them in this step, the rank of the first stage does not: expected that all ranks of a "
        "pipeline ask for outputs in the same steps, where it is decided within a step who computes what"
    )
    ranks = run_processes(refused_outputs, 4)
    for of_mode in zip(*ranks, strict=True):
        assert [is_last for is_last, _ in of_mode] == [False, True, False, True]
        refused = [told for is_last, told in of_mode if is_last and told[0] != "PeerLostError"]
        assert refused
        for kind, text in refused:
            check_documented(kind, text, row)
