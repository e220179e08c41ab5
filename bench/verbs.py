"""The verbs wire beside perftest on the same pair of soft-RoCE devices, in a lab with one processor (tests/rxe).

    bench/verbs.py --lab-kernel FILE

Bandwidth: messages of 1 MiB through two engines, 16 outstanding, beside ib_write_bw. Latency: a chunk of 4 KiB passed to and
fro by the wire alone, without an engine, beside ib_write_lat; median and mean differ much, since both sides and the device
share one processor. Last, without a baseline: how long messages stop coming when their path breaks.
"""

from __future__ import annotations

import itertools
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
from _table import Row, parser, print_rows

from adaptra import _C

PING = ROOT / "build" / "cxx-plain" / "verbs_ping"
MIB = 1 << 20
COUNT = 160
OUTSTANDING = 16
ROUNDS = 300
TIMING = {"heartbeat": 0.2, "silence": 0.8, "healthy_for": 1.0, "lost_after": 10.0, "handshake": 3.0}
WARM_UP = 2.0
WAYS = {
    "nothing": ("true", "true"),
    "own port down": ("ip -n n0 link set rail0 down", "ip -n n0 link set rail0 up"),
    "peer's port down": ("ip -n n1 link set rail0 down", "ip -n n1 link set rail0 up"),
    "all packets lost": ("tc qdisc add dev p0_0 root netem loss 100%", "tc qdisc del dev p0_0 root"),
}


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
    # In many of its runs perftest spins on the processor that the other side and the device need, until the kernel takes it
    # away after 10 ms: the best run is one without that.
    of_runs = {key: statistics.median if key == "per_mib" else min for key in names}
    rows: list[tuple[str, float, float | None, str, int]] = [
        (name, of_runs[key](ours[key]), of_runs[key](theirs[key]), unit, runs) for key, (name, unit) in names.items()
    ]
    for way, (spoil, mend) in WAYS.items():
        gaps = [gap_after(spoil, mend) for _ in range(runs)]
        rows.append((f"longest pause: {way}", 1e3 * statistics.median(gaps), None, "ms", runs))
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
        for line in client.stdout.splitlines():
            if re.match(rf" *{size} +{count} ", line) and "inf" not in line and "nan" not in line:
                return [float(word) for word in line.split()]
    raise AssertionError(f"{program}: no figures: {client.stdout} {client.stderr}")


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
    with inside.on_hosts(2, stream, MIB, COUNT, ["rdma"]) as processes:
        return processes[0].result(60)[0]


def gap_after(spoil: str, mend: str) -> float:
    """The longest time between two arrivals, in seconds, while the path that carries the messages breaks."""
    Path("/tmp/stop").unlink(missing_ok=True)
    with inside.on_hosts(2, stream, 1 << 14, 0, ["rdma", "spare", "tcp"]) as processes:
        processes[1].wait_for("warm", 30)
        inside.shell(spoil)
        time.sleep(1.5)  # how long it stays broken
        Path("/tmp/stop").touch()
        longest = processes[1].result(60)[1]
        processes[0].result(60)
    inside.shell(mend)
    return longest


def stream(host: int, size: int, count: int, kinds: list[str]) -> tuple[float, float]:
    """Send messages from host 0 to host 1, ``count`` of them, or until the file /tmp/stop is there.

    Returns:
        Bytes per second, where sending; the longest time between two arrivals, where receiving.
    """
    engine = _C.Engine(host, 2, bytes(32), **TIMING)
    ports = []
    for kind in kinds:
        match kind:
            case "rdma":
                ports.append((f"10.9.0.{host + 1}", engine.add_verbs_path(f"rxe{host}_0", 1, f"10.9.0.{host + 1}")))
            case "spare":
                ports.append((f"10.9.1.{host + 1}", engine.add_verbs_path(f"rxe{host}_1", 1, f"10.9.1.{host + 1}")))
            case _:
                ports.append((f"10.8.0.{host + 1}", engine.add_tcp_path(f"10.8.0.{host + 1}")))
    engine.set_peer(1 - host, exchange(host, ports))
    engine.start()
    engine.reserve(1 - host, size, OUTSTANDING)
    result = send(engine, size, count) if host == 0 else receive(engine, size, count)
    engine.close("measured", 2.0)
    return result


def exchange(host: int, mine: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """The other host's ports; the hosts share their files."""
    part = Path(f"/tmp/ports.{host}.part")
    part.write_text(repr(mine))
    part.rename(f"/tmp/ports.{host}")
    theirs = Path(f"/tmp/ports.{1 - host}")
    while not theirs.exists():
        time.sleep(0.01)
    found = [(address, int(port)) for address, port in re.findall(r"\('([^']+)', (\d+)\)", theirs.read_text())]
    theirs.unlink()
    return found


def send(engine: _C.Engine, size: int, count: int) -> tuple[float, float]:
    """The sending host."""
    message = engine.allocate(size)
    sent: deque[Any] = deque()
    started, number = 0.0, 0
    for number in itertools.count():
        if number == OUTSTANDING:
            started = time.monotonic()  # what comes before sets up slots
        if len(sent) == OUTSTANDING:
            assert sent[0].wait(30) and sent.popleft().error is None
        if number == count + OUTSTANDING if count else Path("/tmp/stop").exists():
            break
        sent.append(engine.send(1, False, message, size, time.monotonic()))
    while sent:
        assert sent[0].wait(30) and sent.popleft().error is None
    rate = (number - OUTSTANDING) * size / (time.monotonic() - started)
    # An empty-handed message of another size says that this was all.
    last = engine.send(1, False, message, 8, time.monotonic())
    last.wait(5)
    return rate, 0.0


def receive(engine: _C.Engine, size: int, count: int) -> tuple[float, float]:
    """The receiving host."""
    engine.reserve(0, 8, 1)
    expected: deque[Any] = deque()
    before, longest, is_warm, began = 0.0, 0.0, False, time.monotonic()
    while True:
        while len(expected) < OUTSTANDING:
            expected.append(engine.receive(0, False, size))
        request = expected.popleft()
        assert request.wait(30), "nothing came"
        if request.other is not None:
            break
        assert request.error is None, request.error
        if before:
            longest = max(longest, request.moment - before)
        before = request.moment
        engine.release(request)
        if not is_warm and time.monotonic() - began > WARM_UP:
            # By now messages take the best path.
            is_warm, longest = True, 0.0
            print("warm", flush=True)
    return 0.0, longest


if __name__ == "__main__":
    main()
