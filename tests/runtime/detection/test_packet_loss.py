"""Options(lossy_bf16=...): messages are rounded as torch rounds, and nothing else is; what can't be is refused at the door."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from errors_table import check_documented
from installed import install_transport
from models import Batch, Example, square_loss, vectors
from processes import run_processes
from torch import Tensor, nn
from training import Step, adam, call, compiled, differences, run_step, train, train_alone

import adaptra
from adaptra.errors import OptionError
from adaptra.runtime.control.plans.events import ControlEvent, EventKind
from adaptra.runtime.control.plans.plan import Plan

ROWS, MICROBATCHES, WIDTH = 16, 4, 128
FOREIGN = "lossy_bf16=… with transport '…': expected a transport of adaptra's own, which all can round"


class Two(nn.Module):
    """Two layers; between them what a boundary that rounds does to activations, and autograd with it to their gradients."""

    def __init__(self, rounds: bool) -> None:
        super().__init__()
        self.rounds = rounds
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        if self.rounds:
            x = x.to(torch.bfloat16).to(torch.float32)
        return self.last(x)


def example(rounds: bool) -> Example:
    return Example("two", lambda: Two(rounds), vectors(WIDTH), square_loss)


def train_rounded(rank: int, transports: Sequence[str]) -> dict[str, tuple[list[str], bool, str, Any]]:
    """What differs from one process whose model rounds at the boundary, per transport; the report, and whether it is exact."""
    if transports != ["local"]:
        torch.distributed.init_process_group("gloo")
    batches = [example(False).rows(ROWS, seed) for seed in range(3)]
    expected, exact = (train_alone(example(rounds), batches, MICROBATCHES) for rounds in (True, False))
    found = {}
    for transport in transports:
        with compiled(
            example(False),
            batches[0],
            stages=2,
            microbatches=MICROBATCHES,
            split=["last"],
            transport=transport,
            options=adaptra.Options(lossy_bf16=True),
        ) as pipe:
            steps = train(pipe, batches)
            is_whole = transport == "local"
            is_exact = not differences(steps, exact, is_whole)
            evaluated = float(pipe.eval_step(*call(batches[0])[0]))
            found[transport] = differences(steps, expected, is_whole), is_exact, pipe.report(), evaluated
    return found


def train_while_slow() -> tuple[list[Batch], list[Step], list[Plan], tuple[ControlEvent, ...]]:
    """The plans of a run whose only edge carries little from step 10 on and heals later, and what its steps left."""
    batches = [example(False).rows(2 * MICROBATCHES, seed) for seed in range(60)]
    steps, plans = [], []
    with compiled(
        example(False),
        batches[0],
        stages=2,
        microbatches=MICROBATCHES,
        split=["last"],
        options=adaptra.Options(
            lossy_bf16="slow",
            emulate=adaptra.EmulatedDevice(0.001, 0.001, 0.001),
            faults=["rate 0-1 30kB @10..30"],
        ),
    ) as pipe:
        optimizer = adam(pipe.parameters())
        for batch in batches:
            steps.append(run_step(pipe, optimizer, batch))
            plans.append(pipe.plan)
        return batches, steps, plans, pipe.events


@pytest.mark.timed
def test_an_edge_whose_bandwidth_binds_is_rounded_until_it_heals() -> None:
    batches, steps, plans, events = train_while_slow()
    rounded = [step for step, plan in enumerate(plans) if plan.rounded]
    assert rounded and rounded[0] > 10 and rounded[-1] < len(plans) - 1
    assert plans[-1].rounded == ()
    (first, *_) = [event for event in events if event.kind is EventKind.LIMITED]
    assert "bandwidth of edge" in first.text and "rounding to bfloat16" in first.text
    proposed = next(
        event for event in events if event.kind is EventKind.PROPOSED and event.version == plans[rounded[0]].version
    )
    assert proposed.predicted is not None and proposed.predicted_before is not None
    assert "rounding to bfloat16" in proposed.text and proposed.predicted < 0.8 * proposed.predicted_before
    exact = train_alone(example(False), batches[: rounded[0] + 1], MICROBATCHES)
    assert differences(steps[: rounded[0]], exact[: rounded[0]]) == []
    assert differences(steps[rounded[0] : rounded[0] + 1], exact[rounded[0] :]) != []


def check(found: dict[str, tuple[list[str], bool, str, Any]]) -> None:
    for differing, is_exact, report, _ in found.values():
        assert differing == [] and not is_exact
        # Four rows of 128 numbers of two bytes, not four.
        assert "messages are rounded to bfloat16" in report and "1.02 kB" in report and "2.05 kB" not in report


def test_what_stages_send_each_other_is_rounded_as_torch_rounds() -> None:
    check(train_rounded(0, ["local"]))


@pytest.mark.timed
@pytest.mark.processes
def test_it_is_rounded_the_same_between_processes() -> None:
    ranks = run_processes(train_rounded, 2, ["c10d", "delegate"])
    for found in ranks:
        check(found)
    ((_, _, _, by_c10d), (_, _, _, by_delegate)) = ranks[0].values()
    assert by_c10d == by_delegate


def test_without_the_option_the_report_says_nothing_and_nothing_is_rounded() -> None:
    batch = example(False).rows(ROWS, 0)
    with compiled(example(False), batch, stages=2, microbatches=MICROBATCHES, split=["last"]) as pipe:
        assert differences(train(pipe, [batch]), train_alone(example(False), [batch], MICROBATCHES)) == []
        assert "rounded" not in pipe.report() and "2.05 kB" in pipe.report()


def test_a_transport_of_another_package_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_transport(tmp_path, "pigeon", "pigeon:make")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(OptionError) as caught:
        adaptra.compile(Two(False), stages=2, microbatches=4, transport="pigeon", options=adaptra.Options(lossy_bf16=True))
    check_documented("OptionError", str(caught.value), FOREIGN)
