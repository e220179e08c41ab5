"""A TCP proxy whose connections a test can cut, refuse, stall or delay: a network between a rank and the control store.

It is a process of its own, as a network is: some of a store's calls keep Python's other threads from running meanwhile.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
import time


class Proxy:
    """Forwards connections to a port of this host until this object or its process ends. :attr:`port` is where it listens."""

    def __init__(self, target: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(target)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self.port = int(self._answer())

    def cut(self) -> None:
        """End all connections, as a switch that restarts does; new ones are welcome."""
        self._ask("cut")

    def refuse(self) -> None:
        """End all connections, and every new one at once."""
        self._ask("refuse")

    def stall(self) -> None:
        """Forward nothing any more, without a word, until :meth:`go_on`."""
        self._ask("stall")

    def go_on(self) -> None:
        """Forward again, what came meanwhile first."""
        self._ask("go_on")

    def delay(self, seconds: float) -> None:
        """Hold each answer up for some seconds from now on, one after the other."""
        self._ask(f"delay {seconds}")

    def _ask(self, what: str) -> None:
        assert self._process.stdin is not None
        print(what, file=self._process.stdin)
        self._answer()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()


class _Forwarding:
    """What the process does: two threads per connection, and the orders that come as lines."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._open: list[socket.socket] = []
        self._flows = threading.Event()
        self._flows.set()
        self._refuses = False
        self._delay = 0.0
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        ended, self._open = self._open, []
        for end in ended:
            with contextlib.suppress(OSError):  # the other end was first
                end.shutdown(socket.SHUT_RDWR)

    def refuse(self) -> None:
        self._refuses = True
        self.cut()

    def stall(self) -> None:
        self._flows.clear()

    def go_on(self) -> None:
        self._flows.set()

    def delay(self, seconds: str) -> None:
        self._delay = float(seconds)

    def _accept(self) -> None:
        while True:
            ours, _ = self._listener.accept()
            if self._refuses:
                ours.close()
                continue
            theirs = socket.create_connection(("127.0.0.1", self._target))
            self._open += [ours, theirs]
            for source, to in ((ours, theirs), (theirs, ours)):
                threading.Thread(target=self._forward, args=(source, to, to is ours), daemon=True).start()

    def _forward(self, source: socket.socket, to: socket.socket, are_answers: bool) -> None:
        with contextlib.suppress(OSError):  # cut
            while data := source.recv(65536):
                self._flows.wait()
                if are_answers and self._delay:
                    time.sleep(self._delay)
                to.sendall(data)
        for end in (source, to):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


if __name__ == "__main__":
    forwarding = _Forwarding(int(sys.argv[1]))
    print(forwarding.port, flush=True)
    for line in sys.stdin:
        what, *details = line.split()
        getattr(forwarding, what)(*details)
        print("done", flush=True)
