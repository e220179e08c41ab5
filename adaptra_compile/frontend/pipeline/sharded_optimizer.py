"""An optimizer of which each replica's rank keeps a part: it steps the parameters that it owns, and gets the others' values.

It is an optimizer of the class that the user gave, whose groups have the rank's own parameters only. Its step brings their
values to the other replicas. So schedulers of its learning rate, and whatever else goes with that class, go with this one.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from adaptra.collectives.owners import balanced_owners
from adaptra.errors import OptionError
from adaptra.frontend.running.session import Session
from adaptra.frontend.running.sharded_parameters import ShardedParameters
from adaptra.runtime.exchange.optimizer_settings import text_of

Kind = TypeVar("Kind", bound=torch.optim.Optimizer)

Group = dict[str, Any]
"""Parameters, each alone or behind a name, and their settings."""


def check_kind(kind: object) -> None:
    """Refuse what can't step the parameters that a rank owns as it would among all.

    Raises:
        OptionError: It is no class of optimizers, or steps all parameters as one vector.
    """
    if not isinstance(kind, type) or not issubclass(kind, torch.optim.Optimizer):
        raise OptionError(f"shard: {kind!r:.80}: expected a class of optimizers, such as torch.optim.AdamW")
    if issubclass(kind, torch.optim.LBFGS):
        raise OptionError("shard: LBFGS steps all parameters as one vector: expected an optimizer that steps each by itself")


def groups_of(parameters: Iterable[Any]) -> list[Group]:
    """Return what an optimizer is given as groups."""
    entries = [*parameters]
    if entries and isinstance(entries[0], Mapping):
        return [
            {**one, "params": [one["params"]] if isinstance(one["params"], Tensor) else [*one["params"]]} for one in entries
        ]
    return [{"params": entries}]


def parameters_in(groups: Sequence[Group]) -> list[Tensor]:
    """Return the parameters of groups."""
    return [_tensor(one) for group in groups for one in group["params"]]


class Sharding:
    """Makes the sharded optimizers of one pipeline.

    Args:
        session: The pipeline's session.
        names: The names of this process's parameters.
    """

    def __init__(self, session: Session, names: Mapping[Tensor, str]) -> None:
        self._session = session
        self._names = names

    def optimizer(self, kind: Callable[..., Kind], groups: Sequence[Group], settings: Mapping[str, Any]) -> Kind:
        """Return an optimizer of the parameters in ``groups`` that this rank owns. All ranks call it.

        Raises:
            OptionError: The job survives losses, or has fewer ranks than workers. Or a parameter is in a sharded optimizer
                already, or replicas shard other parameters.
            PeerLostError: Another rank failed.
        """
        world = self._session.launched.world
        if world.replicas == 1:
            return kind(list(groups), **settings)
        if world.sites > 1:
            raise OptionError("shard: sites update by themselves under Options(synchrony=...): expected a job of one site")
        if self._session.launched.job.keeper is not None:
            raise OptionError(
                "shard: Options(survive=True): expected a job without it, as a lost rank takes its part of the optimizer's "
                "state with it"
            )
        if world.has_guests:
            raise OptionError(
                f"shard: {len(world.processes)} ranks host the {len(world.hosts)} workers of this job: expected a rank for "
                "each worker, as each owns a part of the optimizer's state"
            )
        (worker,) = self._session.workers
        own = [[self._names[one] for one in parameters_in([group]) if one in self._names] for group in groups]
        wanted = [name for names in own for name in names]
        for number, name in enumerate(wanted):
            if name in worker.owners or name in wanted[:number]:
                raise OptionError(
                    f"shard: {name} is in a sharded optimizer already: expected each parameter in one group of one"
                )
        sizes = {name: one.nbytes for name, one in worker.trainable.items()}
        owners = balanced_owners(sizes, world.replicas, worker.owners)
        trained = [name for name in wanted if name in sizes]
        digest = zlib.crc32(repr((f"{kind.__module__}.{kind.__qualname__}", own)).encode())
        # A parameter that an earlier optimizer has may be frozen by now: it keeps its owner.
        shared = {**worker.owners, **{name: owner for name, owner in owners.items() if name in trained}}
        told = [f"{name}={text_of(value)}" for name, value in sorted(settings.items())]
        for number, group in enumerate(groups):
            told += [f"{name}={text_of(value)} in group {number}" for name, value in sorted(group.items()) if name != "params"]
        self._session.local.on_every_rank(lambda one: one.shard(shared, digest, told), "shard")

        def is_here(parameter: Tensor) -> bool:
            """Others than trained ones have no gradients, so any replica may have them: all do, or the first."""
            return shared.get(self._names.get(parameter, ""), worker.replica) == worker.replica

        here = [{**group, "params": [one for one in group["params"] if is_here(_tensor(one))]} for group in groups]
        optimizer = kind(here, **settings)
        self._session.local.shards[optimizer] = ShardedParameters(self._session.local, optimizer, trained)
        return optimizer


def _tensor(one: Any) -> Tensor:
    return one[1] if isinstance(one, tuple) else one
