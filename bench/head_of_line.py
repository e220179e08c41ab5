"""Compute behind a slow communication kernel on its stream, beside the same with messages by the delegate. Needs a GPU.

One GPU runs ops, each of which sends a message over a link that takes a stated time per message. The baseline sends by a
kernel on the compute stream. The kernel copies the message and then occupies the queue for that time, as a send kernel does
whose peer isn't ready. Ours sends by the delegate: a copy stream, then the engine over loopback. A process on the host takes
one message in that time and grants no room for more. Both are measured in turn in one run: the time until the last op has
ended, and until the last message is delivered. The first row is the ops alone, without messages.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from _ranks import run_on_ranks
from _table import Row, parser, print_rows
from torch import Tensor

from adaptra.graph.ops.specs import TensorSpec
from adaptra.runtime.transports.base import Identity, Purpose, Transport
from adaptra.runtime.transports.registry import create_transport

WIDTH = 2048
TIMEOUT = 120.0
CYCLES = 20_000_000


@dataclass(frozen=True)
class Size:
    """How much is done in a run.

    Attributes:
        ops: In a run, each of which sends a message.
        op_seconds: That an op is to take.
        rows: Of each of a message's two tensors, (rows, WIDTH) float32.
    """

    ops: int
    op_seconds: float
    rows: int

    def identity(self, step: int, op: int) -> Identity:
        """Of the message that an op sends."""
        specs = (TensorSpec((self.rows, WIDTH), torch.float32), TensorSpec((WIDTH, self.rows), torch.float32))
        return Identity(step, Purpose.ACTIVATION, 0, 1, op, specs)


class Device:
    """The GPU's part: ops of a given time, and a communication kernel of a given time."""

    def __init__(self, size: Size) -> None:
        self._size = size
        self._inputs = torch.randn(WIDTH, WIDTH, device="cuda")
        self._weight = torch.randn(WIDTH, WIDTH, device="cuda")
        self._outputs = torch.empty(WIDTH, WIDTH, device="cuda")
        self._activation = torch.randn(size.rows, WIDTH, device="cuda")
        self._remote = torch.empty(2, size.rows, WIDTH, device="cuda")
        self._products = 1
        per_product = 1e-3 * self._milliseconds(lambda: self._multiply(50)) / 50
        self._products = max(1, round(size.op_seconds / per_product))
        self._cycles_per_second = CYCLES / (1e-3 * self._milliseconds(lambda: torch.cuda._sleep(CYCLES)))

    def op(self) -> list[Tensor]:
        """Queue an op; its message is two tensors, one of them not contiguous."""
        self._multiply(self._products)
        output = self._activation + 1.0
        return [output, output.t()]

    def communicate(self, tensors: list[Tensor], seconds: float) -> None:
        """Queue a send that occupies the stream for ``seconds``."""
        self._remote[0].copy_(tensors[0])
        self._remote[1].copy_(tensors[1].t())
        torch.cuda._sleep(int(seconds * self._cycles_per_second))

    def _multiply(self, count: int) -> None:
        for _ in range(count):
            torch.mm(self._inputs, self._weight, out=self._outputs)

    def _milliseconds(self, work: Callable[[], None]) -> float:
        work()
        started, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        started.record()
        work()
        ended.record()
        ended.synchronize()
        return started.elapsed_time(ended)


def behind_kernel(device: Device, size: Size, seconds: float | None) -> tuple[float, float]:
    """Seconds until all ops have ended, and until all messages are delivered; None for no messages."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    computed = torch.cuda.Event()
    for _ in range(size.ops):
        tensors = device.op()
        computed.record()
        if seconds is not None:
            device.communicate(tensors, seconds)
    computed.synchronize()
    ended = time.perf_counter() - started
    torch.cuda.synchronize()
    return ended, time.perf_counter() - started


def by_delegate(device: Device, size: Size, transport: Transport, step: int) -> tuple[float, float]:
    """Seconds until all ops have ended, and until all messages are delivered."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    pendings = [transport.send(1, size.identity(step, op), device.op()) for op in range(size.ops)]
    torch.cuda.current_stream().synchronize()
    ended = time.perf_counter() - started
    for pending in pendings:
        pending.wait(TIMEOUT)
    dist.barrier()  # The peer has taken the last one, too.
    return ended, time.perf_counter() - started


def take(transport: Transport, size: Size, step: int, seconds: float) -> None:
    """The slow peer: has room for one message, and takes ``seconds`` for each."""
    for op in range(size.ops):
        pending = transport.receive(0, size.identity(step, op))
        pending.wait(TIMEOUT)
        time.sleep(seconds)  # The link's time, not a condition.
        transport.release(pending)
    dist.barrier()


def measure(rank: int, size: Size, links: list[float], rounds: int) -> list[dict[str, Any]]:
    """One rank: rows as JSON. Rank 0 computes and sends, rank 1 receives on the host."""
    transport = create_transport("delegate", device="cuda" if rank == 0 else "cpu")
    if rank == 1:
        transport.reserve({(0, size.identity(0, 0).specs): 1})
    device = Device(size) if rank == 0 else None
    rows: list[Row] = []
    if device is not None:
        alone = median(behind_kernel(device, size, None)[0] for _ in range(rounds))
        rows.append(Row(f"{size.ops} ops, no messages", 1e3 * alone, None, "ms", rounds))
    step = 0
    for seconds in links:
        found: list[tuple[tuple[float, float], tuple[float, float]]] = []
        # The first round pins memory and compiles kernels.
        for _ in range(rounds + 1):
            dist.barrier()
            if device is None:
                take(transport, size, step, seconds)
            else:
                ours = by_delegate(device, size, transport, step)
                found.append((ours, behind_kernel(device, size, seconds)))
            step += 1
        for place, name in enumerate(("ops ended", "messages delivered")):
            if device is not None:
                ours, behind = (median(each[side][place] for each in found[1:]) for side in (0, 1))
                rows.append(Row(f"{1e3 * seconds:g} ms per message: {name}", 1e3 * ours, 1e3 * behind, "ms", rounds))
    dist.barrier()
    transport.close()
    return [row.to_json() for row in rows]


def main() -> int:
    """Start both processes and print the table, or say that there is no GPU."""
    arguments = parser(__doc__ or "")
    arguments.add_argument("--ops", type=int, default=32)
    arguments.add_argument("--op-ms", type=float, default=5.0, help="duration of every op, milliseconds")
    arguments.add_argument("--mib", type=int, default=8, help="of a message, MiB")
    arguments.add_argument("--links", type=float, nargs="+", default=[0, 2, 4, 8], help="time per message, milliseconds")
    arguments.add_argument("--rounds", type=int, default=5, help="pairs of measurements")
    given = arguments.parse_args()
    title = f"head-of-line blocking: {given.ops} ops of {given.op_ms:g} ms, each sends {given.mib} MiB"
    baseline = "kernel on the compute stream"
    if not torch.cuda.is_available():
        print("head_of_line: no CUDA device here, nothing was measured", file=sys.stderr if given.json else sys.stdout)
        if given.json:
            print_rows(title, [], baseline=baseline, as_json=True)
        return 0
    size = Size(given.ops, given.op_ms / 1e3, given.mib * (1 << 20) // (2 * 4 * WIDTH))
    found = run_on_ranks(measure, 2, size, [1e-3 * link for link in given.links], given.rounds)
    rows = [Row(row["name"], row["ours"], row["baseline"], row["unit"], row["runs"]) for row in found]
    print_rows(title, rows, baseline=baseline, as_json=given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
