"""Data parallelism: the ranks that hold the same stage in other pipelines average their gradients after every step."""

from __future__ import annotations

from collections.abc import Iterable

import torch.distributed as dist
from torch import Tensor


class Replicas:
    """The ranks that hold copies of one stage.

    Args:
        group: Their process group.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._count = dist.get_world_size(group)

    def average(self, parameters: Iterable[Tensor], losses: Tensor) -> Tensor:
        """Replace every gradient by its mean over the replicas, and return the mean of the losses.

        Every replica adds in the same order, so the copies stay bitwise equal.
        """
        for parameter in parameters:
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad, group=self._group)
                parameter.grad /= self._count
        dist.all_reduce(losses, group=self._group)
        return losses / self._count
