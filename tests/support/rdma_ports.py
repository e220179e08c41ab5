"""RDMA ports on the hosts of the lab, looked for and watched, without torch: the lab's kernel needs 20 seconds to import it."""

from __future__ import annotations

import queue
from typing import Any

import inside

from adaptra.runtime.rdma import devices as rdma
from adaptra.runtime.rdma.watch import RdmaEvent, Watcher


def ports_of(_host: int) -> list[dict[str, Any]]:
    return [port.to_json() for port in rdma.find_ports()]


def find_on_a_host_with_a_pulled_plug() -> Any:
    inside.shell("ip -n n0 link set rail1 down")
    with inside.on_hosts(1, ports_of) as (process,):
        return process.result(100)


def watch(_host: int) -> list[list[str]]:
    events: queue.Queue[RdmaEvent] = queue.Queue()
    watcher = Watcher(["rxe0_0", "rxe0_1"], events.put)
    print("watching", flush=True)
    told = [events.get(timeout=100) for _ in range(2)]
    watcher.close()
    watcher.close()
    return [[event.device, event.event, event.ports[0].state, str(event)] for event in told]


def pull_a_plug_and_put_it_back() -> Any:
    with inside.on_hosts(1, watch) as (process,):
        process.wait_for("watching", 20)
        inside.shell("ip -n n0 link set rail1 down")
        inside.shell("ip -n n0 link set rail0 down")
        return process.result(100)
