"""Sites that update by themselves stay in step: what they exchange is of the same steps, and goes on where it was saved."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from errors_table import check_documented
from models import Example, square_loss, vectors
from processes import run_processes
from torch import nn
from training import call, compiled

import adaptra
from adaptra.errors import AdaptraError, StateError

WIDTH, ROWS = 4, 4
PLAIN = Example("plain", lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)), vectors(WIDTH), square_loss)


def train(pipe: adaptra.Pipeline, steps: int, first: int = 0, of_an_update: int = 1) -> None:
    """Make steps, and an update at the end of each so many of them."""
    inner = torch.optim.SGD(pipe.parameters(), lr=0.1)
    for step in range(first, first + steps):
        args, kwargs = call(PLAIN.rows(ROWS, 100 * pipe.replica + step))
        pipe.step(*args, **kwargs)
        if (step + 1) % of_an_update == 0:
            inner.step()
            inner.zero_grad()


def of_sites(local: adaptra.Local, **arguments: Any) -> Any:
    """A pipeline of two layers for two sites."""
    given = {"stages": 1, "microbatches": 2, **arguments}
    return compiled(PLAIN, PLAIN.rows(ROWS, 0), options=adaptra.Options(synchrony=local), **given)


def uneven(rank: int) -> str:
    """What a job says of which one site makes a step more than another one before all exchange."""
    both = {"stages": 2, "placement": [0, 0]}
    with pytest.raises(AdaptraError) as caught, of_sites(adaptra.Local(2), **both) as pipe:
        train(pipe, 4 + rank)
        pipe.exchange()
    return str(caught.value)


@pytest.mark.processes
def test_sites_that_come_to_different_exchanges_are_told_so() -> None:
    row = (
        "exchange between sites: site 0 is at stage … after … steps, and site … at stage … after … steps: expected the same "
        "number of steps before it on all sites, or Local(quorum=...), with which they may differ"
    )
    for text in run_processes(uneven, 2):
        check_documented(StateError.__name__, text[text.index("exchange between") :], row)
        assert "site 0 is at stage 0 in exchange() after 4 steps, and site 1 at stage 0 in a step after 4 steps" in text
