"""The backend that stands in for NCCL: work ends on streams, in one order per communicator, on one device per rank."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from fake_cuda.machine import Machine

Body = Callable[[int, Any], Any]


@pytest.fixture
def on_two_ranks(machine: Machine) -> Iterator[Callable[..., list[Any]]]:
    """Calls a function with the rank and its group, on two threads that stand for ranks; each has a device of its own."""
    import torch
    from fake_cuda.nccl import ProcessGroupNCCL
    from torch.distributed import HashStore

    groups: list[ProcessGroupNCCL] = []

    def call(body: Body, devices: tuple[int, int] = (0, 1)) -> list[Any]:
        store = HashStore()

        def one(rank: int) -> Any:
            torch.cuda.set_device(devices[rank])
            groups.append(group := ProcessGroupNCCL(store, rank, 2))
            return body(rank, group)

        with ThreadPoolExecutor(2) as pool:
            return [future.result(timeout=30) for future in [pool.submit(one, rank) for rank in (0, 1)]]

    yield call
    for group in groups:
        group.abort()


def kinds(machine: Machine) -> list[str]:
    return sorted({report.kind.name for report in machine.detector.reports})


def exchange(rank: int, group: Any, waits: bool = True) -> list[float]:
    import torch

    if rank == 0:
        group.send([torch.full((4,), 3.0, device="cuda")], 1).wait()
        return []
    got = torch.zeros(4, device="cuda")
    work = group.recv([got], 0)
    if waits:
        work.wait()
    doubled = got * 2
    work.wait()
    torch.cuda.synchronize(rank)
    return doubled.tolist() if waits else got.tolist()


def test_a_message_arrives_behind_the_streams_wait(on_two_ranks: Callable[..., list[Any]], machine: Machine) -> None:
    assert on_two_ranks(exchange) == [[], [6.0] * 4]
    assert not machine.detector.reports, [*map(str, machine.detector.reports)]
    assert sum(count for what, count in machine.syncs.items() if "communicator" in what) == 2


def test_use_without_the_streams_wait_is_a_race(on_two_ranks: Callable[..., list[Any]], machine: Machine) -> None:
    assert on_two_ranks(lambda rank, group: exchange(rank, group, waits=False)) == [[], [3.0] * 4]
    assert kinds(machine) == ["RACE"]


def test_waiting_keeps_the_stream_and_not_the_host(on_two_ranks: Callable[..., list[Any]], machine: Machine) -> None:
    """Each waits for the other's message before it sends its own, which hangs if the host is what waits."""
    import torch

    def cross(rank: int, group: Any) -> list[float]:
        side, mine, got = torch.cuda.Stream(), torch.full((2,), float(rank), device="cuda"), torch.zeros(2, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        first, second = (group.send, group.recv) if rank == 0 else (group.recv, group.send)
        for operation in (first, second):
            tensor = mine if operation == group.send else got
            operation([tensor], 1 - rank).wait()
        got.add_(10)
        return got.tolist()

    assert on_two_ranks(cross) == [[11.0] * 2, [10.0] * 2]
    assert not machine.detector.reports, [*map(str, machine.detector.reports)]


def test_a_message_is_sent_once_its_producer_is_done(on_two_ranks: Callable[..., list[Any]], machine: Machine) -> None:
    import torch

    gate = machine.hold()
    released: list[float] = []

    def body(rank: int, group: Any) -> float:
        if rank == 0:
            group.send([torch.ones(4, device="cuda") * 5], 1).wait()
            time.sleep(0.05)
            released.append(time.monotonic())
            gate.release()
            return 0.0
        got = torch.zeros(4, device="cuda")
        group.recv([got], 0).wait()
        return got[0].item()

    torch.cuda.set_device(0)
    assert on_two_ranks(body) == [0.0, 5.0] and released


def test_collectives_of_all_ranks(on_two_ranks: Callable[..., list[Any]], machine: Machine) -> None:
    import torch

    def body(rank: int, group: Any) -> tuple[list[float], list[float]]:
        summed, parts = torch.full((2,), rank + 1.0, device="cuda"), [torch.zeros(2, device="cuda") for _ in range(2)]
        group.allreduce([summed]).wait()
        group.allgather([parts], [torch.full((2,), float(rank), device="cuda")]).wait()
        group.barrier()
        return summed.tolist(), torch.cat(parts).tolist()

    assert on_two_ranks(body) == [([3.0, 3.0], [0.0, 0.0, 1.0, 1.0])] * 2
    assert not machine.detector.reports, [*map(str, machine.detector.reports)]


def test_two_ranks_on_one_device_are_refused(on_two_ranks: Callable[..., list[Any]]) -> None:
    with pytest.raises(RuntimeError, match="duplicate GPU detected: ranks 0 and 1 are both on CUDA device 1"):
        on_two_ranks(exchange, devices=(1, 1))


@pytest.mark.parametrize("extra", [0, 1], ids=["that match", "of other sizes"])
def test_a_batch_of_sends_and_receives_has_no_order(
    on_two_ranks: Callable[..., list[Any]], machine: Machine, extra: int
) -> None:
    import torch

    def body(rank: int, group: Any) -> list[float]:
        sent, got = torch.full((2 + rank * extra,), float(rank + 1), device="cuda"), torch.zeros(2, device="cuda")
        group.exchange([sent], [got], 1 - rank).wait()
        return got.tolist() if not extra else []

    assert on_two_ranks(body) == ([[2.0, 2.0], [1.0, 1.0]] if not extra else [[], []])
    torch.cuda.synchronize(0)
    assert kinds(machine) == (["ORDER"] if extra else [])


@pytest.mark.parametrize("fault", ["operations", "sizes", "both send"])
def test_orders_that_differ_between_ranks_are_reported(
    on_two_ranks: Callable[..., list[Any]], machine: Machine, fault: str
) -> None:
    import torch

    def body(rank: int, group: Any) -> bool:
        tensor = torch.ones(4 + (rank if fault == "sizes" else 0), device="cuda")
        if fault == "both send":
            work = group.send([tensor], 1 - rank)
        elif fault == "operations" and rank == 0:
            work = group.allgather([[torch.zeros(4, device="cuda") for _ in range(2)]], [tensor])
        else:
            work = group.allreduce([tensor])
        work.wait()
        torch.cuda.synchronize(rank)
        return work.is_success()

    assert on_two_ranks(body) == [False, False]
    assert kinds(machine) == ["ORDER"]


@pytest.mark.parametrize("asks", [False, True])
def test_what_an_aborted_operation_was_to_write_is_no_result(
    on_two_ranks: Callable[..., list[Any]], machine: Machine, asks: bool
) -> None:
    import torch

    gate = threading.Event()

    def body(rank: int, group: Any) -> str:
        got = torch.zeros(4, device="cuda")
        if rank == 0:
            assert group._pair(1, got)
            gate.wait(10)
            return ""
        work = group.recv([got], 0)
        work.wait()
        group.abort()
        gate.set()
        torch.cuda.synchronize(rank)
        assert work.is_completed() and not work.is_success()
        if not asks:
            got.add(1)
        with pytest.raises(RuntimeError, match="aborted"):
            group.recv([got], 0)
        return str(work.exception())

    assert on_two_ranks(body) == ["", "NCCL communicator was aborted"]
    assert kinds(machine) == ([] if asks else ["FAILED_WORK"])
