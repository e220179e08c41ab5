"""The supervisor of a job's processes on one host: it holds the store on the first host, starts them, and tells how each ends.

torchrun stops a node's other processes once one of them fails. Here each process has a launcher of its own (torch's
:func:`torch.distributed.elastic.multiprocessing.start_processes`), so the others learn of the end by the job itself.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from torch.distributed import DistNetworkError, Store, TCPStore
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, PContext, RunProcsResult, Std, start_processes

from adaptra.errors import LaunchError
from adaptra.runtime.launch.host_file import HostLine
from adaptra.runtime.launch.told_ends import ToldEnds

_INTERVAL: Final = 0.02
_MEETING: Final = timedelta(minutes=30)
"""How long another host waits for the store of the first one, as torch's processes do."""
_HOLD_SECONDS: Final = 15.0
"""Seconds after the ends of the first host's processes, in which the others may go on without them, or end."""
SIGNAL_BASE: Final = 128
"""A shell's exit status of a process that a signal ended is this plus the signal."""


@dataclass(frozen=True, slots=True)
class ProcessEnd:
    """The end of one process.

    Attributes:
        rank: The process.
        code: Its exit status; minus the signal if one ended it.
        seconds: The seconds that it ran.
    """

    rank: int
    code: int
    seconds: float

    def __str__(self) -> str:
        return f"rank {self.rank} {self.how} after {self.seconds:.1f} s"

    @property
    def how(self) -> str:
        """How it ended, in words."""
        return f"was ended by {signal.Signals(-self.code).name}" if self.code < 0 else f"ended with status {self.code}"

    @property
    def status(self) -> int:
        """The exit status as a shell gives it."""
        return SIGNAL_BASE - self.code if self.code < 0 else self.code


class Supervisor:
    """The processes of one host.

    Args:
        hosts: The hosts of the job; the first one has the store.
        index: This one's index among them.
        port: The port of the store.
        command: What each process runs, with its arguments.
        logs: The folder for what they write, in a folder for each rank; None for this process's own output.
    """

    def __init__(self, hosts: Sequence[HostLine], index: int, port: int, command: Sequence[str], logs: Path | None) -> None:
        self._hosts = hosts
        self._index = index
        self._command = command
        self._logs = logs
        first = sum(host.count for host in hosts[:index])
        self.ranks: Final = range(first, first + hosts[index].count)
        self._store = None if index else _store(port)
        self._port = port if self._store is None else self._store.port
        self._running: dict[int, tuple[PContext, float]] = {}
        self._told = ToldEnds(self._open_store)

    @property
    def outlived(self) -> frozenset[int]:
        """The processes of the job that it has gone on without, once they have all ended here."""
        return frozenset(self._told.outlived)

    def run(self, on_end: Callable[[ProcessEnd], object], grace: float | None) -> list[ProcessEnd]:
        """Start all processes, and wait for their ends.

        Args:
            on_end: Called at each end.
            grace: The seconds for which others go on once one has failed; None for as long as they like.

        Returns:
            Their ends, in order of time.
        """
        ends: list[ProcessEnd] = []
        deadline: float | None = None
        with TemporaryDirectory() as temporary:
            try:
                for rank in self.ranks:
                    self._running[rank] = self._start(rank, temporary), time.monotonic()
                while self._running:
                    for end in self._ended():
                        self._told.tell(end.rank, end.how)
                        ends.append(end)
                        on_end(end)
                        if end.code and grace is not None and deadline is None:
                            deadline = time.monotonic() + grace
                    if deadline is not None and time.monotonic() > deadline:
                        self._stop()
                    time.sleep(_INTERVAL)
                if any(end.code for end in ends):
                    self._hold_the_store()
            except BaseException:
                self._stop()
                raise
        self._told.close()
        return ends

    def _open_store(self) -> Store:
        if self._store is not None:
            return self._store
        return TCPStore(self._hosts[0].name, self._port, is_master=False, wait_for_workers=False, timeout=_MEETING)

    def _hold_the_store(self) -> None:
        """Keep the store as long as the job goes on without a process of this host, or may do so soon."""
        everyone = set(range(sum(host.count for host in self._hosts)))
        until = time.monotonic() + _HOLD_SECONDS
        while self._store is not None and everyone - self._told.ended - self._told.outlived:
            if time.monotonic() > until and self._told.outlived.isdisjoint(self.ranks):
                return
            time.sleep(_INTERVAL)

    def _start(self, rank: int, temporary: str) -> PContext:
        folder = Path(temporary if self._logs is None else self._logs) / f"rank-{rank}"
        folder.mkdir(parents=True, exist_ok=True)
        logs = DefaultLogsSpecs(str(folder), redirects=Std.NONE if self._logs is None else Std.ALL)
        program, *arguments = self._command
        return start_processes("adaptra", program, {0: tuple(arguments)}, {0: self._environment(rank)}, logs)

    def _environment(self, rank: int) -> dict[str, str]:
        host = self._hosts[self._index]
        variables: Mapping[str, object] = {
            "RANK": rank,
            "LOCAL_RANK": rank - self.ranks.start,
            "WORLD_SIZE": sum(one.count for one in self._hosts),
            "LOCAL_WORLD_SIZE": host.count,
            "GROUP_RANK": self._index,
            "GROUP_WORLD_SIZE": len(self._hosts),
            "MASTER_ADDR": self._hosts[0].name,
            "MASTER_PORT": self._port,
            # Else rank 0 would have a store of its own, which ended with it.
            "TORCHELASTIC_USE_AGENT_STORE": True,
            "TORCHELASTIC_RUN_ID": "adaptra",
            "TORCHELASTIC_RESTART_COUNT": 0,
            "TORCHELASTIC_MAX_RESTARTS": 0,
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        }
        return {name: str(value) for name, value in variables.items()}

    def _ended(self) -> list[ProcessEnd]:
        ends: list[ProcessEnd] = []
        for rank, (context, began) in [*self._running.items()]:
            result = context.wait(0)
            if result is not None:
                del self._running[rank]
                ends.append(ProcessEnd(rank, _code(result), time.monotonic() - began))
        return ends

    def _stop(self) -> None:
        """End what still runs: asked first, and killed if it does not."""
        contexts = [context for context, _ in self._running.values()]
        with ThreadPoolExecutor(max(1, len(contexts))) as side_by_side:
            list(side_by_side.map(_end, contexts))


def command_of(script: Sequence[str], *, is_module: bool) -> list[str]:
    """Return what runs a Python script, or a module, with its arguments.

    Raises:
        LaunchError: There is none.
    """
    if not script:
        raise LaunchError("run: expected a script behind the options, such as adaptra run -n 4 train.py")
    if not is_module and not Path(script[0]).is_file():
        raise LaunchError(f"run: {script[0]!r} is no file: expected a Python script, or a module behind -m")
    return [sys.executable, "-u", *(("-m",) if is_module else ()), *script]


def _end(context: PContext) -> None:
    context.close(signal.SIGTERM)


def _store(port: int) -> TCPStore:
    # torch's store looks up the name of each host that connects to it, and answers nobody meanwhile. That takes five seconds
    # where a name server loses the question. This process needs no name any more, so it asks no server.
    if (configure := getattr(ctypes.CDLL(None), "__nss_configure_lookup", None)) is not None:  # glibc has it
        configure(b"hosts", b"files")
    try:
        return TCPStore("0.0.0.0", port, is_master=True, wait_for_workers=False)
    except DistNetworkError as error:
        raise LaunchError(f"run: port {port} of the store: {str(error).splitlines()[0]}: expected a free one") from error


def _code(result: RunProcsResult) -> int:
    return next((failure.exitcode for failure in result.failures.values()), 0)
