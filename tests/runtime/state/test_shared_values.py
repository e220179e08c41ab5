"""Every rank builds the model for itself: copies that differ become the first holder's, with one line in the log."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch
from models import Example, square_loss, vectors
from processes import run_processes
from torch import Tensor, nn
from training import MIXED, compiled

MICROBATCHES, SPLIT = 4, ("middle.3",)
WARNING = (
    "copies on several ranks differed, as if each rank had drawn its own values: replaced {}; expected the same seed, or the "
    "same checkpoint, on every rank"
)


class Lines(logging.Handler):
    """What is warned of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []
        logging.getLogger("adaptra.runtime.state.shared_values").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


class Wide(nn.Module):
    """A buffer that two stages read, of random numbers, and a weight that both use."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.last.weight = self.first.weight
        self.noise: Tensor
        self.register_buffer("noise", torch.randn(1500, 1000))  # more than a message of the stream

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x)) + self.noise[0, :8]
        return self.last(x) * self.noise[1, :8]


WIDE = Example("wide", Wide, vectors(8), square_loss)


def forget_the_seed(rank: int, world_size: int) -> dict[str, Any]:
    """Ranks draw their own weights, train, load what each has drawn anew, and train again."""
    torch.distributed.init_process_group("gloo")
    log, found = Lines(), {}
    example, split = (MIXED, SPLIT) if world_size == 4 else (WIDE, ("last",))
    batch = example.rows(4 * MICROBATCHES, 0)
    model = example.make(seed=100 * rank)
    with compiled(example, batch, stages=2, split=split, microbatches=MICROBATCHES, model=model) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        for index, name in enumerate(("compiled", "loaded")):
            if index:
                pipe.load_state_dict(example.make(seed=7 + rank).state_dict())
            found[name] = {key: one.numpy().copy() for key, one in pipe.held_tensors() if not isinstance(one, nn.Parameter)}
            found[name] |= {key: one.detach().numpy().copy() for key, one in pipe.named_parameters()}
            (inputs,), _, targets = batch
            pipe.step(inputs, targets)
            optimizer.step()
            optimizer.zero_grad()
            found[f"{name}, trained"] = {key: one.detach().numpy().copy() for key, one in pipe.named_parameters()}
        pipe.load_state_dict(example.make(seed=5).state_dict())
    return {"state": found, "lines": log.lines}


@pytest.mark.processes
@pytest.mark.parametrize("world_size", [2, 4])
def test_copies_become_the_first_holders_and_one_line_says_so(world_size: int) -> None:
    results = run_processes(forget_the_seed, world_size, world_size)
    example = MIXED if world_size == 4 else WIDE
    for moment, seed in (("compiled", 0), ("loaded", 7)):
        first = {key: value.numpy() for key, value in example.make(seed=seed).state_dict().items()}
        for stage in range(2):
            holders = [result["state"] for result in results[stage::2]]
            for state in holders[1:]:
                for after in (moment, f"{moment}, trained"):
                    assert state[after].keys() == holders[0][after].keys()
                    for key, value in state[after].items():
                        np.testing.assert_array_equal(value, holders[0][after][key], err_msg=f"{after}: {key}")
        tied = [result["state"] for result in results[:2]]
        for after in (moment, f"{moment}, trained"):
            one, other = (state[after] for state in tied)
            common = one.keys() & other.keys()
            is_whole = world_size == 2 and after == moment  # buffers too
            assert common == ({"first.weight", "noise"} if is_whole else {"first.weight"})
            for key in common:
                np.testing.assert_array_equal(one[key], other[key], err_msg=f"{after}: {key}")
        # The first rank's own stay as they were.
        for key, value in results[0]["state"][moment].items():
            np.testing.assert_array_equal(value, first[key])
    assert [len(result["lines"]) for result in results] == [2, *[0] * (world_size - 1)], "one line each on one rank"
    if world_size == 2:
        assert results[0]["lines"] == [WARNING.format("first.weight, noise of rank 1 by those of rank 0")] * 2
    else:
        for line in results[0]["lines"]:
            assert "of rank 2 by those of rank 0; " in line and "of rank 3 by those of rank 1" in line
            assert "first.weight of rank 1 by those of rank 0" in line
