"""A TCP proxy whose connections a test can cut, refuse or stall: a network between a rank and the control store."""

from __future__ import annotations

import contextlib
import socket
import threading


class Proxy:
    """Forwards connections to a port of this host, on threads of its own. :attr:`port` is where it listens."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._open: list[socket.socket] = []
        self._flows = threading.Event()
        self._flows.set()
        self._refuses = False
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """End all connections, as a switch that restarts does; new ones are welcome."""
        ended, self._open = self._open, []
        for end in ended:
            with contextlib.suppress(OSError):  # the other end was first
                end.shutdown(socket.SHUT_RDWR)

    def refuse(self) -> None:
        """End all connections, and every new one at once."""
        self._refuses = True
        self.cut()

    def stall(self) -> None:
        """Forward nothing any more, without a word, until :meth:`go_on`."""
        self._flows.clear()

    def go_on(self) -> None:
        """Forward again, what came meanwhile first."""
        self._flows.set()

    def _accept(self) -> None:
        while True:
            ours, _ = self._listener.accept()
            if self._refuses:
                ours.close()
                continue
            theirs = socket.create_connection(("127.0.0.1", self._target))
            self._open += [ours, theirs]
            for pair in ((ours, theirs), (theirs, ours)):
                threading.Thread(target=self._forward, args=pair, daemon=True).start()

    def _forward(self, source: socket.socket, to: socket.socket) -> None:
        with contextlib.suppress(OSError):  # cut
            while data := source.recv(65536):
                self._flows.wait()
                to.sendall(data)
        for end in (source, to):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
