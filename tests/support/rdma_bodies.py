"""What runs in the lab, on its hosts: transports and training over real queue pairs."""

from __future__ import annotations

import os
import traceback

STORE_PORT = 29500


def environment(host: int, hosts: int) -> None:
    """What a launcher would tell the rank of this host."""
    os.environ |= {
        "RANK": str(host),
        "WORLD_SIZE": str(hosts),
        "MASTER_ADDR": "10.8.0.1",
        "MASTER_PORT": str(STORE_PORT),
        "GLOO_SOCKET_IFNAME": "ctl",
    }


def set_up(host: int, hosts: int) -> None:
    """Make this process the rank of its host."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    environment(host, hosts)
    dist.init_process_group("gloo")


def run_matrix(host: int, hosts: int) -> dict[str, str]:
    """Every body of the transports' matrix over verbs alone; what went wrong, by the name of the body."""
    import transport_bodies as bodies

    from adaptra.runtime.transports.registry import create_transport

    set_up(host, hosts)
    failures: dict[str, str] = {}
    for body in (*bodies.ALL, *bodies.IN_ORDER):
        transport = create_transport("delegate", addresses=[f"rdma:rxe{host}_0/1", f"rdma:rxe{host}_1"])
        try:
            body(transport)
        except BaseException:
            failures[body.__name__] = traceback.format_exc()
        transport.close()
    return failures
