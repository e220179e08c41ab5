"""The delegate between GPUs: the transport matrix with tensors on the device, and copies beside the compute stream."""

import pytest
import torch
from processes import run_processes

from adaptra.errors import TransportError

pytestmark = [
    pytest.mark.processes,
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]


def exchange_on_gpu(rank: int) -> None:
    """Messages both ways while a long kernel runs; what arrived is compared on the device that it is wanted on."""
    import torch.distributed as dist
    import transport_bodies as bodies

    from adaptra.runtime.transports.registry import create_transport

    dist.init_process_group("gloo")
    transport = create_transport("delegate", device="cuda")
    specs = bodies.SPECS
    peer, count = 1 - rank, 8
    mine, theirs = (bodies.forward, bodies.backward) if rank == 0 else (bodies.backward, bodies.forward)
    transport.reserve({(peer, specs): count})
    for step in range(3):
        receives = [transport.receive(peer, theirs(k, specs=specs, step=step)) for k in range(count)]
        for k in range(count):
            torch.cuda._sleep(10_000_000)
            identity = mine(k, specs=specs, step=step)
            # The tensors die at once: their memory may be used again only after the copy.
            transport.send(peer, identity, [tensor.cuda() for tensor in bodies.make(identity)])
        for k, pending in enumerate(receives):
            got = pending.wait(100)
            assert all(tensor.is_cuda for tensor in got)
            assert bodies.same([tensor.cpu() for tensor in got], bodies.make(theirs(k, specs=specs, step=step)))
            transport.release(pending)
    with pytest.raises(TransportError):
        transport.receive(peer, theirs(99, specs=specs)).wait(0.01)
    transport.store.set(f"done {rank}", "")
    transport.store.wait([f"done {peer}"])
    transport.close()


def test_messages_travel_between_gpus() -> None:
    run_processes(exchange_on_gpu, 2, is_fresh=True)
