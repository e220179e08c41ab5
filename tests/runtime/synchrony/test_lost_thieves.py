"""Replicas that pause or die in a step of which it is decided as it runs who computes what."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
from processes import run_processes
from test_refused_tails import PLAIN
from training import call, compiled

import adaptra
from adaptra.errors import PeerLostError
from adaptra.runtime.synchrony.slots import SlotMicrobatch
from adaptra.runtime.worker.stages.stage import TrainingStage
from adaptra.runtime.worker.stages.stolen_microbatches import StolenMicrobatches

pytestmark = pytest.mark.processes

STEP, MICROBATCHES, REPLICAS = 2, 6, 3


def train(synchrony: Any, *faults: str) -> tuple[list[bytes], list[str]]:
    events: list[adaptra.ControlEvent] = []
    options = adaptra.Options(
        synchrony=synchrony,
        share=False,
        faults=faults,
        emulate=adaptra.EmulatedDevice(0.01, 0.01, 0.01),
        on_event=events.append,
        timeout=60,
    )
    batch, bits = PLAIN.rows(2 * MICROBATCHES, 0), list[bytes]()
    with compiled(PLAIN, batch, stages=1, microbatches=MICROBATCHES, options=options) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        for step in range(STEP + 2):
            args, kwargs = call(PLAIN.rows(2 * MICROBATCHES, 10 * step + pipe.replica))
            pipe.step(*args, **kwargs)
            optimizer.step()
            optimizer.zero_grad()
            bits.append(b"".join(one.detach().numpy().tobytes() for one in pipe.parameters()))
    return bits, [one.text for one in events if one.kind.value == "stolen"]


def pauses(_rank: int) -> tuple[list[bytes], list[bytes], list[str]]:
    exact, _ = train("exact")
    stolen, told = train(adaptra.Stealing(), f"freeze 1.0 @{STEP}:0F1 0.6s")
    return exact, stolen, told


def test_a_process_that_is_stopped_is_helped() -> None:
    found = run_processes(pauses, REPLICAS)
    for exact, stolen, _ in found:
        assert stolen == exact
    assert found[1][2], "its last microbatches are taken while it is stopped"
    assert "microbatches of replica 1 that it had not begun: replica " in found[1][2][0]


THIEF, VICTIM = 2, 1


def loses(rank: int, lost: int, mode: Any, *faults: str) -> tuple[str, float]:
    if rank == lost == THIEF:

        def dies(self: StolenMicrobatches, held: SlotMicrobatch) -> TrainingStage:
            if not self.is_own(held):
                os.kill(os.getpid(), signal.SIGKILL)
            return own_stage(self, held)

        own_stage, StolenMicrobatches.stage_of = StolenMicrobatches.stage_of, dies
    began = time.monotonic()
    with pytest.raises(PeerLostError) as caught:
        train(mode, *faults)
    return str(caught.value), time.monotonic() - began


@pytest.mark.parametrize(
    ("lost", "mode", "fault"),
    [
        (VICTIM, adaptra.Stealing(), f"kill {VICTIM}.0 @{STEP}:0W2"),
        (THIEF, adaptra.Stealing(), f"slow {VICTIM}.0 60ms @{STEP}"),
        (VICTIM, adaptra.Deadline(0.7), f"kill {VICTIM}.0 @{STEP}:0W2"),
    ],
    ids=["who is helped", "who helps", "who defers"],
)
def test_the_others_learn_who_has_died(lost: int, mode: Any, fault: str) -> None:
    for found in run_processes(loses, REPLICAS, lost, mode, fault, may_die=(lost,)):
        if found is not None:
            assert f"rank {lost}" in found[0]
            assert found[1] < 40
