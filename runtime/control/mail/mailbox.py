"""Mail between the control threads of a pipeline's ranks: one queue per rank in the common store.

A separate thread fetches a rank's mail, because each fetch takes a round trip to the store. The control thread takes the mail
that has arrived. Sending is one request without an answer, so it never waits for another rank.

A waiting TCPStore client blocks all other users of the same client, so waiting has a client of its own.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from queue import SimpleQueue
from typing import Final

from torch.distributed import HashStore, Store

from adaptra.runtime.control.mail.mail import Mail, Ran, Wake, from_json, to_json
from adaptra.runtime.control_store.schema import encode
from adaptra.runtime.control_store.spare_clients import give_back
from adaptra.runtime.control_store.stores import Connection, clone, innermost, renewed

RECEIVE_TIMEOUT: Final = timedelta(days=30)
"""The timeout of a wait for mail, in effect none: a wait ends with mail, never by this timeout."""


class Mailbox:
    """One rank's mail.

    Args:
        store: The pipeline's store. It is cloned, so that waiting here blocks no other user.
        rank: This rank.
    """

    def __init__(self, store: Store, rank: int) -> None:
        self._rank = rank
        # HashStore's queue_push wakes one waiting thread, whatever its queue; set wakes all threads.
        self._needs_bell = isinstance(innermost(store), HashStore)
        self._sending = Connection(store)
        self._posting = Connection(store)
        self._waiting = clone(store)
        self._waiting.set_timeout(RECEIVE_TIMEOUT)
        self._arrived: SimpleQueue[bytes | Wake | Ran | Exception] = SimpleQueue()
        self._is_closed = threading.Event()
        self._fetching = self._fetch()

    @property
    def store(self) -> Connection:
        """The client that sends. Values written through it are in the store before mail that the same thread sends later."""
        return self._sending

    def send(self, rank: int, mail: Mail) -> None:
        """Send mail to a rank, in order. Only the control thread may call it, and the mail follows its other requests to the
        store.

        If the connection breaks, mail sent before may be lost, and this mail may arrive twice.

        Raises:
            torch.distributed.DistError: The store is lost.
        """
        self._push(self._sending, rank, encode(to_json(mail)))

    def post(self, rank: int, mail: Mail) -> None:
        """Send mail to a rank like :meth:`send`, from any thread, without waiting.

        It has a client of its own, because requests of another client wait for answers, for ever if the store can't be reached.
        """
        self._push(self._posting, rank, encode(to_json(mail)))

    def hand(self, mail: Wake | Ran) -> None:
        """Have :meth:`receive` return this, without using the store. Any thread may call it."""
        self._arrived.put(mail)

    def wake(self) -> None:
        """Have :meth:`receive` return :class:`Wake`, without using the store. Any thread may call it."""
        self.hand(Wake())

    def receive(self) -> Mail | Wake | Ran:
        """Wait for the next mail. Only one thread may call it.

        Raises:
            ControlError: The payload is not mail.
            torch.distributed.DistNetworkError: The connection broke; mail may be lost. See :meth:`reconnect`.
            torch.distributed.DistError: The store is lost.
        """
        match self._arrived.get():
            case Wake() | Ran() as handed:
                return handed
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
        """Stop fetching mail. Mail that has arrived can still be received.

        Waits at most ``timeout`` seconds for the fetch that is under way.

        Raises:
            torch.distributed.DistError: The store is lost.
        """
        self._is_closed.set()
        if self._fetching.is_alive():
            self._push(self._posting, self._rank, "")
            self._fetching.join(timeout)

    def give_back(self) -> None:
        """Give the clients of the store back, once it is closed and nobody sends any more."""
        if not self._fetching.is_alive():
            self._sending.close()
            self._posting.close()
            give_back(self._waiting)

    def _fetch(self) -> threading.Thread:
        """Start to fetch mail until the connection breaks, and return the thread."""
        thread = threading.Thread(target=self._run, args=(self._waiting,), name=f"adaptra-mail-{self._rank}", daemon=True)
        thread.start()
        return thread

    def _run(self, store: Store) -> None:
        try:
            while True:
                payload = store.queue_pop(queue_of(self._rank))
                if self._is_closed.is_set():
                    return
                self._arrived.put(payload)
        except Exception as error:
            self._arrived.put(error)

    def _push(self, connection: Connection, rank: int, text: str) -> None:
        connection.push(queue_of(rank), text)
        if self._needs_bell:
            connection.set("mail/bell", "")


def queue_of(rank: int) -> str:
    """Return the name of the queue in the store that holds a rank's mail."""
    return f"mail/{rank}"
