"""The state of a running pipeline's stages in this process: under the model's names, whole, loaded, and equal on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from adaptra.frontend.running.local_workers import LocalWorkers
from adaptra.frontend.saved.fitting_model import FittingModel, fitting_model
from adaptra.frontend.saved.model_names import ModelNames
from adaptra.runtime.reconfigure.consent import Consent

Result = TypeVar("Result")


class HeldState:
    """The parameters and buffers of this process's stages, and their names in the model.

    Args:
        local: The workers of this process.
        names: What the model's state_dict has beside its tensors.
        timeout: Seconds to wait for other ranks.
    """

    def __init__(self, local: LocalWorkers, names: ModelNames, timeout: float) -> None:
        self._local = local
        self._names = names
        self._timeout = timeout

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The state of this process's stages. For a parameter with several copies, the first stage's copy counts."""
        merged: dict[str, Tensor] = {}
        for worker in self._local.workers:
            merged = {**worker.state, **merged}
        return merged

    def align_copies(self) -> None:
        """Copy the first rank's values to the copies on other ranks. All ranks call it. One process has nothing to align."""
        if self._local.have_copies:
            self._local.on_every_rank(lambda worker: worker.align_copies(), "load_state_dict")

    def whole(self) -> dict[str, Tensor]:
        """Return the whole model's state on the job's first rank: see :meth:`adaptra.frontend.api.Pipeline.full_state_dict`."""
        if self._local.launched.in_threads:
            self._local.require_running()
            state = {name: tensor.detach().cpu().clone() for name, tensor in self.tensors.items()}
        else:
            world = self._local.launched.world
            replica, rank = world.seat(world.hosted(world.processes[0])[0])
            states = self._local.on_every_rank(
                lambda worker: worker.values.full_state(rank, worker.replica == replica, from_first=replica > 0),
                "full_state_dict",
            )
            state = next(filter(None, states), {})
        return self.named(state) if state else {}

    def saved(self) -> dict[str, Tensor]:
        """Return the state of this process's stages that a checkpoint saves, by the stages' own names.

        Buffers that differ between replicas are copies of the first replica's. All ranks call it.
        """
        if self._local.launched.world.replicas == 1:
            return self.tensors
        first, *_ = self._local.on_every_rank(
            lambda worker: worker.values.buffers_of_first_replica(), "TrainingState.state_dict"
        )
        return {**self.tensors, **first}

    def named(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the part of the stages' state that is in the model's state_dict, under all its names there."""
        self._names.require_plain()
        found: dict[str, Any] = {name: state[one].detach() for name, one in self._local.compiled.saved.items() if one in state}
        return found | self._names.extras()

    def fitting(self, state: Mapping[str, Any], *, strict: bool) -> FittingModel:
        """Return what this process loads of a state of the model. Nothing changes yet.

        Raises:
            StateError: It does not fit.
        """
        return fitting_model(self._names, self._local.compiled, self.tensors, state, strict=strict)

    @property
    def saved_as(self) -> dict[str, str]:
        """The first name in the model's state_dict of each tensor of the stages; its own if it has none there."""
        names = {canonical: canonical for canonical in self._local.compiled.aliases.values()}
        return names | {canonical: name for name, canonical in reversed(list(self._local.compiled.saved.items()))}

    def agreed_to_load(self, fitting: Callable[[], Result], call: str) -> Result:
        """Return the part of a state to load here. If ranks have copies, all of them load it or none does.

        Sites that may be steps apart exchange before what they have learnt. A whole training state is loaded by all ranks or by
        none in any case. ``call`` is the user's method.
        """
        local = self._local
        is_common = local.have_copies or (call != "load_state_dict" and local.go_on)
        if is_common:
            local.meet_sites(call)
        return local.agreed("state_dict", call, lambda: (fitting(), Consent()), self._timeout) if is_common else fitting()

    def take(self, fitting: FittingModel) -> None:
        """Load a state that fits. All ranks call it."""
        self._names.take(fitting.extras)
        with torch.no_grad():
            for worker in self._local.workers:
                worker.kept.kept.clear()  # all replicas have the same values now
                for canonical, value in fitting.values:
                    if canonical in worker.state:
                        worker.state[canonical].copy_(value)
        self.align_copies()
