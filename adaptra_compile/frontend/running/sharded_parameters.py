"""The parameters of a sharded optimizer on one rank: those that it owns, which it steps, and those that others bring."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from adaptra.errors import StateError
from adaptra.frontend.running.local_workers import LocalWorkers


class ShardedParameters:
    """Brings the parameters of one sharded optimizer to all replicas after its step.

    Args:
        local: The workers of this process.
        optimizer: The optimizer, of the parameters that this rank owns.
        names: The names of all that any replica owns.
    """

    def __init__(self, local: LocalWorkers, optimizer: torch.optim.Optimizer, names: Iterable[str]) -> None:
        self._local = local
        self.moved(optimizer, names)
        optimizer.register_step_pre_hook(self._check)
        optimizer.register_step_post_hook(self._bring)

    def moved(self, optimizer: torch.optim.Optimizer, names: Iterable[str]) -> None:
        """Go on with other parameters, after a change of roles or of a cut."""
        self._own = _parameters_of(optimizer)
        self._names = [*names]

    def _check(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if _parameters_of(optimizer) != self._own:
            raise StateError(
                "optimizer.step: this sharded optimizer has other parameters than pipe.shard gave it: expected the same; give "
                "pipe.shard all groups, and not add_param_group"
            )

    def _bring(self, *_: object) -> None:
        self._local.on_every_rank(lambda worker: worker.bring_parameters(self._names), "optimizer.step")


def _parameters_of(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(one) for group in optimizer.param_groups for one in group["params"]}
