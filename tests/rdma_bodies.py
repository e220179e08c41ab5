"""What runs in the lab, on its hosts: transports and training over real queue pairs."""

from __future__ import annotations

import itertools
import os
import traceback
from pathlib import Path
from typing import Any

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


def used_paths(host: int, hosts: int) -> Any:
    """The paths that a rank has if nobody names any, and what a message over them counts."""
    import transport_bodies as bodies

    from adaptra.runtime.transports.registry import create_transport

    set_up(host, hosts)
    transport = create_transport("delegate")
    bodies.many_in_flight_both_ways(transport)
    transport.close()
    return [(key[:4], key[4]) for key in transport.statistics()]


def train(host: int, hosts: int, cases: list[list[Any]]) -> Any:
    """Cases of test_training_processes.py over the delegate with all paths that there are; per case, what differs."""
    import torch
    import torch.distributed as dist
    from test_training_processes import train_examples

    torch.set_num_threads(1)
    environment(host, hosts)
    found = train_examples(host, hosts, [tuple(case) for case in cases], "delegate")
    dist.destroy_process_group()
    return [differences for differences, *_ in found.values()]


ROUND = 16
STOP = Path("/tmp/stop")
QUICK = {"heartbeat": 0.05, "silence": 0.3, "healthy_for": 0.1, "lost_after": 30.0, "handshake": 1.0}


def stream(host: int, hosts: int, paths: list[str], timing: dict[str, float], failures: int) -> dict[str, Any]:
    """Two ranks send each other messages, every one different, until so many paths that rank 0 sends on have failed.

    Returns:
        How many messages came, each of which was the next one; how many of them held something else than they should; the
        longest time between two arrivals; and the counters of the channel that this rank sends on.
    """
    import time

    import torch
    from transport_bodies import backward, forward

    from adaptra.graph.specs import TensorSpec
    from adaptra.runtime.transports.delegate_engine import Timing
    from adaptra.runtime.transports.registry import create_transport

    set_up(host, hosts)
    specs = (TensorSpec((12000,), torch.int32),)
    transport = create_transport(
        "delegate", addresses=[path.format(host=host, address=host + 1) for path in paths], timing=Timing(**timing)
    )
    peer = 1 - host
    mine, theirs = (forward, backward) if host == 0 else (backward, forward)
    transport.reserve({(peer, specs): ROUND})
    count, longest, before, wrong = 0, 0.0, time.monotonic(), 0
    print("streaming", flush=True)
    for number in itertools.count():
        if host == 0:
            failed = [
                one["path_failures"] for source, *_, is_sender, one in transport.statistics() if is_sender and source == 0
            ]
            if is_over := max(failed, default=0) >= failures:
                STOP.touch()  # for whoever breaks the paths
            transport.store.set(f"round {number}", "stop" if is_over else "go")
        if transport.store.get(f"round {number}") == b"stop":
            break
        receives = [transport.receive(peer, theirs(k, specs=specs, step=number)) for k in range(ROUND)]
        for k in range(ROUND):
            transport.send(
                peer, mine(k, specs=specs, step=number), (torch.arange(12000, dtype=torch.int32) + number * ROUND + k,)
            )
        for k, pending in enumerate(receives):
            (got,) = pending.wait(40)
            longest, before = max(longest, pending.arrived_at - before), pending.arrived_at
            wrong += not torch.equal(got, torch.arange(12000, dtype=torch.int32) + number * ROUND + k)
            transport.release(pending)
            count += 1
    transport.close()
    sent = [counters for source, _, _, is_sender, counters in transport.statistics() if is_sender and source == host]
    return {"count": count, "wrong": wrong, "longest": longest, "counters": [one for one in sent if one["posted"] > 1]}


def train_on(host: int, hosts: int, steps: int) -> dict[str, Any]:
    """Train a small model over all paths there are, telling of every step; what differs from one process, and what was seen."""
    from training import MIXED, adam, compiled, differences, run_step, train_alone

    import adaptra

    set_up(host, hosts)
    done = []
    options = adaptra.Options(adapt=False)
    with compiled(MIXED, MIXED.rows(24, 0), stages=hosts, microbatches=8, options=options, transport="delegate") as pipe:
        optimizer = adam(pipe.parameters())
        for number in range(steps):
            done.append(run_step(pipe, optimizer, MIXED.rows(24, number)))
            print(f"step {number}", flush=True)
        links = [event.text for event in pipe.events if event.kind.value == "link"]
        (worker,) = pipe._require().workers
        monitored = len(worker.monitor.links)
        failures = sum(counters["path_failures"] for *_, counters in worker._transport.statistics())
    expected = train_alone(MIXED, [MIXED.rows(24, number) for number in range(steps)], 8)
    return {"differences": differences(done, expected, whole=False), "links": links, "seen": monitored, "failures": failures}
