"""The sites of a job: a worker's counterparts in the others, and those of them that take part in an exchange."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Final

import torch

from adaptra.errors import PeerLostError
from adaptra.runtime.data_parallel.gradient_averaging import Replicas
from adaptra.runtime.world.world import WorkerId, World


class Sites:
    """A worker's counterparts in all sites, joined from the begin of a world to its end. They exchange from memory of the host.

    Args:
        world: The workers of the job and their processes.
        worker: This one.
        name: No other world's of this job.
        connect: Calls what joins workers, and ends with the loss of one, as :func:`adaptra.runtime.launch.connecting.connect`.

    Attributes:
        index: The site of this worker.
        everyone: Those of all sites.
    """

    def __init__(
        self, world: World, worker: WorkerId, name: str, connect: Callable[[Callable[[], Replicas]], Replicas]
    ) -> None:
        self._world = world
        self._worker = worker
        self._connect = connect
        self._counterparts = world.counterparts(worker)
        self._name = f"{name}/sites {world.peers(worker).index(worker)}"
        self.index: Final = self._counterparts.index(worker)
        self.everyone: Final = self._joined(range(world.sites))
        self._joined_before: dict[tuple[int, ...], Replicas] = {tuple(range(world.sites)): self.everyone}
        self._lock = threading.Lock()
        self._is_aborted = False

    @property
    def count(self) -> int:
        """The number of sites."""
        return len(self._counterparts)

    def among(self, sites: Sequence[int]) -> Replicas:
        """Return the counterparts in some sites, this one included. All of them call it, the first time to be joined.

        Raises:
            PeerLostError: One is lost.
        """
        key = tuple(sites)
        if key not in self._joined_before:
            joined = self._connect(lambda: self._joined(key))
            with self._lock:
                self._joined_before[key] = joined
                if self._is_aborted:
                    joined.abort()
                    raise PeerLostError("an exchange between sites has ended, as a rank is lost")
        return self._joined_before[key]

    def abort(self) -> None:
        """End the waits for other sites, and theirs for this one."""
        for one in self._all(is_aborted=True):
            one.abort()

    def end(self) -> None:
        """Release what joins them, once nothing is under way and nothing has failed. May be called again."""
        for one in self._all():
            one.end()

    def _all(self, *, is_aborted: bool = False) -> list[Replicas]:
        with self._lock:
            self._is_aborted |= is_aborted
            return [*self._joined_before.values()]

    def _joined(self, sites: Sequence[int]) -> Replicas:
        name = f"{self._name}/{','.join(map(str, sites))}"
        among = [self._counterparts[site] for site in sites]
        return Replicas(self._world, self._worker, name, torch.device("cpu"), "gloo", among)
