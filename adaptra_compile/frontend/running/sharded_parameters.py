"""The parameters of a sharded optimizer on one rank: those that it owns, which it steps, and those that others bring."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import torch

from adaptra.errors import StateError
from adaptra.frontend.running.local_workers import LocalWorkers


class ShardedParameters:
    """Brings the parameters of one sharded optimizer to all replicas after its step, and after all hooks of that.

    torch runs a step's hooks for each ``step`` of a class and of its base, and a user's behind those that exist. So this is no
    hook: it is around the ``step`` of this one optimizer.

    Args:
        local: The workers of this process.
        optimizer: The optimizer, of the parameters that this rank owns.
        names: The names of all that any replica owns.
    """

    def __init__(self, local: LocalWorkers, optimizer: torch.optim.Optimizer, names: Iterable[str]) -> None:
        self._local = local
        self.moved(optimizer, names)
        wrapped: Any = optimizer
        wrapped.step = _stepping(optimizer, self._check, self._bring)

    def moved(self, optimizer: torch.optim.Optimizer, names: Iterable[str]) -> None:
        """Go on with other parameters, after a change of roles or of a cut."""
        self._own = _parameters_of(optimizer)
        self._names = [*names]

    def _check(self, optimizer: torch.optim.Optimizer) -> None:
        if _parameters_of(optimizer) != self._own:
            raise StateError(
                "optimizer.step: this sharded optimizer has other parameters than pipe.shard gave it: expected the same; give "
                "pipe.shard all groups, and not add_param_group"
            )

    def _bring(self) -> None:
        self._local.on_every_rank(lambda worker: worker.bring_parameters(self._names), "optimizer.step")


def _stepping(
    optimizer: torch.optim.Optimizer, before: Callable[[torch.optim.Optimizer], None], after: Callable[[], None]
) -> Callable[..., Any]:
    """Return an optimizer's ``step`` between two calls, as schedulers and scalers take it: they look for its ``__func__``.

    It refers weakly to the optimizer, so that this ends with its last other reference.
    """
    step: Any = type(optimizer).step

    @wraps(step)
    def of(stepped: torch.optim.Optimizer, *arguments: Any, **named: Any) -> Any:
        before(stepped)
        result = step(stepped, *arguments, **named)
        after()
        return result

    own = weakref.ref(optimizer)

    @wraps(step)
    def bound(*arguments: Any, **named: Any) -> Any:
        return of(own(), *arguments, **named)  # type: ignore[arg-type]

    shown: Any = bound
    shown.__func__ = of
    return shown


def _parameters_of(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(one) for group in optimizer.param_groups for one in group["params"]}
