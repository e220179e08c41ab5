"""Ranks of this machine for benchmarks on GPUs: each in a network of its own, where the link between two of them is delayed.

The networks are network namespaces. Pairs of virtual devices join them, and the kernel delays what leaves by one
(``tc netem``). So no program is in the data's path. Where a kernel has no netem, the links are those of
``tests/links/``, which a program delays. Without root all ranks share the machine's network, and what sends has to hold its
messages itself.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests" / "links"))
import linked_hosts
from linked_hosts import CONTROL, STEADY, LinkedHosts

NETEM, LINKED, HELD = "netem", "linked", "held"
"""How messages are delayed: by the kernel, by a program between networks, or by what sends them."""

WAYS: Final = {
    NETEM: "a network of its own for each rank; the kernel (tc netem) delays the link",
    LINKED: "a network of its own for each rank; the router of tests/links delays the link, as the kernel has no netem",
    HELD: "no root: each message is held by a kernel that spins on its stream, and ours by faults=",
}
_WIDE: Final = "4096 1048576 536870912"
"""Least, first and most bytes of a connection's window: one that carries 2 GB/s over 60 ms each way has 240 MB under way."""
_QUEUE: Final = 1_000_000
"""Packets that wait out their delay; with fewer netem drops some."""


def best_way() -> str:
    """Return the best way in which messages can be delayed here."""
    if linked_hosts.missing() is not None:
        return HELD
    trial = "ip link add wan0 type veth peer name wan1 && tc qdisc add dev wan0 root netem delay 1ms"
    tried = subprocess.run(["unshare", "--net", "sh", "-c", trial], capture_output=True, check=False)
    return NETEM if tried.returncode == 0 else LINKED


def make_hosts(way: str, ranks: int) -> LinkedHosts:
    """Return as many hosts as ranks, whose links are delayed in a way."""
    if way == HELD:
        return OneHost(ranks)
    return VethHosts(ranks) if way == NETEM else LinkedHosts(ranks, tcp=STEADY)


def set_delay(ranks: Sequence[int], seconds: float) -> None:
    """Delay the link between two ranks, both ways. Each rank calls it; the others may not send meanwhile."""
    rank, control = int(os.environ["RANK"]), os.environ.get(CONTROL)
    if control is None:
        return
    if control != NETEM:
        if rank == ranks[0]:
            linked_hosts.change_links(control, f"{ranks[0]}-{ranks[1]} delay={1e3 * seconds:g}ms")
    elif rank in ranks:
        (other,) = {*ranks} - {rank}
        command = f"tc qdisc replace dev wan{other} root netem delay {1e6 * seconds:.0f}us limit {_QUEUE}"
        subprocess.run(command.split(), check=True)


class OneHost(LinkedHosts):
    """Not hosts but this machine: all ranks share its network."""

    def __init__(self, ranks: int) -> None:
        self._hosts = ranks
        self._processes = []
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = str(free.getsockname()[1])
        self._namespaces = ["/proc/self/ns/net"] * ranks

    def start(self, host: int, command: list[str], **more: object) -> subprocess.Popen[bytes]:  # type: ignore[override]
        """See :meth:`LinkedHosts.start`."""
        process = subprocess.Popen(command, **more)  # type: ignore[call-overload]
        self._processes.append(process)
        return process

    def environment(self, rank: int) -> dict[str, str]:
        """See :meth:`LinkedHosts.environment`."""
        return os.environ | {
            "RANK": str(rank), "WORLD_SIZE": str(self._hosts), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(self._hosts),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": self._port,
        }  # fmt: skip

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.wait()


class VethHosts(LinkedHosts):
    """Hosts with a pair of virtual devices between each two of them; a host's device ``wan<k>`` leads to host k."""

    def __init__(self, hosts: int) -> None:
        self._hosts, self.control = hosts, NETEM
        self._tcp = STEADY | {"tcp_rmem": _WIDE, "tcp_wmem": _WIDE}
        self._processes = []
        # A network lasts as long as a process is in it; these end when their input does, so with this process.
        keeper = ["unshare", "--net", "sh", "-c", "echo made; exec cat"]
        self._keepers = [
            subprocess.Popen(keeper, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
            for _ in range(hosts)
        ]
        try:
            for process in self._keepers:
                assert process.stdout is not None
                if process.stdout.readline() != b"made\n":
                    raise OSError("a network namespace can't be made; what unshare wrote says why")
            self._namespaces = [f"/proc/{process.pid}/ns/net" for process in self._keepers]
            for low in range(hosts):
                for high in range(low + 1, hosts):
                    ends = f"wan{high} netns {self._keepers[low].pid} type veth peer wan{low} netns {self._keepers[high].pid}"
                    subprocess.run(f"ip link add {ends}".split(), check=True)
            for host in range(hosts):
                self._configure(host)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """See :meth:`LinkedHosts.close`."""
        for process in self._processes:
            process.kill()
            process.wait()
        for process in self._keepers:
            process.communicate()

    def environment(self, rank: int) -> dict[str, str]:
        """See :meth:`LinkedHosts.environment`. All devices of a host have its address, so any names it."""
        device = f"wan{int(rank == 0)}"
        return super().environment(rank) | {"GLOO_SOCKET_IFNAME": device, "NCCL_SOCKET_IFNAME": f"={device}"}

    def _interfaces(self, host: int) -> Iterator[str]:
        for other in range(self._hosts):
            if other != host:
                yield f"addr add {self.address(host)}/32 dev wan{other}"
                yield f"link set wan{other} up"
                yield f"route add {self.address(other)}/32 dev wan{other} src {self.address(host)}"
