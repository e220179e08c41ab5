"""Several pipelines of one model in a process: they share their tensors, or the second pipeline is refused.

A pipeline trains the model's own tensors, so pipelines of one model in one process see each other's steps. Two kinds of tensor
would silently become stale. One is the copies of a tied parameter, if each pipeline had its own. The other, under a launcher,
is tensors that two pipelines train on different ranks. So a new pipeline takes over the copies of an open one. Pipelines that
are open at the same time have each tensor on the same ranks.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from adaptra.errors import OptionError
from adaptra.frontend.arguments.shared_memory import refuse_to_part
from adaptra.graph import CompiledStages
from adaptra.program.placement import stages_of
from adaptra.runtime.launch.job import Launch
from adaptra.runtime.world.world import Place

_HELD: Final[Any] = WeakTensorKeyDictionary()
"""The pipelines that use each tensor of a model.

Pipelines find each other by these tensors alone, so the dictionary is shared by the whole process. Tensors that no model has
any more drop out of it.
"""


@dataclass(slots=True)
class _Hold:
    """One pipeline's use of a tensor.

    Attributes:
        sharing: The pipeline's :class:`Sharing`.
        name: The tensor's name in its model.
        ranks: The job's ranks that have the tensor. If all are in this process, one per copy.
        version: The tensor's version, if the pipeline trains it only on ranks of other processes.
    """

    sharing: Sharing
    name: str
    ranks: frozenset[int]
    version: int | None


class Sharing:
    """One pipeline's use of a model's tensors, checked against other pipelines of the model.

    Args:
        model: The model, or None if the caller keeps every rank's model complete and up to date.
        compiled: The stages of the model.
        placement: ``placement[stage]`` is the stage's rank.
        launched: The ranks of this process.

    Raises:
        OptionError: Another open pipeline has a tensor of the model on other ranks. Or this rank's value of a tensor is older
            than the one that a pipeline has trained on another rank.
    """

    def __init__(self, model: nn.Module | None, compiled: CompiledStages, placement: Sequence[int], launched: Launch) -> None:
        self.has_trained = False
        self._workers: weakref.ref[Any] | None = None
        self._own: Any = WeakTensorKeyDictionary()
        here = set(launched.ranks)
        is_alone = launched.in_threads
        tied = {one.name: len({placement[stage] for stage in one.stages}) for one in compiled.tied}
        for name, tensor in () if model is None else _tensors(model, compiled):
            holders = {placement[stage] for stage in compiled.names[name]}
            ranks = frozenset(range(tied.get(name, 1)) if is_alone else _in_job(holders, launched))
            is_here = bool(here & holders)
            for hold in _HELD.get(tensor, ()):
                _check(hold, name, tensor, ranks, is_here)
            self._own[tensor] = _Hold(self, name, ranks, None if is_here else tensor._version)

    def states(
        self, model: nn.Module, compiled: CompiledStages, placement: Sequence[int], ranks: Iterable[int]
    ) -> list[dict[str, Tensor]]:
        """Return the state of each rank of this process: the model's own tensors.

        If several ranks of this process use a tied parameter, all but the owner get copies. An open pipeline of the same model
        shares its copies.
        """
        states = [
            {
                name: tensor
                for stage in stages_of(rank, placement)
                for name, tensor in compiled.train[stage].state(model).items()
            }
            for rank in ranks
        ]
        for tied in compiled.tied:
            users = [(rank, state) for rank, state in zip(ranks, states, strict=True) if tied.name in state]
            if len(users) < 2:
                continue
            copies = self._copies(users[0][1][tied.name])
            for rank, state in users:
                if tied.owner not in stages_of(rank, placement):
                    copy = next(copies, None)
                    state[tied.name] = nn.Parameter(state[tied.name].detach().clone()) if copy is None else copy
        return states

    def begin(self, workers: Any) -> None:
        """Record that the pipeline runs, by :class:`adaptra.frontend.running.local_workers.LocalWorkers`, from now on."""
        self._workers = weakref.ref(workers)
        for tensor, hold in self._own.items():
            others = [one for one in _HELD.get(tensor, ()) if one.sharing.is_open or one.version is not None]
            _HELD[tensor] = [*others, hold]

    @property
    def is_open(self) -> bool:
        """Return whether the pipeline may still train."""
        workers = self._workers and self._workers()
        return workers is not None and workers.is_open

    def require_alone(self, what: str) -> None:
        """Refuse to move tensors that another open pipeline uses, or that share memory.

        Args:
            what: The change that would move them.

        Raises:
            OptionError: Another open pipeline uses a tensor, or two share memory. The text names the tensor.
        """
        for tensor, own in self._own.items():
            if any(hold.sharing is not self and _is_in_the_way(hold) for hold in _HELD.get(tensor, ())):
                raise OptionError(
                    f"{what}: another open pipeline holds {own.name!r} too: expected one pipeline of a model where tensors "
                    "move between ranks; close() the other first"
                )
        refuse_to_part(what, {hold.name: tensor for tensor, hold in self._own.items()})

    def moved(self, states: Iterable[Mapping[str, Tensor]]) -> None:
        """Record that this pipeline's ranks use other tensors from now on."""
        now = {id(tensor) for state in states for tensor in state.values()}
        for tensor, hold in self._own.items():
            hold.ranks = frozenset()
            if hold.version is None and id(tensor) not in now:
                hold.version = tensor._version

    def _copies(self, tensor: Tensor) -> Iterator[nn.Parameter]:
        for hold in _HELD.get(tensor, ()):
            workers: Any = hold.sharing._workers and hold.sharing._workers()
            if hold.sharing.is_open:
                held = (worker.state.get(hold.name) for worker in workers.workers)
                yield from (one for one in held if one is not None and one is not tensor)
                return


def _is_in_the_way(hold: _Hold) -> bool:
    """Return whether a pipeline may still train. What nobody has any more may wait for the collector, so that runs first."""
    if hold.sharing.is_open:
        gc.collect()
    return hold.sharing.is_open


def _check(hold: _Hold, name: str, tensor: Tensor, ranks: frozenset[int], is_here: bool) -> None:
    if hold.ranks != ranks and _is_in_the_way(hold):
        raise OptionError(
            f"model: another open pipeline holds {name!r} on {_counted(hold.ranks)}, this one would on {_counted(ranks)}: "
            "expected the same, as each would train what the other does not see; close() the other first, or cut both alike by "
            "split="
        )
    if is_here and hold.version is not None and hold.sharing.has_trained and tensor._version == hold.version:
        raise OptionError(
            f"model: another rank has {name!r} as an earlier pipeline trained it, this one as it was before: expected the "
            "trained model on every rank; load that pipeline's full_state_dict() into it"
        )


def _tensors(model: nn.Module, compiled: CompiledStages) -> Iterator[tuple[str, Tensor]]:
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    for name in dict.fromkeys(compiled.aliases.values()):
        if compiled.names[name]:
            yield name, tensors[name]


def _in_job(holders: Iterable[int], launched: Launch) -> Iterator[int]:
    """Yield the job's ranks that correspond to these ranks of each of its pipelines."""
    world = launched.world
    for holder in holders:
        yield from world.hosts_of(world.column(Place(holder)))


def _counted(ranks: frozenset[int]) -> str:
    return f"{len(ranks)} of its ranks ({', '.join(map(str, sorted(ranks)))})" if ranks else "ranks where it has moved"
