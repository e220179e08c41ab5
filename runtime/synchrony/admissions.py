"""Which microbatches of a step may still begin, where it has a deadline: all replicas draw tickets from one counter."""

from __future__ import annotations

from torch.distributed import Store

from adaptra.runtime.control_store.stores import Connection
from adaptra.runtime.synchrony.deferral import Deferral


class Admissions:
    """One replica's. Used by one thread at a time.

    Args:
        store: The counters, shared by all replicas.
        deferral: What is deferred to the step, and so how many tickets there are.
    """

    def __init__(self, store: Store, deferral: Deferral) -> None:
        self._store = Connection(store)
        self._deferral = deferral
        self._key = ""
        self._are_left = True

    def begin_step(self, step: int) -> None:
        """Begin a step, with a counter of its own. Nobody reads that of the last step but one any more."""
        self._key = f"begun/{step}"
        self._are_left = True
        if self._deferral.replica == 0:
            self._store.delete_key(f"begun/{step - 2}")

    def ask(self, own: int) -> bool:
        """Return whether another of this replica's microbatches may begin, where it has begun this many of the step's own."""
        replayed = self._deferral.replayed
        if replayed is not None:
            return own < replayed
        self._are_left = self._are_left and self._store.add(self._key, 1) <= self._deferral.free
        return self._are_left

    def close(self) -> None:
        """End the connection to the store."""
        self._store.close()
