"""Activations beside a sum over replicas on one limited port: by how much later they arrive than alone.

Host 0 adds gradients up with host 1, and sends activations to host 2 all the while. They travel over one transport. A message
of the sum that has left can't be overtaken, so its time on the port is what an activation may lose. The hosts need root, see
``tests/links/``. They are of one machine, with one clock.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time

import torch
import torch.distributed as dist
from _ranks import run_on_hosts
from _table import Row, parser, print_rows

from adaptra.collectives.buckets import part_of
from adaptra.graph.ops.specs import TensorSpec
from adaptra.runtime.data_parallel.collectives.carriers import TransportPosts
from adaptra.runtime.data_parallel.collectives.engine import GroupSum
from adaptra.runtime.transports.base import Identity, Purpose, now
from adaptra.runtime.transports.process_groups import Members, new_group
from adaptra.runtime.transports.registry import create_transport
from adaptra.runtime.world.world import WorkerId
from adaptra.simulation.links import Link

_FIRST: int = 3
"""Activations that find a connection which has not been used."""


def flights(rank: int, name: str, sizes: list[int], rate: float, every: float, count: int) -> list[list[float]]:
    """The seconds from each activation's hand-over to its arrival: alone, and beside sums."""
    size, activation, limit = sizes
    transport, found = create_transport(name), list[list[float]]()
    group = new_group(Members("replicas", rank, 2)) if rank < 2 else None
    total = None
    if group is not None:
        over, link = TransportPosts(transport, [WorkerId(0), WorkerId(1)], 0), Link(0.0, 1.0 / rate)
        total = GroupSum(group, limit=limit, over=over, link=link)
    specs = (TensorSpec((activation,), torch.uint8),)
    transport.reserve({(0, specs): count} if rank == 2 else {})
    for with_sums in (False, True):
        sent_at, ends = torch.zeros(count, dtype=torch.float64), threading.Event()
        dist.barrier()

        def add(ends: threading.Event = ends) -> None:
            terms, number = [torch.ones(size // 4)], 0
            go_on = torch.ones(1)
            while go_on.item():
                number += 1
                assert total is not None and group is not None, "this rank is a replica"
                total.combine_late(terms, terms.__getitem__, mean=True, number=number)
                go_on.fill_(float(not ends.is_set()))
                group.allreduce([go_on], dist.ReduceOp.MIN).wait()

        adder = threading.Thread(target=add)
        if with_sums and rank < 2:
            adder.start()
        identities = [Identity(int(with_sums), Purpose.ACTIVATION, 0, 1, number, specs) for number in range(count)]
        if rank == 0:
            for number, identity in enumerate(identities):
                time.sleep(every)
                sent_at[number] = now()
                transport.send(2, identity, [torch.zeros(activation, dtype=torch.uint8)]).wait(600)
        arrived_at = torch.zeros(count, dtype=torch.float64)
        if rank == 2:
            pending = [transport.receive(0, identity) for identity in identities]
            for number, one in enumerate(pending):
                one.wait(600)
                arrived_at[number] = one.arrived_at
                transport.release(one)
        dist.broadcast(arrived_at, 2)
        dist.broadcast(sent_at, 0)
        ends.set()
        if with_sums and rank < 2:
            adder.join()
        found.append((arrived_at - sent_at)[_FIRST:].tolist())
    dist.barrier()
    transport.close()
    return found


def main() -> int:
    """Measure and print."""
    arguments = parser(__doc__)
    arguments.add_argument("--transports", nargs="+", default=["c10d", "delegate"])
    arguments.add_argument("--megabytes", type=float, default=32.0, help="of the sum")
    arguments.add_argument("--activation", type=float, default=256.0, help="KiB")
    arguments.add_argument("--bucket", type=float, default=2.0, help="MiB of gradients that travel together")
    arguments.add_argument("--rate", type=float, default=25.0, help="of each port each way, MB/s")
    arguments.add_argument("--every", type=float, default=0.06, help="seconds between activations")
    arguments.add_argument("--count", type=int, default=40)
    given = arguments.parse_args()
    limit = int(given.bucket * (1 << 20))
    sizes = [int(given.megabytes * 1e6) // 4 * 4, int(given.activation * 1024), limit]
    message = 1e3 * part_of(limit, 2, 0).stop / (given.rate * 1e6)
    rows: list[Row] = []
    for name in given.transports:
        ports = [f"{host} rate={given.rate:g}MB" for host in range(3)]
        alone, beside = run_on_hosts(flights, 3, ports, name, sizes, given.rate * 1e6, given.every, given.count, steady=True)
        usual = statistics.median(alone)
        rows += [
            Row(f"{name}: an activation alone", 1e3 * usual, None, "ms", len(alone)),
            Row(f"{name}: later beside a sum, median", 1e3 * (statistics.median(beside) - usual), message, "ms", len(beside)),
            Row(f"{name}: later beside a sum, longest", 1e3 * (max(beside) - usual), message, "ms", len(beside)),
        ]
    title = f"ports of {given.rate:g} MB/s, messages of {limit // 2 / (1 << 20):g} MiB, activations of {given.activation:g} KiB"
    print_rows(title, rows, baseline="a message of the sum", as_json=given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
