"""Some ranks of a group of gloo, as a group of their own: their messages go over the connections that there are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor


class SomeRanks:
    """What a sum needs of a group. Joining one for each set of ranks would take connections for each.

    Args:
        group: Of gloo.
        ranks: Those of its ranks that are meant, in the order of the sum, this one included.
    """

    def __init__(self, group: dist.ProcessGroup, ranks: Sequence[int]) -> None:
        self._group: Any = group  # torch's annotations lack some of its methods
        self._ranks = tuple(ranks)

    def size(self) -> int:
        """Return the number of these ranks."""
        return len(self._ranks)

    def rank(self) -> int:
        """Return this rank's number among them."""
        return self._ranks.index(self._group.rank())

    def send(self, tensors: list[Tensor], to: int, tag: int) -> dist.Work:
        """Send as the group does."""
        return self._group.send(tensors, self._ranks[to], tag)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> dist.Work:
        """Receive as the group does."""
        return self._group.recv(tensors, self._ranks[source], tag)
