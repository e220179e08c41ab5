"""The verbs wire beside perftest on the same pair of soft-RoCE devices, in a lab with one processor (tests/rxe).

    bench/verbs.py --lab-kernel FILE

Bandwidth is measured by messages of 1 MiB through two engines, 16 outstanding, beside ib_write_bw. Latency is that of a chunk
of 4 KiB, passed to and fro by the wire alone, without an engine, beside ib_write_lat. Median and mean differ much, since both
sides and the device share one processor.
"""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "tests" / "rxe"))
import inside
import lab
from _lab_hosts import swap
from _table import Row, parser, print_rows

from adaptra import _C
from adaptra.runtime.transports.base import ChannelClass

PING = ROOT / "build" / "cxx-plain" / "verbs_ping"
MIB = 1 << 20
COUNT = 160
OUTSTANDING = 16
ROUNDS = 300
TIMEOUT = 120.0
"""Processes of a lab on a busy machine are slow to begin."""
TIMING: dict[str, Any] = {"heartbeat": 0.2, "silence": 0.8, "healthy_for": 1.0, "lost_after": 10.0, "handshake": 3.0}


def main() -> None:
    """Build what is measured, boot the lab, and print what was measured in it."""
    arguments = parser(__doc__ or "")
    arguments.add_argument("--runs", type=int, default=5, help="of each program")
    arguments.add_argument("--lab-kernel", type=Path, default=lab.CACHED_KERNEL, help="see tests/rxe/build_kernel.sh")
    options = arguments.parse_args()
    if (reason := lab.missing(options.lab_kernel)) is not None:
        sys.exit(f"bench/verbs.py: {reason}")
    configure = ["cmake", "-S", "tests/cxx", "-B", "build/cxx-plain", "-DSANITIZE=", "-DCMAKE_BUILD_TYPE=Release"]
    for command in (configure, ["cmake", "--build", "build/cxx-plain", "--target", "verbs_ping"]):
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    clock = re.search(r"cpu MHz.*", Path("/proc/cpuinfo").read_text())
    command = inside.command(measure, options.runs, clock[0] if clock else "")
    finished = lab.run(options.lab_kernel, command, ROOT, timeout=120.0 + 90.0 * options.runs)
    if finished.status != 0:
        sys.exit(finished.output)
    rows = [Row(*row) for row in inside.result_of(finished.output)]
    print_rows("verbs wire over soft-RoCE", rows, baseline="perftest", as_json=options.json)


def measure(runs: int, clock: str) -> list[tuple[str, float, float | None, str, int]]:
    """What runs in the lab; ours and perftest's take turns. Values of :class:`Row`."""
    tell_clock(clock)
    ours: dict[str, list[float]] = {}
    theirs: dict[str, list[float]] = {}
    for _ in range(runs):
        add(ours, per_mib=1e3 * MIB / our_rate())
        add(theirs, per_mib=1e3 / perftest("ib_write_bw", MIB, 200)[3])
        halves = our_halves()
        add(ours, median=1e6 * statistics.median(halves), mean=1e6 * statistics.fmean(halves))
        typical, mean = perftest("ib_write_lat", 4096, ROUNDS)[4:6]
        add(theirs, median=typical, mean=mean)
    names = {
        "per_mib": ("one of many messages of 1 MiB", "ms"),
        "median": ("4 KiB one way, median of the best run", "µs"),
        "mean": ("4 KiB one way, mean of the best run", "µs"),
    }
    # In many of its runs perftest spins on the processor that the other side and the device need. The kernel takes it away only
    # after 10 ms. The best run is one without that.
    of_runs = {key: statistics.median if key == "per_mib" else min for key in names}
    rows: list[tuple[str, float, float | None, str, int]] = [
        (name, of_runs[key](ours[key]), of_runs[key](theirs[key]), unit, runs) for key, (name, unit) in names.items()
    ]
    return rows


def add(found: dict[str, list[float]], **values: float) -> None:
    """One more run's values."""
    for name, value in values.items():
        found.setdefault(name, []).append(value)


def tell_clock(line: str) -> None:
    """Perftest reads the processor's clock from a file in which this kernel leaves it out; it is that of the machine."""
    told = Path("/tmp/cpuinfo")
    told.write_text(f"{Path('/proc/cpuinfo').read_text()}{line}\n")
    subprocess.run(["mount", "--bind", str(told), "/proc/cpuinfo"], check=True)


def perftest(program: str, size: int, count: int) -> list[float]:
    """The columns of perftest's table for one size. Repeated while it can't make sense of the processor's clock."""
    command = [program, "-F", "-s", str(size), "-n", str(count), "-x", "1"]
    client = None
    for _ in range(20):
        server = subprocess.Popen(
            ["ip", "netns", "exec", "n1", *command, "-d", "rxe1_0"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            for _ in range(50):
                client = subprocess.run(
                    ["ip", "netns", "exec", "n0", *command, "-d", "rxe0_0", "10.9.0.2"],
                    capture_output=True, text=True, check=False, timeout=60,
                )  # fmt: skip
                if "Couldn't connect" not in client.stderr + client.stdout:
                    break
                time.sleep(0.05)  # the server is not there yet
            server.wait(20)
        finally:
            server.kill()
            server.wait()
        assert client is not None
        for line in client.stdout.splitlines():
            if re.match(rf" *{size} +{count} ", line) and "inf" not in line and "nan" not in line:
                return [float(word) for word in line.split()]
    raise AssertionError(f"{program}: no figures: {client and client.stdout + client.stderr}")


def our_halves() -> list[float]:
    """Seconds of one way, from the wire alone."""
    common = ["7000", "4096", str(ROUNDS)]
    server = subprocess.Popen(["ip", "netns", "exec", "n1", str(PING), "rxe1_0", "10.9.0.2", *common])
    client = subprocess.run(
        ["ip", "netns", "exec", "n0", str(PING), "rxe0_0", "10.9.0.1", *common, "10.9.0.2"],
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert server.wait(20) == 0, "the other side failed"
    return [float(line) for line in client.stdout.split()]


def our_rate() -> float:
    """Bytes per second through two engines."""
    with inside.on_hosts(2, stream, MIB, COUNT) as processes:
        return processes[0].result(TIMEOUT)


def stream(host: int, size: int, count: int) -> float:
    """Send ``count`` messages from host 0 to host 1; bytes per second, where sending."""
    engine = _C.Engine(host, 2, bytes(32), **TIMING)
    local = f"10.9.0.{host + 1}"
    engine.set_peer(1 - host, swap(host, [(local, engine.add_verbs_path(f"rxe{host}_0", 1, local))]))
    engine.start()
    engine.reserve(1 - host, size, OUTSTANDING)
    rate = send(engine, size, count) if host == 0 else receive(engine, size, count)
    engine.close("measured", 2.0)
    return rate


def send(engine: _C.Engine, size: int, count: int) -> float:
    """The sending host: bytes per second, without the first messages, which set up slots."""
    message = engine.allocate(size)
    sent: deque[_C.Request] = deque()
    started = 0.0
    for number in range(OUTSTANDING + count):
        if number == OUTSTANDING:
            started = time.monotonic()
        if len(sent) == OUTSTANDING:
            end(sent.popleft())
        sent.append(engine.send(1, ChannelClass.FORWARD, message, size, time.monotonic()))
    while sent:
        end(sent.popleft())
    return count * size / (time.monotonic() - started)


def receive(engine: _C.Engine, size: int, count: int) -> float:
    """The receiving host."""
    for request in deque(engine.receive(0, ChannelClass.FORWARD, size) for _ in range(OUTSTANDING + count)):
        end(request)
        engine.release(request)
    return 0.0


def end(request: _C.Request) -> None:
    """Wait for a message."""
    assert request.wait(TIMEOUT) and request.error is None, request.error


if __name__ == "__main__":
    main()
