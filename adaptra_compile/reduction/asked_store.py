"""A store that is asked for a while only: it may be lost, or frozen with its host, while the members of a sum live."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Final, TypeVar

from torch.distributed import DistError, Store

from adaptra.runtime.control_store.spare_clients import give_back

T = TypeVar("T")

_STORE_SECONDS: Final = 0.5
"""The longest wait for an answer."""


class AskedStore:
    """A client of a store, of which one thread at a time asks something.

    Args:
        store: The client. Nobody else waits for answers on it.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._asking: threading.Thread | None = None

    def ask(self, request: Callable[[Store], T]) -> T | None:
        """Return what a request returns; None if the store is lost, or does not answer in half a second.

        While it has not answered the request before, nothing is asked.
        """
        said: list[T] = []

        def wait() -> None:
            with suppress(DistError):
                said.append(request(self._store))

        with self._lock:
            if self._is_free():
                self._asking = threading.Thread(target=wait, name="adaptra asks the store", daemon=True)
                self._asking.start()
                self._asking.join(_STORE_SECONDS)
        return next(iter(said), None)

    def give_back(self) -> None:
        """Give the client back, unless a thread still waits on it."""
        if self._is_free():
            give_back(self._store)

    def _is_free(self) -> bool:
        return self._asking is None or not self._asking.is_alive()
