"""Run a function in several processes that stand for the ranks of a job."""

import contextlib
import multiprocessing
import os
import random
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from patience import HUNG

NOTES = ("PYTEST_CURRENT_TEST", "PYTORCH_NVML_BASED_CUDA_CHECK", "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR")
"""What pytest, lightning and torch write into the environment as they run. An import of torch makes nothing else of it."""


@dataclass(frozen=True)
class Outcome:
    """How one process ended: what it returned, or its error's traceback, or neither if it was killed."""

    value: Any = None
    error: str | None = None
    exit_code: int | None = None


def free_port() -> int:
    """A TCP port that was free a moment ago and that no connection gets by itself."""
    return free_ports(1)


def free_ports(count: int) -> int:
    """The first of ``count`` such ports in a row, at a random position, so that two calls return different ones.

    A port that the system gives to connections would not do. A rank that tries to reach a store that is not there yet may be
    given the very port that it tries to reach. It is then connected to itself, and the store can't be opened any more.
    """
    lowest_given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    somewhere = random.Random()
    for _ in range(1000):
        first = somewhere.randrange(10_000, lowest_given - count)
        with contextlib.ExitStack() as found, contextlib.suppress(OSError):
            for port in range(first, first + count):
                found.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first
    raise AssertionError(f"no {count} free ports from 10000 to {lowest_given}")


@cache
def _server() -> tuple[Any, dict[str, str]]:
    """Start a server that has imported torch and compiled a model, of which processes are forks; and its environment."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["warm"])
    environment = _environment()
    # The server is not given this process's path, and Python's own start looks at its beginning.
    os.environ["PYTHONPATH"] = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), *sys.path])
    try:
        forkserver.ensure_running()
    finally:
        os.environ.pop("PYTHONPATH")
        os.environ |= environment
    return context, environment


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in NOTES}


def _context(is_fresh: bool) -> Any:
    """How to start processes: as forks, unless torch must be imported anew, in which it reads the environment."""
    if is_fresh:
        return multiprocessing.get_context("spawn")
    context, environment = _server()
    return context if environment == _environment() else multiprocessing.get_context("spawn")


def run_processes(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = HUNG,
    may_die: tuple[int, ...] = (),
    is_fresh: bool = False,
    store_stays: bool = True,
) -> list[Any]:
    """Call ``function(rank, *args)`` in ``world_size`` processes, with RANK, WORLD_SIZE and MASTER_* set.

    Args:
        function: At the top level of a module; ``args`` and its result can be pickled.
        world_size: The number of processes.
        timeout: Seconds after which all that is left is killed.
        may_die: Ranks whose death is part of the test; their value is None. They may not raise an error instead.
        is_fresh: Whether each process starts an interpreter of its own, as launchers do. The order of sets then differs.
        store_stays: Whether rank 0, which has a job's store, ends only after the others have returned.

    Returns:
        What each rank returned.

    Raises:
        AssertionError: A process failed, died or took too long; the others are killed.
    """
    is_on_cuda = are_on_cuda()
    context = _context(is_fresh or (is_on_cuda and _are_gpus()))
    port = free_port()
    processes, ends = [], []
    for rank in range(world_size):
        ours, theirs = context.Pipe()
        given = (theirs, function, rank, world_size, port, is_on_cuda, store_stays and rank == 0, args)
        process = context.Process(target=_run, args=given, daemon=True)
        process.start()
        theirs.close()
        processes.append(process)
        ends.append(ours)
    try:
        values = _collect(ends, processes, may_die, time.monotonic() + timeout, timeout)
    finally:
        for process, end in zip(processes, ends, strict=True):
            process.kill()
            process.join()
            end.close()
    aborted = [rank for rank, process in enumerate(processes) if process.exitcode in (-signal.SIGABRT, -signal.SIGSEGV)]
    assert not aborted, f"ranks {aborted} returned a value and aborted at their end"
    return values


def _collect(
    ends: list[Connection], processes: list[Any], may_die: tuple[int, ...], deadline: float, timeout: float
) -> list[Any]:
    values: list[Any] = [None] * len(ends)
    # A rank that may die need not end: it may be stopped.
    missing = {end: rank for rank, end in enumerate(ends) if rank not in may_die}
    while missing:
        ready = wait(list(missing), max(0.0, deadline - time.monotonic()))
        assert ready, f"ranks {sorted(missing.values())} did not end within {timeout} s"
        for end in ready:
            assert isinstance(end, Connection)
            rank = missing.pop(end)
            outcome = _outcome(end, processes[rank])
            assert outcome.error is None, f"rank {rank}: {outcome.error}"
            assert outcome.exit_code is None, f"rank {rank} died with exit code {outcome.exit_code}"
            values[rank] = outcome.value
    for rank in may_die:
        error = _outcome(ends[rank], processes[rank]).error if ends[rank].poll() else None
        assert error is None, f"rank {rank}, which should have died: {error}"
    return values


def _outcome(end: Connection, process: Any) -> Outcome:
    try:
        return end.recv()
    except EOFError:
        process.join(100)
        return Outcome(exit_code=process.exitcode)


def are_on_cuda() -> bool:
    """Whether the calling test makes its tensors on cuda, as its processes then do."""
    made_by_tests = sys.modules.get("fake_cuda.made_by_tests")
    return made_by_tests is not None and made_by_tests.is_on_cuda()


def _are_gpus() -> bool:
    """Whether cuda is GPUs here, which no fork can use whose parent has asked for them, as any import may have."""
    from fake_cuda.loading import is_enabled

    return not is_enabled()


def _on_device(rank: int, is_on_cuda: bool) -> contextlib.AbstractContextManager[None]:
    if not is_on_cuda:
        return contextlib.nullcontext()
    from fake_cuda.made_by_tests import on_cuda

    return on_cuda(rank)


def _run(
    end: Connection,
    function: Callable[..., Any],
    rank: int,
    world_size: int,
    port: int,
    is_on_cuda: bool,
    stays: bool,
    args: tuple[Any, ...],
) -> None:
    os.environ.pop("PYTHONPATH", None)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    try:
        import torch

        torch.set_num_threads(1)
        with _on_device(rank, is_on_cuda):
            outcome = Outcome(value=function(rank, *args))
    except BaseException:
        outcome = Outcome(error=traceback.format_exc())
    end.send(outcome)
    if stays:  # until whoever called ends it: another rank may be about to read from the store
        with contextlib.suppress(EOFError, OSError):
            end.recv()
    end.close()
