"""Descriptors of a rank: where none is free it rests and goes on later, and forked children keep none of its sockets."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path

import pytest
from delegate_lab import CALM, SECRET, EngineTimes
from stranger import hello, proof, read

from adaptra import _C
from adaptra.runtime.transports.base import ChannelClass

pytestmark = [pytest.mark.processes, pytest.mark.alone]
SIZE = 100_000
PRELUDE = f"""
import os, resource, sys
from adaptra import _C

engine = _C.Engine(0, 2, {SECRET!r}, **{CALM!r})
print(engine.add_tcp_path("127.0.0.2"), flush=True)
"""

FULL = (
    PRELUDE
    + """
engine.start()
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
taken = []
try:
    while True:
        taken.append(os.dup(0))
except OSError:
    print("full", flush=True)
sys.stdin.readline()
for one in taken:
    os.close(one)
sys.stdin.readline()
engine.close("the test is over", 0.0)
"""
)

FORKING = (
    PRELUDE
    + """
import time
from torch.utils.data import DataLoader

class Slow:
    def __len__(self):
        return 4
    def __getitem__(self, k):
        print(os.getpid(), flush=True)
        time.sleep(100)

engine.set_peer(1, [("127.0.0.2", int(sys.stdin.readline()))])
engine.start()
message = engine.allocate(100_000)
sent = engine.send(1, 0, message, 100_000, time.monotonic())
assert sent.wait(100) and sent.error is None
next(iter(DataLoader(Slow(), num_workers=1, multiprocessing_context="fork")))
"""
)


@contextlib.contextmanager
def running(code: str) -> Generator[tuple[subprocess.Popen[str], int], None, None]:
    """A process of this code, whose first line is the port on which its engine listens."""
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, int(process.stdout.readline())
        finally:
            process.kill()


def processor_seconds(pid: int) -> float:
    told = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, told[11:13])) / os.sysconf("SC_CLK_TCK")


def test_a_caller_for_whom_no_descriptor_is_free_waits_and_costs_nothing() -> None:
    with running(FULL) as (process, port):
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "full\n"
        with socket.create_connection(("127.0.0.2", port), timeout=30) as caller:
            greeting = hello(path=3)
            caller.sendall(greeting)
            before = processor_seconds(process.pid)
            until = time.process_time() + 1.0
            while time.process_time() < until:  # as long as a thread that spins takes to be seen, however busy the machine is
                pass
            assert processor_seconds(process.pid) - before < 0.3
            process.stdin.write("\n")
            process.stdin.flush()
            challenge = read(caller, 32)
            caller.sendall(proof("opener", greeting, challenge))
            assert read(caller, 32) == proof("acceptor", greeting, challenge)


def test_a_worker_of_a_data_loader_keeps_no_dead_rank_alive() -> None:
    """The worker, forked while the rank was connected, outlives it."""
    patient: EngineTimes = {**CALM, "lost_after": 60.0}
    engine = _C.Engine(1, 2, SECRET, **patient)
    port = engine.add_tcp_path("127.0.0.2")
    with running(FORKING) as (process, theirs):
        assert process.stdin is not None and process.stdout is not None
        engine.set_peer(0, [("127.0.0.2", theirs)])
        engine.start()
        try:
            engine.reserve(0, SIZE, 2)
            first, second = (engine.receive(0, ChannelClass.FORWARD, SIZE) for _ in range(2))
            process.stdin.write(f"{port}\n")
            process.stdin.flush()
            assert first.wait(100) and first.error is None
            worker = int(process.stdout.readline())
            process.kill()
            assert second.wait(100)
            os.kill(worker, 0)  # it lives
            assert second.error is not None and second.error.startswith("rank 0 is gone: ")
            os.kill(worker, signal.SIGKILL)
        finally:
            engine.close("the test is over", 0.0)
