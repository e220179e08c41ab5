"""Two ranks that exchange messages, by gloo or by the delegate's engine: what benchmarks put side by side."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from adaptra import _C
from adaptra.runtime.transports.base import ChannelClass
from adaptra.runtime.transports.delegate.endpoints import Endpoint, address_towards, share_endpoints, share_secret
from adaptra.runtime.transports.process_groups import job_store

TIMEOUT = 120.0


class Gloo:
    """Messages by torch.distributed's isend and irecv."""

    def __init__(self, rank: int, size: int, outstanding: int) -> None:
        self._peer = 1 - rank
        self._buffers = [torch.ones(size, dtype=torch.uint8) for _ in range(outstanding)]
        self._is_source = rank == 0

    def exchange(self, count: int) -> list[float]:
        """Move ``count`` messages from rank 0 to rank 1; when each was done on this rank, ``time.monotonic()``."""
        ends: list[float] = []
        start: Callable[[Tensor, int], dist.Work | None] = dist.isend if self._is_source else dist.irecv
        works: deque[dist.Work] = deque()
        for k in range(count):
            if len(works) == len(self._buffers):
                works.popleft().wait()
                ends.append(time.monotonic())
            work = start(self._buffers[k % len(self._buffers)], self._peer)
            assert work is not None
            works.append(work)
        for work in works:
            work.wait()
            ends.append(time.monotonic())
        return ends

    def echo(self, count: int) -> None:
        """Send a message to and fro ``count`` times."""
        for _ in range(count):
            for source in (0, 1):
                (dist.send if self._is_source == (source == 0) else dist.recv)(self._buffers[0], self._peer)


class Delegate:
    """Messages by the engine."""

    def __init__(self, engine: _C.Engine, rank: int, size: int, outstanding: int) -> None:
        self._engine = engine
        self._peer = 1 - rank
        self._size = size
        self._buffers = [engine.allocate(size) for _ in range(outstanding)]
        self._is_source = rank == 0
        engine.reserve(self._peer, size, outstanding)

    def exchange(self, count: int) -> list[float]:
        """Move ``count`` messages from rank 0 to rank 1; when each was done on this rank, ``time.monotonic()``."""
        ends: list[float] = []
        requests: deque[_C.Request] = deque()
        for k in range(count):
            if len(requests) == len(self._buffers):
                self._end(requests.popleft())
                ends.append(time.monotonic())
            requests.append(self._begin(self._is_source, k))
        for request in requests:
            self._end(request)
            ends.append(time.monotonic())
        return ends

    def echo(self, count: int) -> None:
        """Send a message to and fro ``count`` times."""
        for _ in range(count):
            for source in (0, 1):
                is_source = self._is_source == (source == 0)
                request = self._begin(is_source, 0)
                if not is_source:
                    self._end(request)

    def _begin(self, is_source: bool, k: int) -> _C.Request:
        # Rank 0's messages take the forward channel, rank 1's the backward one.
        is_rank_0s = self._is_source == is_source
        channel = ChannelClass.FORWARD if is_rank_0s else ChannelClass.BACKWARD
        if not is_source:
            return self._engine.receive(self._peer, channel, self._size)
        message = self._buffers[k % len(self._buffers)]
        return self._engine.send(self._peer, channel, message, self._size, time.monotonic())

    def _end(self, request: _C.Request) -> None:
        assert request.wait(TIMEOUT) and request.error is None, request.error
        self._engine.release(request)


def make_engine(rank: int, paths: int) -> _C.Engine:
    """The engine of one of two ranks, with the same address as often as paths are wanted."""
    store = job_store()
    host = address_towards(store)
    engine = _C.Engine(
        rank, 2, share_secret(store, rank), heartbeat=0.2, silence=5.0, healthy_for=1.0, lost_after=30.0, handshake=5.0
    )
    mine = [Endpoint("tcp", host, engine.add_tcp_path(host)) for _ in range(paths)]
    theirs = share_endpoints(store, rank, 2, mine)[1 - rank]
    engine.set_peer(1 - rank, [(endpoint.host, endpoint.port) for endpoint in theirs])
    engine.start()
    return engine
