"""A rank that dies ends a job of sites as any other one: all that wait for it learn which one it was."""

from __future__ import annotations

import time

import pytest
import torch
from processes import run_processes
from test_refused_sites import PLAIN
from training import call, compiled

import adaptra
from adaptra.errors import PeerLostError

pytestmark = pytest.mark.processes

LOST, STEP = 1, 4


def train(_rank: int, mode: adaptra.Local | adaptra.XOrder) -> tuple[str, float]:
    """The error's text, and the seconds from this rank's step in which another one died."""
    options = adaptra.Options(synchrony=mode, faults=[f"kill {LOST}.0 @{STEP}"])
    batch = PLAIN.rows(4, 0)
    args, kwargs = call(batch)
    began = 0.0
    with (
        pytest.raises(PeerLostError) as caught,
        compiled(PLAIN, batch, stages=1, microbatches=2, options=options) as pipe,
    ):
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        pipe.attach(optimizer)
        for step in range(STEP + 5):
            if step == STEP:
                began = time.monotonic()
            pipe.step(*args, **kwargs)
            optimizer.step()
            time.sleep(0.05)  # the others are not far ahead of the one that dies
        pipe.exchange()
    return str(caught.value), time.monotonic() - began


MODES = (
    adaptra.Local(STEP + 1),
    adaptra.Local(STEP + 1, quorum=3),
    adaptra.Local(STEP + 1, quorum=2),
    adaptra.XOrder(2, staleness=2),
)


@pytest.mark.parametrize("mode", MODES, ids=repr)
def test_the_others_learn_which_rank_is_lost(mode: adaptra.Local | adaptra.XOrder) -> None:
    for found in run_processes(train, 3, mode, may_die=(LOST,)):
        if found is not None:
            text, seconds = found
            assert f"rank {LOST}" in text
            assert seconds < 20
