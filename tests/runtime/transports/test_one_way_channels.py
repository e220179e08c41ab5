"""Channels with a queue of their own, as over NCCL: both ways of a class go beside each other."""

from __future__ import annotations

import pytest
import torch
from processes import run_processes

pytestmark = pytest.mark.processes

COUNT = 6


def exchange(rank: int, device: str) -> None:
    """Activations both ways, in one class: each rank sends all of its own before it posts a receive."""
    import torch.distributed as dist
    import transport_bodies as bodies

    from adaptra.runtime.transports.base import ChannelClass, Identity, Purpose
    from adaptra.runtime.transports.c10d import c10d

    on_gpu = device == "cuda"
    if on_gpu:
        torch.cuda.set_device(rank)
    else:
        c10d.CONTRACTS["gloo"] = c10d.CONTRACTS["nccl"]
    dist.init_process_group("gloo")
    transport = c10d.C10dTransport(device=f"cuda:{rank}" if on_gpu else "cpu")
    specs, peer = bodies.SPECS, 1 - rank
    assert transport.contract.one_way
    transport.reserve({(peer, specs): COUNT})
    for step in range(3):
        there, back = (
            [Identity(step, Purpose.ACTIVATION, *edge, k, specs) for k in range(COUNT)] for edge in ((rank, peer), (peer, rank))
        )
        assert {one.channel for one in (*there, *back)} == {ChannelClass.FORWARD}
        for one in there:
            transport.send(peer, one, [tensor.to(device) for tensor in bodies.make(one)])
        receives = [transport.receive(peer, one) for one in back]
        for one, pending in zip(back, receives, strict=True):
            assert bodies.same([tensor.cpu() for tensor in pending.wait(100)], bodies.make(one))
            transport.release(pending)
    transport.close()


def test_both_ways_of_a_class_have_communicators_of_their_own() -> None:
    run_processes(exchange, 2, "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(
    torch.cuda.device_count() < 2,
    reason=f"NCCL needs a GPU for each of two ranks: torch finds {torch.cuda.device_count()} here",
)
def test_both_ways_of_a_class_over_nccl() -> None:
    run_processes(exchange, 2, "cuda", is_fresh=True)
