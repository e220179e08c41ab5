"""A backend of torch.distributed that orders its work as NCCL's does, and carries it over gloo.

An operation goes to a stream of its communicator, behind what the current stream had to do. ``wait()`` makes the current stream
wait, not the host. One communicator does its operations in one order, and the ranks' orders must agree. It is made at the first
operation, or at once where the group is bound to a device. Both block the host until all its ranks are there. Two ranks may not
share a device. ``abort`` ends operations without success, and what they were to write is no result.
"""

# pyright: reportIncompatibleMethodOverride=false
# torch's stub has the second form of each method, with one tensor; a backend has the first, with lists.

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup, Store, Work

from fake_cuda.detector import Kind
from fake_cuda.machine import Event, Machine, Point, the_machine
from fake_cuda.places import here, named

_FAILED_BYTE: Final = 0xAB
_OPS: Final = ("send", "receive", "all_reduce", "broadcast", "all_gather", "reduce_scatter", "barrier", "exchange")


class NcclWork(Work):
    """See :class:`torch.distributed.Work`."""

    def __init__(self, end: Event, point: Point, device: int) -> None:
        super().__init__()
        self._end = end
        self._point = point
        self._device = device
        self.error: Exception | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Have the current stream wait for the operation; the host goes on."""
        self._end.block(the_machine().current_line(self._device))
        return True

    def synchronize(self) -> None:
        """See :meth:`wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether the operation has ended, also without success."""
        return self._point.is_done

    def is_success(self) -> bool:
        """Whether the operation has ended and did what it was to do."""
        return self._point.is_done and self.error is None

    def exception(self) -> Exception | None:
        """Return why the operation failed, or None."""
        return self.error


@dataclass(frozen=True, slots=True)
class _Operation:
    """What is compared between ranks, and what is done: ``header`` is the op, the bytes, and the root, peer or received bytes.

    Its tensors are kept until it has ended, as NCCL's backend keeps them.
    """

    header: tuple[int, int, int]
    place: str
    body: Callable[[Any], None]
    read: tuple[Tensor, ...]
    written: tuple[Tensor, ...]
    work: NcclWork
    done: Point


class _Communicator:
    """Does the operations of some ranks in one order.

    Raises:
        distributed.DistBackendError: Two of its ranks use one device.
    """

    def __init__(self, store: Store, rank: int, size: int, device: int, timeout: timedelta) -> None:
        machine = the_machine()
        machine.syncs[f"a communicator is made at {named(here()[:1])}"] += 1
        self.rank, self.device = rank, device
        self._machine: Final[Machine] = machine
        self.line: Final = device, machine.new_stream(device)
        self._pending: list[_Operation] = []
        self._aborted: Exception | None = None
        store.set(f"device of {rank}", str(device))
        devices = [int(store.get(f"device of {other}")) for other in range(size)]
        for other, taken in enumerate(devices):
            if taken in devices[:other]:
                raise distributed.DistBackendError(
                    f"NCCL error: invalid usage: duplicate GPU detected: ranks {devices.index(taken)} and {other} are both on "
                    f"CUDA device {taken}"
                )
        self._gloo: Any = distributed.ProcessGroupGloo(store, rank, size, timeout=timeout)
        self._size = size
        self._queue: queue.SimpleQueue[_Operation | None] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name="stand-in for NCCL", daemon=True).start()

    def post(
        self,
        op: str,
        reads: Sequence[Tensor],
        writes: Sequence[Tensor],
        body: Callable[[Any], None],
        other: int = -1,
    ) -> NcclWork:
        """Put an operation on the communicator's stream, behind what the current stream has to do."""
        machine = self._machine
        for tensor in (*reads, *writes):
            if not tensor.is_cuda:
                raise RuntimeError("No backend type associated with device type cpu")
            if tensor.device.index != self.device:
                raise RuntimeError(
                    f"Tensor found on device cuda:{tensor.device.index} but backend constrained to cuda:{self.device}"
                )
        begin = Event()
        begin.record_on(machine.current_line(self.device))
        begin.block(self.line)
        addresses = [[tensor.untyped_storage().data_ptr() for tensor in group] for group in (reads, writes)]
        machine.launched(f"nccl {op}", *self.line, *addresses)
        for address in {*addresses[0], *addresses[1]}:
            machine.record_stream(address, *self.line)
        size = sum(tensor.nbytes for tensor in (reads if reads or op == "exchange" else writes))
        done, end = Point(), Event()
        work = NcclWork(end, done, self.device)
        operation = _Operation((_OPS.index(op), size, other), named(here()), body, tuple(reads), tuple(writes), work, done)
        self._pending.append(operation)
        # The stream may have work before this: it hands the operation over, then waits for its end.
        if self._aborted is not None:
            self._fail(operation, self._aborted)
        else:
            machine.deferred(*self.line, lambda: self._queue.put(operation))
            machine.wait(self.line, done)
        end.record_on(self.line)
        return work

    def abort(self) -> None:
        """End all operations without success."""
        self._aborted = distributed.DistBackendError("NCCL communicator was aborted")
        self._queue.put(None)
        for operation in list(self._pending):
            self._fail(operation, self._aborted)

    def _fail(self, operation: _Operation, error: Exception) -> None:
        if operation.done.is_done:
            return
        operation.work.error = error
        extension = self._machine.extension
        for tensor in operation.written:
            extension.on_host(tensor.detach()).view(torch.uint8).fill_(_FAILED_BYTE)
            self._machine.detector.work_failed(tensor.untyped_storage().data_ptr())
        self._machine.pass_point(operation.done)

    def _serve(self) -> None:
        while (operation := self._queue.get()) is not None:
            if self._aborted is not None:
                return
            try:
                self._agree(operation)
                operation.body(self._gloo)
            except Exception as error:
                self._fail(operation, error)
            else:
                self._machine.pass_point(operation.done)
            self._pending.remove(operation)
            del operation  # and its tensors with it

    def _agree(self, operation: _Operation) -> None:
        """Compare what the ranks do next.

        Raises:
            RuntimeError: They do different operations, on which NCCL would hang or mix bytes.
        """
        own = torch.tensor(operation.header)
        all_headers = [torch.empty_like(own) for _ in range(self._size)]
        self._gloo.allgather([all_headers], [own]).wait()
        for rank, header in enumerate(all_headers):
            theirs: list[int] = [*map(int, header)]
            expected = list(operation.header)
            if rank != self.rank and _OPS[expected[0]] in {"send", "receive"}:
                expected = [1 - expected[0], expected[1], self.rank]
            elif rank != self.rank and _OPS[expected[0]] == "exchange":
                expected = [expected[0], expected[2], expected[1]]
            if theirs != expected:
                own_op = f"rank {self.rank} does {_said(operation.header)} at {operation.place}"
                text = f"{own_op}, where rank {rank} does {_said(theirs)}"
                self._machine.detector.report(Kind.ORDER, text)
                raise RuntimeError(text)


def _said(header: Sequence[int]) -> str:
    op, size, other = header
    if _OPS[op] == "exchange":
        return f"exchange of {size} bytes sent and {other} received"
    return f"{_OPS[op]} of {size} bytes" + (f" with {other}" if other >= 0 else "")


class _Together(Work):
    """Messages that were begun as one."""

    def __init__(self, works: Sequence[NcclWork]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Have the current stream wait for all; the host goes on."""
        for work in self._works:
            work.wait()
        return True

    def is_completed(self) -> bool:
        """Whether all have ended."""
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        """Whether all have ended and did what they were to do."""
        return all(work.is_success() for work in self._works)

    def exception(self) -> Exception | None:
        """Return why one failed, or None."""
        return next((work.error for work in self._works if work.error is not None), None)


class ProcessGroupNCCL(ProcessGroup):
    """See torch's class of this name; it is its group's only backend as well."""

    _device_types = (torch.device("cuda"),)  # pyright: ignore[reportAssignmentType] - torch's stub has a property
    supports_coalescing = True

    class Options:
        """What torch sets; nothing of it is needed."""

        is_high_priority_stream = False

    def __init__(self, store: Store, rank: int, size: int, options: Any = None) -> None:
        super().__init__(rank, size)  # pyright: ignore[reportCallIssue]  # torch's stub leaves this form out
        self._kept_store = store
        self._timeout: timedelta = getattr(options, "_timeout", None) or timedelta(seconds=60)
        self._communicators: dict[str, _Communicator] = {}
        self._is_aborted = False
        self._together: list[tuple[int, Callable[[], NcclWork]]] | None = None

    def _get_backend(self, device: torch.device) -> ProcessGroupNCCL:
        return self

    def _start_coalescing(self, device: torch.device) -> None:
        self._together = []

    def _end_coalescing(self, device: torch.device) -> _Together:
        """Begin messages as one: their order on each side is of no account, so all ranks take them by their source."""
        assert self._together is not None
        begun, self._together = sorted(self._together, key=lambda one: one[0]), None
        return _Together([begin() for _, begin in begun])

    def getBackendName(self) -> str:  # noqa: N802
        """Return ``nccl``."""
        return "nccl"

    def get_group_store(self) -> Store:
        """Return the store by which its ranks met."""
        return self._kept_store

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Make the communicator of all ranks now."""
        self._all(device.index)

    def send(self, tensors: list[Tensor], dstRank: int, tag: int = 0) -> Any:  # noqa: N803
        """See :func:`torch.distributed.isend`; the tag is passed over, as by NCCL."""

        def begin() -> NcclWork:
            communicator, peer = self._pair(dstRank, tensors[0])
            host = [_host(tensor) for tensor in tensors]
            return communicator.post("send", tensors, [], lambda gloo: gloo.send(host, peer, 0).wait(), peer)

        return self._begin(self.rank(), begin)

    def recv(self, tensors: list[Tensor], srcRank: int, tag: int = 0) -> Any:  # noqa: N803
        """See :func:`torch.distributed.irecv`; the tag is passed over, as by NCCL."""

        def begin() -> NcclWork:
            communicator, peer = self._pair(srcRank, tensors[0])
            host = [_host(tensor) for tensor in tensors]
            return communicator.post("receive", [], tensors, lambda gloo: gloo.recv(host, peer, 0).wait(), peer)

        return self._begin(srcRank, begin)

    def _begin(self, source: int, begin: Callable[[], NcclWork]) -> Any:
        if self._together is None:
            return begin()
        self._together.append((source, begin))
        return None

    def exchange(self, sent: list[Tensor], received: list[Tensor], peer_rank: int) -> NcclWork:
        """Do sends and receives of one pair of ranks as one operation, in which none waits for another of them."""
        communicator, peer = self._pair(peer_rank, (*sent, *received)[0])
        host = [[_host(tensor) for tensor in tensors] for tensors in (sent, received)]

        def body(gloo: Any) -> None:
            works = [gloo.recv([tensor], peer, tag) for tag, tensor in enumerate(host[1])]
            works += [gloo.send([tensor], peer, tag) for tag, tensor in enumerate(host[0])]
            for work in works:
                work.wait()

        return communicator.post("exchange", sent, received, body, sum(tensor.nbytes for tensor in received))

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> NcclWork:
        """See :func:`torch.distributed.all_reduce`."""
        options = opts or distributed.AllreduceOptions()
        host = [_host(tensor) for tensor in tensors]
        return self._all(tensors[0].device.index).post(
            "all_reduce", [], tensors, lambda gloo: gloo.allreduce(host, options).wait()
        )

    def broadcast(self, tensors: list[Tensor], opts: Any) -> NcclWork:
        """See :func:`torch.distributed.broadcast`."""
        root, host = opts.rootRank, [_host(tensor) for tensor in tensors]
        return self._all(tensors[0].device.index).post(
            "broadcast", [], tensors, lambda gloo: gloo.broadcast(host, root).wait(), root
        )

    def allgather(self, output_tensors: list[list[Tensor]], input_tensors: list[Tensor], opts: Any = None) -> NcclWork:
        """See :func:`torch.distributed.all_gather`."""
        into, host = [[_host(tensor) for tensor in row] for row in output_tensors], [_host(tensor) for tensor in input_tensors]
        written = [tensor for row in output_tensors for tensor in row]
        communicator = self._all(input_tensors[0].device.index)
        return communicator.post("all_gather", input_tensors, written, lambda gloo: gloo.allgather(into, host).wait())

    def barrier(self, opts: Any = None) -> NcclWork:
        """See :func:`torch.distributed.barrier`; the host waits, as with NCCL."""
        device = torch.cuda.current_device()
        work = self._all(device).post("barrier", [], [], lambda gloo: None)
        work.wait()
        torch.cuda.current_stream(device).synchronize()
        return work

    def abort(self) -> None:
        """End all operations without success, here alone."""
        self._is_aborted = True
        for communicator in self._communicators.values():
            communicator.abort()

    def shutdown(self) -> None:
        """End the communicators."""
        self.abort()

    def _set_sequence_number_for_group(self) -> None: ...

    def _all(self, device: int) -> _Communicator:
        return self._communicator("all", self.rank(), self.size(), device)

    def _pair(self, peer: int, tensor: Tensor) -> tuple[_Communicator, int]:
        low, high = sorted((self.rank(), peer))
        return self._communicator(f"{low}:{high}", int(self.rank() == high), 2, tensor.device.index), int(peer == high)

    def _communicator(self, name: str, rank: int, size: int, device: int) -> _Communicator:
        if self._is_aborted:
            raise distributed.DistBackendError("NCCL communicator was aborted")
        if name not in self._communicators:
            store = distributed.PrefixStore(f"communicator {name}", self._kept_store)
            self._communicators[name] = _Communicator(store, rank, size, device, self._timeout)
        return self._communicators[name]


def _host(tensor: Tensor) -> Tensor:
    return the_machine().extension.on_host(tensor.detach())


def install() -> None:
    """Have torch.distributed know this backend by the name ``nccl``."""
    c10d: Any = distributed.distributed_c10d
    c10d.ProcessGroupNCCL = ProcessGroupNCCL
    c10d._NCCL_AVAILABLE = True
    one_by_one = c10d.batch_isend_irecv

    def batch_isend_irecv(p2p_op_list: list[Any]) -> list[Work]:
        """See :func:`torch.distributed.batch_isend_irecv`; a batch of this backend is one operation."""
        group, peers = p2p_op_list[0].group, {op.group_peer for op in p2p_op_list}
        if not isinstance(group, ProcessGroupNCCL):
            return one_by_one(p2p_op_list)
        if len(peers) > 1:
            raise NotImplementedError(f"a batch with ranks {sorted(peers)}: the stand-in for NCCL has batches with one rank")
        sent, received = ([op.tensor for op in p2p_op_list if op.op is way] for way in (c10d.isend, c10d.irecv))
        return [group.exchange(sent, received, *peers)]

    c10d.batch_isend_irecv = distributed.batch_isend_irecv = batch_isend_irecv
