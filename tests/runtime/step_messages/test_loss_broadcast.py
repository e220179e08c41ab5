"""Losses reach the other ranks while the last stage still works, or in line behind activations."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from adaptra.errors import TransportError
from adaptra.graph.ops.specs import TensorSpec
from adaptra.runtime.step_messages.loss_broadcast import LossBroadcast
from adaptra.runtime.transports.local import LocalHub

STAGES, MICROBATCHES = 3, 4


def job(*placement: int, in_order: bool = False) -> list[LossBroadcast]:
    """Every rank's end of a pipeline with these stages, by default one on each of three ranks."""
    placement = placement or tuple(range(STAGES))
    ranks = len(set(placement))
    hub = LocalHub(ranks)
    transports = [hub.transport(rank) for rank in range(ranks)]
    for transport in transports:
        transport.contract = replace(transport.contract, in_order=in_order)
    losses = [
        LossBroadcast(rank, placement, MICROBATCHES, TensorSpec((), torch.float32), (), transport)
        for rank, transport in enumerate(transports)
    ]
    for one, transport in zip(losses, transports, strict=True):
        transport.reserve(one.receive_counts())
        one.begin_step(0)
    return losses


def results() -> dict[int, tuple[torch.Tensor, ...]]:
    """Scalars, in the order in which a program may compute them."""
    return {microbatch: (torch.tensor(float(microbatch), requires_grad=True),) for microbatch in (1, 0, 2, 3)}


def test_they_are_there_before_the_last_stage_ends_its_step() -> None:
    first, second, last = job()
    last.send(results())
    for one in (first, second, last):
        found = one.end_step(timeout=5.0)
        assert found.tolist() == [0.0, 1.0, 2.0, 3.0] and not found.requires_grad


def test_ranks_that_the_last_stages_rank_sends_activations_get_them_at_the_end() -> None:
    """Stages in turn: rank 2 sends activations to rank 0, whose losses would be in line with them."""
    first, second, last = job(0, 1, 2, 0, 1, 2)
    last.send(results())
    assert second.end_step(timeout=5.0).tolist() == [0.0, 1.0, 2.0, 3.0]
    with pytest.raises(TransportError, match="losses of step 0 on edge 5→0"):
        first.end_step(timeout=0.0)


def test_where_ranks_have_one_queue_for_everything_all_get_them_at_the_end() -> None:
    first, second, last = job(in_order=True)
    last.send(results())
    for one in (first, second):
        with pytest.raises(TransportError, match="of step 0 on edge"):
            one.end_step(timeout=0.0)
    first, second, last = job(in_order=True)
    last.send(results())
    for one in (last, second, first):
        assert one.end_step(timeout=5.0).tolist() == [0.0, 1.0, 2.0, 3.0]


def test_a_step_after_a_step_has_its_own() -> None:
    first, _, last = job(0, 1, 2, 0, 1, 2)
    for step in range(2):
        for one in (first, last):
            one.begin_step(step)
        last.send({microbatch: (torch.tensor(float(step)),) for microbatch in range(MICROBATCHES)})
        last.end_step(timeout=5.0)
        assert first.end_step(timeout=5.0).tolist() == [float(step)] * MICROBATCHES
