"""What a training is made of in this process, kept to go back to: as if nothing had happened meanwhile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from adaptra.frontend.running.local_workers import LocalWorkers
from adaptra.graph.effects.generators import global_generators, restore, state_of


class KeptState:
    """A copy of parameters, buffers, gradients, the optimizer's and the scaler's state, and the number of the next step.

    It also has the states of generators of random numbers. Copies of tensors are on their devices.

    Args:
        local: The workers of this process.
        optimizer: Steps their parameters.
        scaler: Scales their gradients; None if none does.
        others: Whatever else the training changes, each with ``state_dict()`` and ``load_state_dict()``.
    """

    def __init__(
        self,
        local: LocalWorkers,
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler | None,
        others: Sequence[Any] = (),
    ) -> None:
        self._local = local
        self._optimizer = optimizer
        self._scaler = scaler
        tensors = {id(one): one for worker in local.workers for one in worker.state.values()}
        self._values = [(one, one.detach().clone(), _copy_of(one.grad)) for one in tensors.values()]
        self._states: Mapping[Tensor, Any] = {one: deepcopy(state) for one, state in optimizer.state.items()}
        self._groups = [_settings(group) for group in optimizer.param_groups]
        self._scaler_state = None if scaler is None else deepcopy(scaler.state_dict())
        self._others = [(one, deepcopy(one.state_dict())) for one in others]
        self._step, self._updates = local.workers[0].numbers.training_step, local.workers[0].updates.count
        self._generators = [(one, state_of(one)) for one in global_generators().values()]
        self._on_device = torch.cuda.get_rng_state(local.launched.device) if local.launched.device.type == "cuda" else None

    def go_back(self) -> None:
        """Put all of it back, into the same tensors. It may be done again."""
        with torch.no_grad():
            for tensor, value, gradient in self._values:
                tensor.copy_(value)
                tensor.grad = _copy_of(gradient)
        self._optimizer.state.clear()
        self._optimizer.state.update({one: deepcopy(state) for one, state in self._states.items()})
        for group, kept in zip(self._optimizer.param_groups, self._groups, strict=True):
            for added in {*group}.difference(kept, ("params",)):
                del group[added]
            group.update(deepcopy(kept))
        if self._scaler is not None and self._scaler_state is not None:
            self._scaler.load_state_dict(deepcopy(self._scaler_state))
        for one, state in self._others:
            one.load_state_dict(deepcopy(state))
        for worker in self._local.workers:
            worker.go_on_at(self._step, self._updates)
        for generator, state in self._generators:
            restore(generator, state)
        if self._on_device is not None:
            torch.cuda.set_rng_state(self._on_device, self._local.launched.device)


def _copy_of(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else gradient.detach().clone()


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group's settings, which some optimizers change as they step."""
    return {key: deepcopy(one) for key, one in group.items() if key != "params"}
