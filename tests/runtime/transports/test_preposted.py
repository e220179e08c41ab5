"""Receives that are posted ahead for a shape of batch stay few, however often the shape is forgotten and comes back."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor

from adaptra.graph.ops.specs import TensorSpec
from adaptra.runtime.transports.base import Identity, Purpose
from adaptra.runtime.transports.c10d.preposted import FIRST_TAG, PrepostedReceives
from adaptra.runtime.transports.message_format import MessageBuffer
from adaptra.runtime.transports.pool import Pool

AHEAD, MESSAGES = 2, 4


def test_a_shape_that_comes_back_uses_the_receives_that_it_left() -> None:
    posted: Counter[int] = Counter()

    def post(_memory: Tensor, tag: int) -> Any:
        posted[tag] += 1
        return object()

    pool = Pool(MessageBuffer)
    receives = PrepostedReceives(post, pool, rank=1)
    shapes = [(TensorSpec((rows, 4096), torch.float32),) for rows in (2, 3)]
    tags = [MessageBuffer(specs).tag for specs in shapes]
    rounds = 20
    for step in range(2 * rounds):
        specs = shapes[step % 2]  # the other shape is forgotten: nothing is reserved for it
        pool.reserve({(1, specs): MESSAGES})
        messages = [Identity(step, Purpose.ACTIVATION, 0, 1, microbatch, specs) for microbatch in range(MESSAGES)]
        for one in messages:
            buffer, _ = receives.take(one, receives.ask(one))
            pool.give(1, one, buffer)
        receives.stand(messages[-1], AHEAD)
    for tag in tags:
        assert posted[tag] == rounds * MESSAGES + AHEAD, "no receive was posted that no message came for, but the last ones"
    assert posted[FIRST_TAG] == 2 * rounds * MESSAGES + AHEAD
