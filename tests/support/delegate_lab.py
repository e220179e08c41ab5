"""Two engines of the delegate in one process, joined by links that fail to order.

A link is a TCP proxy with real sockets on both sides. So the engine sees what a network shows it: a reset, silence, or bytes
that changed on the way.
"""

from __future__ import annotations

import contextlib
import ctypes
import selectors
import socket
import struct
import threading
import time
from typing import TypedDict

from adaptra import _C
from adaptra.runtime.transports.base import ChannelClass
from adaptra.runtime.transports.delegate.endpoints import Endpoint
from adaptra.runtime.transports.delegate.engine import Listen, listen

SECRET = bytes(range(32))


class EngineTimes(TypedDict):
    """The times that an engine is given, in seconds."""

    heartbeat: float
    silence: float
    healthy_for: float
    lost_after: float
    handshake: float


QUICK: EngineTimes = {"heartbeat": 0.05, "silence": 0.25, "healthy_for": 0.3, "lost_after": 2.0, "handshake": 1.0}

# Where no link fails: on a busy machine a quarter of a second without a sign of life says little.
CALM: EngineTimes = {**QUICK, "silence": 20.0}


class Link:
    """Carries the connections to one port, and does with them what it is told."""

    def __init__(self, host: str, target: tuple[str, int]) -> None:
        self.target = target
        self._listener: socket.socket | None = socket.create_server((host, 0))
        self.endpoint: tuple[str, int] = self._listener.getsockname()[:2]
        self._selector = selectors.DefaultSelector()
        self._lock = threading.RLock()
        self._pairs: dict[socket.socket, socket.socket] = {}
        self._near: set[socket.socket] = set()
        self.is_corrupting = False
        self.carried = 0
        self.rate: float | None = None
        """Bytes per second, if that is bounded."""
        self.recording: bytearray | None = None
        """Where what the connecting side says is kept, if anywhere."""
        self.is_silent = self._is_closed = False
        self._wakeup, self._waker = socket.socketpair()
        self._selector.register(self._wakeup, selectors.EVENT_READ)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def is_connected(self) -> bool:
        """Whether any connection crosses the link."""
        return bool(self._pairs)

    def reset(self) -> None:
        """End all connections at once, as a router that forgot them does."""
        with self._lock:
            for end in self._pairs:
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            while self._pairs:
                self._drop(next(iter(self._pairs)))

    def vanish(self) -> None:
        """As when the process behind the port ends: its connections do, and new ones are refused until :meth:`come_back`."""
        with self._lock:
            listener, self._listener = self._listener, None
            assert listener is not None, "it has vanished already"
            self._selector.unregister(listener)
            listener.close()
        self.reset()

    def come_back(self) -> None:
        """Let connections in again, at the same endpoint."""
        with self._lock:
            self._listener = socket.create_server(self.endpoint)
            self._selector.register(self._listener, selectors.EVENT_READ)

    def corrupt(self) -> None:
        """Change one bit of the next large piece of data that passes."""
        self.is_corrupting = True

    def close(self) -> None:
        self._is_closed = True
        self._waker.send(b"x")
        self._thread.join(100)
        self.reset()
        for one in (self._listener, self._wakeup, self._waker, self._selector):
            if one is not None:
                one.close()

    def _drop(self, end: socket.socket) -> None:
        other = self._pairs.pop(end, None)
        if other is None:
            return
        for each in (end, other):
            self._pairs.pop(each, None)
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(each)
            each.close()

    def _run(self) -> None:
        while not self._is_closed:
            for key, _ in self._selector.select(0.02 if self.is_silent else None):
                with self._lock:
                    if self._listener is not None and key.fileobj is self._listener:
                        self._accept(self._listener)
                    elif isinstance(key.fileobj, socket.socket) and key.fileobj in self._pairs and not self.is_silent:
                        self._move(key.fileobj)
            if self.is_silent:
                time.sleep(0.005)

    def _accept(self, listener: socket.socket) -> None:
        near, _ = listener.accept()
        far = None
        with contextlib.suppress(OSError):
            far = socket.create_connection(self.target)
        if far is None:
            near.close()
            return
        self._near.add(near)
        for end, other in ((near, far), (far, near)):
            self._pairs[end] = other
            self._selector.register(end, selectors.EVENT_READ)

    def _move(self, end: socket.socket) -> None:
        try:
            data = bytearray(end.recv(1 << 18 if self.rate is None else 1 << 14))
            if not data:
                return self._drop(end)
            if self.is_corrupting and len(data) > 4096:
                self.is_corrupting = False
                data[len(data) // 2] ^= 1
            self.carried += len(data)
            if self.recording is not None and end in self._near:
                self.recording += data
            self._pairs[end].sendall(data)
            if self.rate is not None:
                time.sleep(len(data) / self.rate)
        except OSError:
            self._drop(end)


def behind_links(links: list[Link]) -> Listen:
    """How a rank's engine listens if others reach it only over links: one before each address, added to ``links``."""

    def listen_behind_a_link(engine: _C.Engine, address: str) -> Endpoint:
        endpoint = listen(engine, address)
        links.append(Link(address, (endpoint.host, endpoint.port)))
        return Endpoint(endpoint.wire, *links[-1].endpoint)

    return listen_behind_a_link


class Pair:
    """Rank 0 sends to rank 1 over several links; rank 1 answers nothing but acknowledgements."""

    def __init__(self, links: int = 2, timing: EngineTimes = QUICK, secret: bytes = SECRET) -> None:
        self.sender, self.receiver = _C.Engine(0, 2, SECRET, **timing), _C.Engine(1, 2, secret, **timing)
        hosts = [f"127.0.0.{2 + k}" for k in range(links)]
        targets = [(host, self.sender.add_tcp_path(host)) for host in hosts]
        self.links = [Link(*target) for target in zip(hosts, targets, strict=True)]
        self.doors = [Link(host, (host, self.receiver.add_tcp_path(host))) for host in hosts]
        """By which the sender asks whether the receiver is there; no message crosses them."""
        self.sender.set_peer(1, [door.endpoint for door in self.doors])
        self.receiver.set_peer(0, [link.endpoint for link in self.links])
        self.targets = targets
        self.sender.start()
        self.receiver.start()

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None:
        self.sender.close("the test is over", 0.5)
        self.receiver.close("the test is over", 0.5)
        for link in (*self.links, *self.doors):
            link.close()

    def message(self, number: int, size: int) -> _C.Memory:
        """Memory filled with what only message ``number`` holds."""
        memory = self.sender.allocate(size)
        ctypes.memmove(memory.address, pattern(number, size), size)
        return memory

    def send(self, number: int, size: int) -> _C.Request:
        return self.sender.send(1, ChannelClass.FORWARD, self.message(number, size), size, time.monotonic())

    def receive(self, size: int) -> _C.Request:
        return self.receiver.receive(0, ChannelClass.FORWARD, size)

    def take(self, request: _C.Request, timeout: float = 10.0) -> bytes:
        """The bytes of a received message, which is released."""
        assert request.wait(timeout), "nothing arrived"
        assert request.error is None and request.memory is not None, request.error
        got = ctypes.string_at(request.memory.address, len(request.memory))
        self.receiver.release(request)
        return got

    def counters(self) -> tuple[dict[str, int], dict[str, int]]:
        """Counters of the sender and of the receiver."""
        ((*_, sent),) = [found for found in self.sender.statistics() if not found[2]]
        ((*_, received),) = [found for found in self.receiver.statistics() if not found[2] and not found[3]]
        return sent, received


def pattern(number: int, size: int) -> bytes:
    return (struct.pack("<Q", number * 0x9E3779B97F4A7C15 & (1 << 64) - 1) * (-(-size // 8)))[:size]
