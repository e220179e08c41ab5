"""What runs in the lab: a test's body, outside of all hosts, and the processes that it starts on them.

``python inside.py FILE FUNCTION ARGUMENTS`` calls a function of a module with arguments given as JSON; the last line on
standard output is what it returned, as JSON. The module finds what tests find, in
``tests/support``, ``tests/links`` and ``tests/rxe``.

Processes on hosts are forks of one that has imported the module. The lab's kernel needs 20 seconds to import torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import inspect
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any, ClassVar

RESULT = "result: "
_NETWORK, _MOUNTS = 0x4000_0000, 0x0002_0000
"""Linux's ``CLONE_NEWNET`` and ``CLONE_NEWNS``."""
_PRIVATE = 0x4000 | 0x0004_0000
"""Linux's ``MS_REC | MS_PRIVATE``."""


def command(function: Callable[..., Any], *arguments: Any) -> list[str]:
    """The command line that calls a function of a module's top level."""
    return [sys.executable, __file__, inspect.getfile(function), function.__name__, json.dumps(arguments)]


def result_of(output: str) -> Any:
    """What a function returned that was called by :func:`command`, out of all that was written."""
    (line,) = [line for line in output.splitlines() if line.startswith(RESULT)]
    return json.loads(line.removeprefix(RESULT))


class Nursery:
    """A process from which those on hosts are forked: it has imported what they need, and has no threads."""

    def __init__(self) -> None:
        gc.collect()
        gc.freeze()
        self._door, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork() == 0:
            self._door.close()
            _fork_for_ever(theirs)
        theirs.close()

    def fork(self, host: int, function: Callable[..., Any], arguments: Sequence[Any]) -> tuple[int, int]:
        """Call a function on a host. Returns a descriptor of the process, and one from which to read what it writes."""
        written, writes = os.pipe()
        asked = json.dumps([host, inspect.getfile(function), function.__name__, arguments])
        socket.send_fds(self._door, [asked.encode()], [writes])
        os.close(writes)
        return os.pidfd_open(int(self._door.recv(64))), written


def _fork_for_ever(door: socket.socket) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # so that nobody needs to wait for what has ended
    while True:
        asked, files, _, _ = socket.recv_fds(door, 1 << 16, 1)
        if not asked:
            os._exit(0)
        if (process := os.fork()) == 0:
            door.close()
            _call_on_host(files[0], *json.loads(asked))
        os.close(files[0])
        door.send(str(process).encode())


def _call_on_host(output: int, host: int, file: str, function: str, arguments: Sequence[Any]) -> None:
    """Call a function as ``ip netns exec`` would, and end as an interpreter does."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for one in (1, 2):
        os.dup2(output, one)
    sys.stdout, sys.stderr = open(1, "w", 1, errors="replace"), open(2, "w", 1, errors="replace")  # noqa: SIM115 - for life
    from ending import end_after  # found where the module is

    def call() -> None:
        _enter(host)
        _print_result_of(file, function, arguments)

    end_after(call)


def _enter(host: int) -> None:
    """Enter a host's network, with the view of its devices that is in /sys."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path(f"/run/netns/n{host}").open() as network:
        done = [libc.setns(network.fileno(), _NETWORK), libc.unshare(_MOUNTS), libc.mount(b"", b"/", None, _PRIVATE, None)]
    libc.umount2(b"/sys", 2)
    done.append(libc.mount(b"host", b"/sys", b"sysfs", 0, None))
    if any(done):
        raise OSError(ctypes.get_errno(), f"host n{host} can't be entered: {done}")


class Process:
    """A function running on a host; what it writes goes to standard output line by line, behind the host's name."""

    nursery: ClassVar[Nursery]

    def __init__(self, host: int, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
        self._name = f"n{host}"
        self._lines: list[str] = []
        self._told = threading.Condition()
        self._process, written = self.nursery.fork(host, function, arguments)
        self._written = os.fdopen(written, errors="replace")
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with self._written as written:
            for line in written:
                with self._told:
                    self._lines.append(line.rstrip("\n"))
                    self._told.notify_all()
                if not line.startswith(RESULT):
                    print(f"{self._name}: {line.rstrip()}", flush=True)
        with self._told:
            self._lines.append("")
            self._told.notify_all()

    def wait_for(self, line: str, timeout: float) -> None:
        """Wait until the process has written this line, or has ended."""
        with self._told:
            assert self._told.wait_for(lambda: line in self._lines or "" in self._lines, timeout), f"{self._name}: no {line!r}"
            assert line in self._lines, f"{self._name} ended without {line!r}"

    def wait_until(self, holds: Callable[[str], bool], timeout: float) -> str | None:
        """The first line to be written from now on of which this holds; None if none was in time, or the process has ended."""
        with self._told:
            begun = len(self._lines)

            def fitting() -> str | None:
                return next((line for line in self._lines[begun:] if not line or holds(line)), None)

            self._told.wait_for(lambda: fitting() is not None, timeout)
            return fitting() or None

    def stop(self) -> None:
        """Take the processor from it until :meth:`go_on`; its devices go on by themselves."""
        signal.pidfd_send_signal(self._process, signal.SIGSTOP)

    def go_on(self) -> None:
        """Give it back."""
        signal.pidfd_send_signal(self._process, signal.SIGCONT)

    def result(self, timeout: float) -> Any:
        """What the function returned."""
        self._reader.join(timeout)
        assert not self._reader.is_alive(), f"{self._name}: no result within {timeout} s"
        assert any(line.startswith(RESULT) for line in self._lines), f"{self._name} ended without a result"
        return result_of("\n".join(self._lines))

    def close(self) -> None:
        """End the process if it still runs."""
        if self._process >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._process, signal.SIGKILL)
            select.select([self._process], [], [])
            os.close(self._process)
            self._process = -1


@contextlib.contextmanager
def on_hosts(count: int, function: Callable[..., Any], *arguments: Any) -> Generator[list[Process], None, None]:
    """Processes that call ``function(host, *arguments)`` on the hosts 0 … count-1; what still runs in the end is killed."""
    processes: list[Process] = []
    try:
        for host in range(count):
            processes.append(Process(host, function, (host, *arguments)))
        yield processes
    finally:
        for process in processes:
            process.close()


def shell(line: str) -> str:
    """Run a command outside of all hosts, such as ``ip link set p0_0 down``; what it wrote.

    Raises:
        AssertionError: It failed.
    """
    done = subprocess.run(line.split(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{line}: {done.stderr}"
    return done.stdout


def _print_result_of(file: str, function: str, arguments: Sequence[Any]) -> None:
    result = getattr(importlib.import_module(Path(file).stem), function)(*arguments)
    print(f"{RESULT}{json.dumps(result)}", flush=True)


def _main(file: str, function: str, arguments: str) -> None:
    path = Path(file).resolve()
    tests = Path(__file__).resolve().parent.parent
    sys.path[:0] = [str(path.parent), *(str(tests / folder) for folder in ("support", "links"))]
    sys.modules["inside"] = sys.modules["__main__"]  # what the module imports by that name
    importlib.import_module(path.stem)
    if Path("/run/netns/n0").exists():
        Process.nursery = Nursery()
    _print_result_of(file, function, json.loads(arguments))


if __name__ == "__main__":
    _main(*sys.argv[1:])
