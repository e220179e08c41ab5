"""What the first rank of a site tells the site's others: one text after the other, the same on all of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from torch.distributed import Store

from adaptra.runtime.control_store.stores import Connection

_ASK_SECONDS: Final = 0.001
"""Between two looks at what the first rank tells."""


class Told:
    """One rank's end of it.

    Args:
        store: The keys of this site.
        kept: The most texts by which a rank of the site is behind another.
        check: Raises the error that has ended this rank's waits, if there is one.
        tells: Whether this is the site's first rank.
    """

    def __init__(self, store: Store, kept: int, check: Callable[[], None], *, tells: bool) -> None:
        self._store = Connection(store)
        self._kept = kept
        self._check = check
        self._tells = tells
        self._number = 0

    def next(self, text: Callable[[], str]) -> bytes:
        """Return the next text, which the first rank makes and tells."""
        self._number += 1
        key = f"told/{self._number}"
        if self._tells:
            told = text()
            self._store.set(key, told)
            if self._number > self._kept:
                self._store.delete_key(f"told/{self._number - self._kept}")
            return told.encode()
        while not self._store.check([key]):
            self._check()
            time.sleep(_ASK_SECONDS)
        return self._store.get(key)

    def close(self) -> None:
        """End the connection to the store."""
        self._store.close()
