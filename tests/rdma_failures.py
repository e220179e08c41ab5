"""What two hosts say when every path of RDMA between them has failed."""

from __future__ import annotations

import inside
import rdma_bodies


def cut_off() -> list[list[str]]:
    """Take both paths from two hosts, one as its device tells and one in silence; the error on each, as class and text."""
    with inside.on_hosts(2, wait_in_vain, 2) as processes:
        for process in processes:
            process.wait_for("waiting", 60)
        inside.shell("ip -n n0 link set rail0 down")
        inside.shell("tc qdisc add dev p0_1 root netem loss 100%")
        return [process.result(60) for process in processes]


def wait_in_vain(host: int, hosts: int) -> list[str]:
    """Wait for a message over two ports; the error, as class and text."""
    from transport_bodies import SMALL, backward, forward

    from adaptra.runtime.transports.registry import create_transport

    rdma_bodies.set_up(host, hosts)
    transport = create_transport("delegate", addresses=[f"rdma:rxe{host}_{rail}" for rail in range(2)])
    peer, identity = 1 - host, (backward if host == 0 else forward)(0)
    transport.reserve({(peer, SMALL): 1})
    pending = transport.receive(peer, identity)
    print("waiting", flush=True)
    try:
        pending.wait(50)
    except RuntimeError as error:
        return [type(error).__name__, str(error)]
    finally:
        transport.close()
    raise AssertionError("a message came that nobody sent")
