"""The control thread of a rank: it takes the rank's mail, one after the other, to the handler of each kind."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Final, get_args

from torch.distributed import DistError, DistNetworkError, Store

from adaptra.runtime.control.mail.mail import Mail, Ran, Reports, Wake
from adaptra.runtime.control.mail.mailbox import Mailbox

KINDS: Final[frozenset[type]] = frozenset({*get_args(Mail), Wake, Ran, Reports})
"""All kinds of mail, each of which has a handler."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Handlers:
    """What the control thread calls.

    Attributes:
        begin: Called once before all others.
        before: Called before each wait for mail.
        of: By the kind of mail, called with each of that kind.
        after: Called after each piece of mail.
        rejoin: Called when the connection to the store has been made anew, since mail may be lost.
        fail: Called with the error that ends the thread.
    """

    begin: Callable[[], None]
    before: Callable[[], None]
    of: Mapping[type, Callable[[Any], None]]
    after: Callable[[], None]
    rejoin: Callable[[], None]
    fail: Callable[[Exception], None]

    def __post_init__(self) -> None:
        assert self.of.keys() == KINDS, f"no kind of mail is without a handler: {KINDS.symmetric_difference(self.of)}"

    def handle(self, mail: Mail | Wake | Ran | Reports) -> None:
        """Handle one piece of mail."""
        self.of[type(mail)](mail)
        self.after()


class MailHub:
    """A rank's mailbox and the thread that empties it.

    Args:
        store: The store of all ranks; it is cloned.
        rank: This rank.

    Attributes:
        mailbox: The mailbox.
    """

    def __init__(self, store: Store, rank: int) -> None:
        self._rank = rank
        self.mailbox: Final = Mailbox(store, rank)
        self._requests: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, handlers: Handlers) -> None:
        """Start the thread."""
        name = f"adaptra-controller-{self._rank}"
        self._thread = threading.Thread(target=self._run, args=(handlers,), name=name, daemon=True)
        self._thread.start()

    def request(self, act: Callable[[], None]) -> None:
        """Have ``act`` called on the thread, before the handler of :class:`Wake`. Any thread may call this."""
        self._requests.put(act)
        self.mailbox.wake()

    def run_requests(self) -> None:
        """Call what was requested. Only the handler of :class:`Wake` may call it."""
        while not self._requests.empty():
            self._requests.get()()

    @property
    def is_closing(self) -> bool:
        """True once :meth:`stop` was called."""
        return self._closing.is_set()

    def stop(self) -> bool:
        """Have the thread end with the next mail. Returns False if it was called before."""
        if self._closing.is_set():
            return False
        self._closing.set()
        return True

    def close(self, patience: float) -> None:
        """Wait for the thread to end, after :meth:`stop`.

        Args:
            patience: The longest time to wait for each request to the store that is under way, seconds.
        """
        self.mailbox.wake()
        try:
            self.mailbox.close(patience)
        except DistError as error:
            log.warning("rank %d: the store was lost before the controller was closed: %s", self._rank, error)
        if self._thread is not None and threading.current_thread() is not self._thread:
            self._thread.join(patience)

    def give_back(self) -> None:
        """Give the mailbox's clients of the store back, once nobody sends any more. A thread that still runs keeps them."""
        if self._thread is None or not self._thread.is_alive():
            self.mailbox.give_back()

    def _run(self, handlers: Handlers) -> None:
        try:
            handlers.begin()
            while not self._closing.is_set():
                handlers.before()
                self._receive(handlers)
        except Exception as error:
            if not self._closing.is_set():
                handlers.fail(error)

    def _receive(self, handlers: Handlers) -> None:
        try:
            mail = self.mailbox.receive()
        except DistNetworkError as error:
            log.warning("rank %d: the connection to the store broke, making another: %s", self._rank, error)
            self.mailbox.reconnect()
            handlers.rejoin()
        else:
            handlers.handle(mail)
