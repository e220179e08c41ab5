"""Hosts on one machine, joined by links whose delay, rate and loss are stated and can be changed while traffic flows.

Each host is a network namespace whose only ways out are TUN devices. A router, a process of its own (``router.cc``), moves
packets from host to host and delays, slows or loses them as the links say. The kernel needs no traffic control for it. TCP is
the kernel's own, with its windows, acknowledgements, repetitions and resets, over Ethernet's packets. Unlike real hosts, all of
them and the router share this machine's processors.

Everything ends with the process that made the hosts, whatever ends that.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import link_changes

sys.path.append(str(Path(__file__).resolve().parent.parent / "rxe"))
import inside

HERE = Path(__file__).resolve().parent
ROUTER = HERE.parent.parent / "build" / "links" / "router"
SYSCTLS = Path("/proc/sys/net/ipv4")
MTU = 1500
QUEUE = 20000
"""Packets that wait in a host for the router, which is as busy as its machine: a network card would slow the sender down."""

STEADY = {"tcp_congestion_control": "reno", "tcp_slow_start_after_idle": "0"}
"""TCP that holds no message up for reasons of its own, as on hosts set up for long paths.

Windows stay as wide while nothing is sent. BBR, some machines' default, would all but stop a connection for a round trip and a
fifth of a second every ten seconds. Every kernel lets every host choose Reno."""

GRACE = 20.0
"""Seconds in which the other hosts say what they saw, once a process has failed on one."""

TOOLS = ("c++", "ip", "nsenter")
CONTROL = "LINKS_CONTROL"
"""What tells a program on a host where the links are changed: hosts, rails and the control socket."""


def missing() -> str | None:
    """Why there can be no such hosts here, or None."""
    if os.geteuid() != 0:
        return "hosts as network namespaces: need root"
    if not Path("/dev/net/tun").exists():
        return "hosts as network namespaces: no /dev/net/tun"
    absent = [tool for tool in TOOLS if shutil.which(tool) is None]
    if absent:
        return f"hosts as network namespaces: {', '.join(absent)} not installed (Debian packages g++, iproute2, util-linux)"
    tried = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True, check=False)
    return None if tried.returncode == 0 else f"hosts as network namespaces: {tried.stderr.strip()}"


def change_links(control: str, change: str) -> None:
    """Change links from anywhere on this machine; ``control`` is what :data:`CONTROL` says. See :mod:`link_changes`.

    Raises:
        ValueError: It says no change.
        ConnectionError: The hosts are gone.
    """
    hosts, rails, path = control.split(":", 2)
    for line in link_changes.parse(change, int(hosts), int(rails)):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as router:
            router.connect(path)
            router.send(line.encode())
            if wrong := router.recv(4096).decode():
                raise ValueError(wrong)


class LinkedHosts:
    """Hosts that exist until :meth:`close`, or as a context."""

    def __init__(self, hosts: int, *changes: str, rails: int = 1, tcp: Mapping[str, str] | None = None) -> None:
        """Make the hosts, host h with address 10.77.r.h+1 on the interface wan<r> of rail r.

        Args:
            hosts: How many, at most 254.
            changes: What the links are like, see :mod:`link_changes`; without any they carry all they can at once.
            rails: How many networks join them.
            tcp: Settings of the hosts' kernel, names as in /proc/sys/net/ipv4, such as :data:`STEADY`; else the system's.

        Raises:
            ValueError: No change of links.
            OSError: The hosts can't be made; :func:`missing` says why.
        """
        self._hosts, self._rails, self._tcp = hosts, rails, tcp or {}
        folder = tempfile.mkdtemp(prefix="links.")
        self._processes: list[subprocess.Popen[Any]] = []
        self._router = subprocess.Popen(
            [_built_router(), str(hosts), str(rails), folder],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        try:
            assert self._router.stdout is not None
            self._namespaces = [f"/proc/{self._router.pid}/fd/{each}" for each in self._router.stdout.readline().split()]
            if len(self._namespaces) != hosts:
                raise OSError("the router made no hosts; what it wrote says why")
            self.control = f"{hosts}:{rails}:{folder}/control"
            for host in range(hosts):
                self._configure(host)
            for change in changes:
                self.change(change)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> LinkedHosts:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End every process on the hosts, and the hosts."""
        assert self._router.stdin is not None
        self._router.stdin.close()
        self._router.wait()
        for process in self._processes:
            process.wait()

    def address(self, host: int, rail: int = 0) -> str:
        """A host's address on a rail."""
        return f"10.77.{rail}.{host + 1}"

    def change(self, change: str) -> None:
        """Change links, at once when this returns; see :mod:`link_changes`.

        Raises:
            ValueError: It says no change.
        """
        change_links(self.control, change)

    def start(self, host: int, command: Sequence[str], **more: Any) -> subprocess.Popen[Any]:
        """Start a program on a host; ``more`` is for :class:`subprocess.Popen`."""
        entered = ["nsenter", f"--net={self._namespaces[host]}", *command]
        process = subprocess.Popen(entered, **more)
        self._processes.append(process)
        return process

    def launch(self, command: Sequence[str], *, output: Callable[[int], IO[bytes] | None] = lambda _: None) -> list[int]:
        """Run a program on every host, as a launcher of distributed programs does, and wait for all of them.

        Args:
            command: Started in :meth:`environment`.
            output: Where each rank's standard output goes; None for this program's.

        Returns:
            The exit status of every rank.

        Raises:
            ConnectionError: The router ended.
        """
        started = [self.start(rank, command, env=self.environment(rank), stdout=output(rank)) for rank in range(self._hosts)]
        left = len(started)
        for process in _as_they_end([*started, self._router]):
            if process is self._router:
                raise ConnectionError(f"the router between the hosts ended with status {self._router.wait()}")
            left -= 1
            if not left:
                break
        return [process.wait() for process in started]

    def call(
        self, function: Callable[..., Any], *arguments: Any, timeout: float = 500.0, shown: Collection[int] = ()
    ) -> list[Any]:
        """Call ``function(rank, *arguments)`` of a module's top level in a process on every host; what each returned.

        Arguments and results are JSON values. What a process prints is shown when it fails; for the hosts in ``shown`` its
        standard error is this program's. Once one fails, the others have :data:`GRACE` seconds left.

        Raises:
            AssertionError: One failed or took longer than ``timeout`` seconds.
        """
        until = time.monotonic() + timeout
        with contextlib.ExitStack() as files:
            outputs = [files.enter_context(tempfile.TemporaryFile("w+")) for _ in range(self._hosts)]
            started = [
                self.start(
                    rank, inside.command(function, rank, *arguments), env=self.environment(rank), stdout=output,
                    stderr=None if rank in shown else output,
                )
                for rank, output in enumerate(outputs)
            ]  # fmt: skip
            statuses = _statuses(started, until)
            for output in outputs:
                output.seek(0)
            texts = [output.read() for output in outputs]
        assert not any(statuses), "\n".join(f"host {k}, status {status}:\n{texts[k]}" for k, status in enumerate(statuses))
        return [inside.result_of(text) for text in texts]

    def environment(self, rank: int) -> dict[str, str]:
        """This process's environment and what tells a distributed program its rank."""
        return os.environ | {
            "RANK": str(rank), "WORLD_SIZE": str(self._hosts), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": self.address(0), "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": "wan0", CONTROL: self.control,
        }  # fmt: skip

    def _configure(self, host: int) -> None:
        lines = ["link set lo up", *self._interfaces(host)]
        chosen = [f"echo '{value}' > {SYSCTLS / name}" for name, value in self._tcp.items()]
        command = ["sh", "-c", " && ".join(["ip -batch -", *chosen])]
        configured = self.start(host, command, stdin=subprocess.PIPE, text=True)
        configured.communicate("\n".join(lines) + "\n")
        if configured.returncode != 0:
            raise OSError(f"the interfaces of host {host} can't be set up")

    def _interfaces(self, host: int) -> Iterator[str]:
        """Yield the commands of ``ip`` that set a host's interfaces up."""
        for rail in range(self._rails):
            yield f"addr add {self.address(host, rail)}/24 dev wan{rail}"
            yield f"link set wan{rail} mtu {MTU} txqueuelen {QUEUE} up"


def _statuses(processes: Sequence[subprocess.Popen[Any]], until: float) -> list[int]:
    """Wait for processes, and kill those that are left at a time, or some seconds after one has failed."""
    for process in _as_they_end(processes, until):
        if process.wait():
            break
    for _ in _as_they_end(processes, min(until, time.monotonic() + GRACE)):
        pass
    for process in processes:
        if process.poll() is None:
            process.kill()
    return [process.wait() for process in processes]


def _as_they_end(processes: Sequence[subprocess.Popen[Any]], until: float | None = None) -> Iterator[subprocess.Popen[Any]]:
    """Yield each process when it ends, as long as none takes longer than until a time."""
    waits = select.poll()
    ends = {os.pidfd_open(process.pid): process for process in processes if process.poll() is None}
    try:
        for end in ends:
            waits.register(end, select.POLLIN)
        for _ in ends:
            if not (ended := waits.poll(None if until is None else 1e3 * max(0.0, until - time.monotonic()))):
                return
            waits.unregister(ended[0][0])
            yield ends[ended[0][0]]
    finally:
        for end in ends:
            os.close(end)


def _built_router() -> Path:
    """The router's program, compiled anew when a source is younger."""
    youngest = max(source.stat().st_mtime for pattern in ("*.cc", "*.h") for source in HERE.glob(pattern))
    if not ROUTER.exists() or ROUTER.stat().st_mtime < youngest:
        ROUTER.parent.mkdir(parents=True, exist_ok=True)
        # Several test processes may find it missing at once.
        made = ROUTER.with_suffix(f".{os.getpid()}")
        subprocess.run(["c++", "-std=c++20", "-O2", "-o", made, HERE / "router.cc"], check=True)
        made.replace(ROUTER)
    return ROUTER
