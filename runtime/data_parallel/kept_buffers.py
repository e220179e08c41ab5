"""Copies of other replicas' buffers, from which their workers go on where these are lost.

Training changes buffers such as BatchNorm's in each replica's own way, so one that is lost has values that no other has. They
travel at the end of a step, before any rank returns from it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import Tensor

from adaptra.runtime.data_parallel.gradient_averaging import Replicas

Kept = dict[int, dict[str, Tensor]]
"""Values of buffers by replica and name."""


class KeptBuffers:
    """The buffers of the stages of one rank, as other replicas have them.

    Args:
        replicas: The ranks that have copies of these stages.
        buffers: Those that training changes, by name; the same names on each of these ranks.
        of: The replicas whose values are kept. The first one's suffice where all replicas begin each step with them.

    Attributes:
        kept: The values after the last call that is certain.
    """

    def __init__(self, replicas: Replicas, buffers: Mapping[str, Tensor], of: Collection[int]) -> None:
        self._replicas = replicas
        self._buffers = buffers
        self._of = of if buffers else ()
        self._arrived: Kept | None = None
        self.kept: Kept = {}

    def gather(self) -> None:
        """Gather the values after a call. All ranks with these stages do; raises as :meth:`.Replicas.values_of`."""
        self._arrived = {
            replica: dict(zip(self._buffers, self._replicas.values_of(replica, list(self._buffers.values())), strict=True))
            for replica in self._of
        }

    def commit(self) -> None:
        """Keep what was gathered, since the call is certain."""
        if self._arrived is not None:
            self.kept, self._arrived = self._arrived, None

    def values_of(self, replica: int) -> Mapping[str, Tensor]:
        """Return copies of the values with which a replica's worker goes on; nothing if none were ever gathered."""
        return {name: value.clone() for name, value in self.kept.get(replica, self.kept.get(0, {})).items()}
