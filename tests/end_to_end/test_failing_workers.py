"""Workers that fail as injected: their process or their connections end at the ordered point, and all learn of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
from models import EXAMPLES
from processes import run_processes
from training import compiled

import adaptra
from adaptra.errors import PeerLostError, TransportError

MLP = EXAMPLES["skip_mlp"]
ROWS, STEPS = 8, 4


class Ended(NamedTuple):
    """How a rank's training ended: steps that returned, calls that did, the error with its notes, and the longest silence of
    another thread in seconds.
    """

    steps: int
    calls: int
    error: Exception
    notes: str
    silence: float


def train(faults: Sequence[str], stages: int = 2) -> Ended:
    """Train with clipping until it fails."""
    (inputs,), _, targets = MLP.rows(ROWS, seed=0)
    ticks, ends = [time.monotonic()], threading.Event()

    def tick() -> None:
        while not ends.wait(0.01):
            ticks.append(time.monotonic())

    ticker = threading.Thread(target=tick)
    ticker.start()
    steps = calls = 0
    options = adaptra.Options(adapt=False, faults=faults)
    try:
        with compiled(MLP, MLP.rows(ROWS, seed=0), stages=stages, microbatches=4, options=options) as pipe:
            for _ in range(STEPS):
                pipe.step(inputs, targets)
                steps += 1
                pipe.clip_grad_norm_(1.0)
                calls += 1
    except TransportError as error:
        ended = error
    else:
        raise AssertionError("nothing failed")
    finally:
        ends.set()
        ticker.join()
    silence = max(after - before for before, after in pairwise(ticks))
    return Ended(steps, calls, ended, "".join(getattr(ended, "__notes__", ())), silence)


@pytest.mark.parametrize(
    ("text", "steps", "calls", "note"),
    [
        ("break 1 @2", 2, 2, ""),
        ("break 0.1 @2:1W3", 2, 2, "in step 2: rank 1 at 1W3"),
        ("break 0 @2:0F0", 2, 2, "in step 2: rank 0 at 0F0"),
        ("break 1 @2:certificate", 2, 2, ""),
        ("break 1 @2:optimizer", 3, 2, ""),
        ("break 1 @2:clip", 3, 2, ""),
    ],
)
@pytest.mark.usefixtures("one_thread")
def test_a_worker_fails_at_its_point(text: str, steps: int, calls: int, note: str) -> None:
    ended = train([text])
    assert (ended.steps, ended.calls, ended.notes) == (steps, calls, note)
    assert f"fault '{text}'" in str(ended.error)


@pytest.mark.usefixtures("one_thread")
def test_a_failed_step_leaves_no_gradient() -> None:
    """Up to the certificate nothing that a user sees has changed."""
    (inputs,), _, targets = MLP.rows(ROWS, seed=0)
    options = adaptra.Options(adapt=False, faults=["break 1 @0:certificate"])
    with compiled(MLP, MLP.rows(ROWS, seed=0), stages=2, microbatches=4, options=options) as pipe:
        last = [name for name, one in pipe.named_parameters()][-1]
        with pytest.raises(TransportError):
            pipe.step(inputs, targets)
        assert dict(pipe.named_parameters())[last].grad is None


def over_processes(rank: int, faults: Sequence[str], stages: int) -> Ended:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    return train(faults, stages)


@pytest.mark.processes
def test_several_failures_act_each_at_its_step() -> None:
    """The process that is frozen runs no thread meanwhile, and the other is gone in its step."""
    told, killed = run_processes(over_processes, 2, ["freeze 0 @1:0F1 600ms", "kill 1 @2:1I1"], 2, may_die=(1,))
    assert killed is None
    assert told.steps == told.calls == 2 and isinstance(told.error, PeerLostError) and told.error.rank == 1
    assert "fault" not in str(told.error)
    assert 0.5 < told.silence < 5


@pytest.mark.processes
@pytest.mark.parametrize(("text", "stages"), [("break 1 @1:1I3", 2), ("break 1.0 @1:REDUCE", 1)])
def test_a_broken_worker_lives_and_is_named_to_all(text: str, stages: int) -> None:
    other, broken = run_processes(over_processes, 2, [text], stages)
    assert type(broken.error) is TransportError and f"fault '{text}'" in str(broken.error)
    assert isinstance(other.error, PeerLostError) and other.error.rank == 1 and f"fault '{text}'" in str(other.error)
    assert broken.steps == other.steps == 1


@pytest.mark.usefixtures("one_thread")
def test_a_cut_worker_is_late_and_no_number_changes() -> None:
    (inputs,), _, targets = MLP.rows(ROWS, seed=0)
    runs: list[list[float]] = []
    seconds: list[float] = []
    for faults in ([], ["cut 1 @1:1F1 300ms"]):
        options = adaptra.Options(adapt=False, faults=faults)
        with compiled(MLP, MLP.rows(ROWS, seed=0), stages=2, microbatches=4, options=options) as pipe:
            optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
            losses = []
            for step in range(3):
                started = time.monotonic()
                losses.append(pipe.step(inputs, targets).item())
                if faults and step == 1:
                    seconds.append(time.monotonic() - started)
                optimizer.step()
                optimizer.zero_grad()
            runs.append(losses)
    assert runs[0] == runs[1] and len(set(runs[0])) == 3
    assert seconds[0] >= 0.3
