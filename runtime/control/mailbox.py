"""Mail between the control threads of a pipeline's ranks: one queue per rank in the common store.

A thread of its own fetches a rank's mail, since each takes the way to the store and back, and the control thread takes what has
arrived. Sending is one request without an answer, so it never waits for another rank. A client of a TCPStore that waits holds
up all other users of the same client, so waiting has a client of its own.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from queue import SimpleQueue
from typing import Final

from torch.distributed import Store

from adaptra.runtime.control.mail import Mail, Wake, from_json, to_json
from adaptra.runtime.control_store.schema import encode
from adaptra.runtime.control_store.stores import Connection, clone, renewed

PATIENCE: Final = timedelta(days=30)
"""A rank without mail waits for so long; the end of a wait is mail, never a timeout."""


class Mailbox:
    """One rank's mail.

    Args:
        store: The pipeline's store. It is cloned, so that waiting here holds up nobody.
        rank: This rank.
    """

    def __init__(self, store: Store, rank: int) -> None:
        self._rank = rank
        self._sending = Connection(store)
        self._posting = Connection(store)
        self._waiting = clone(store)
        self._waiting.set_timeout(PATIENCE)
        self._arrived: SimpleQueue[bytes | Wake | Exception] = SimpleQueue()
        self._is_closed = threading.Event()
        self._fetching = self._fetch()

    @property
    def store(self) -> Connection:
        """The client that sends: what is written through it is there before mail sent after it by the same thread."""
        return self._sending

    def send(self, rank: int, mail: Mail) -> None:
        """Send mail to a rank, in order. Only the control thread may, whose other requests to the store this mail follows.

        If the connection breaks, mail sent before may be lost, and this mail may arrive twice.

        Raises:
            torch.distributed.DistError: The store is lost.
        """
        _push(self._sending, rank, encode(to_json(mail)))

    def post(self, rank: int, mail: Mail) -> None:
        """Send mail to a rank as :meth:`send` does, from any thread, without waiting for anything.

        It has a client of its own: another's requests wait for answers, and with a store that is out of reach for ever.
        """
        _push(self._posting, rank, encode(to_json(mail)))

    def wake(self) -> None:
        """Have :meth:`receive` return :class:`Wake`, without the store. Any thread may."""
        self._arrived.put(Wake())

    def receive(self) -> Mail | Wake:
        """Wait for the next mail. Only one thread may.

        Raises:
            ControlError: What arrived is not mail.
            torch.distributed.DistNetworkError: The connection broke; mail may be lost. See :meth:`reconnect`.
            torch.distributed.DistError: The store is lost.
        """
        match self._arrived.get():
            case Wake() as wake:
                return wake
            case bytes() as payload:
                return from_json(payload)
            case error:
                raise error

    def reconnect(self) -> None:
        """Receive through a new connection, once :meth:`receive` has raised.

        Raises:
            torch.distributed.DistError: The store can't be reached.
        """
        self._waiting = renewed(self._waiting)
        self._fetching = self._fetch()

    def close(self, timeout: float) -> None:
        """Fetch no more mail; what has arrived can still be received. Waits at most ``timeout`` seconds for what is under way.

        Raises:
            torch.distributed.DistError: The store is lost.
        """
        self._is_closed.set()
        if self._fetching.is_alive():
            _push(self._posting, self._rank, "")
            self._fetching.join(timeout)

    def _fetch(self) -> threading.Thread:
        """Begin to fetch mail, until the connection breaks."""
        thread = threading.Thread(target=self._run, args=(self._waiting,), name=f"adaptra-mail-{self._rank}", daemon=True)
        thread.start()
        return thread

    def _run(self, store: Store) -> None:
        try:
            while True:
                payload = store.queue_pop(f"mail/{self._rank}")
                if self._is_closed.is_set():
                    return
                self._arrived.put(payload)
        except Exception as error:
            self._arrived.put(error)


def _push(connection: Connection, rank: int, text: str) -> None:
    connection.push(f"mail/{rank}", text)
    # HashStore's queue_push wakes one waiting thread, whichever queue that waits for; its set wakes all.
    connection.set("mail/bell", "")
