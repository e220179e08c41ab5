"""News: texts that concern all processes of a job, in one order, which each hears as soon as they are told.

The store keeps them under numbers from 1. Telling takes the first number that is free, by one request. So a process that dies
meanwhile leaves no gap. Each listener waits at a queue of its own, where it is woken. If the teller dies before it has woken
all, the next news wakes them. A listener then reads whatever it has not read.

Both clients of the store are opened at the start, see :mod:`adaptra.runtime.control_store.spare_clients`.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from datetime import timedelta
from itertools import count
from typing import Final

from torch.distributed import DistError, DistNetworkError, Store

from adaptra.errors import ControlError
from adaptra.runtime.control_store.spare_clients import give_back, hang_up
from adaptra.runtime.control_store.stores import Connection, clone, renewed

logger = logging.getLogger(__name__)

_LISTENERS: Final = "listeners"
_WAIT: Final = timedelta(days=30)
"""The timeout of a wait for news, in effect none: a wait ends with news, or by :meth:`News.close`."""
_PATIENCE: Final = 2.0
"""Seconds for which the end of the thread is awaited."""


class News:
    """One process's part in a job's news. Starts its thread at once, which ends quietly if the store is lost.

    Args:
        store: Its keys are used for nothing else. A :class:`.signed_store.SignedStore` refuses news of strangers.
        on_news: Called from the thread with the number and the text of each news, in order, from the first one on.
    """

    def __init__(self, store: Store, on_news: Callable[[int, str], object]) -> None:
        self._on_news = on_news
        self._client = Connection(store)
        self._waiting = clone(store)
        self._waiting.set_timeout(_WAIT)
        self._telling = threading.Lock()
        self._told = self._heard = 0
        self._is_closed = False
        # Before anything is read: what is told later wakes this listener.
        self._queue = _queue_of(self._client.add(_LISTENERS, 1))
        self._thread = threading.Thread(target=self._listen, name="adaptra news", daemon=True)
        self._thread.start()

    def tell(self, text: str) -> int:
        """Tell a text to all, also to this process, and return its number. Any thread may call it.

        If another process tells the same text at the same time, both may get one number.

        Raises:
            ControlError: A stranger has written news.
            torch.distributed.DistError: The store is lost.
        """
        with self._telling:
            number = max(self._told, self._heard) + 1
            while self._client.compare_set(_key_of(number), "", text) != text.encode():
                number += 1
            self._told = number
        for listener in range(1, self._client.add(_LISTENERS, 0) + 1):
            self._client.push(_queue_of(listener), "")
        return number

    def interrupt(self) -> None:
        """Go on over other connections, as these may be stuck."""
        self._client.interrupt()
        hang_up(self._waiting)

    def close(self) -> None:
        """Hear what has been told so far, and no more. May be called again."""
        self._is_closed = True
        if self._thread is threading.current_thread():
            return
        if self._thread.is_alive():
            with contextlib.suppress(DistError):
                self._client.push(self._queue, "")
            self._thread.join(_PATIENCE)
        if not self._thread.is_alive():
            self._client.close()
            give_back(self._waiting)

    def _listen(self) -> None:
        try:
            self._listen_until_closed()
        except ControlError as error:
            logger.error("no more news are heard: %s", error)
        except DistError:
            pass  # the membership reports a lost store

    def _listen_until_closed(self) -> None:
        while True:
            is_last = self._is_closed
            self._hear_all()
            if is_last:
                return
            try:
                self._waiting.queue_pop(self._queue)
            except DistNetworkError:
                self._waiting = renewed(self._waiting)

    def _hear_all(self) -> None:
        for number in count(self._heard + 1):
            if not self._client.check([_key_of(number)]):
                return
            text = self._client.get(_key_of(number)).decode(errors="replace")
            self._heard = number
            try:
                self._on_news(number, text)
            except Exception:
                logger.exception("news %d: the callback failed", number)


def _key_of(number: int) -> str:
    return f"news/{number}"


def _queue_of(listener: int) -> str:
    return f"bell/{listener}"
