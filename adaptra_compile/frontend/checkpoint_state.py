"""The state that a run needs to continue another one, with the same or another number of stages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from adaptra.errors import StateError
from adaptra.frontend.api import Pipeline
from adaptra.frontend.saved.fitting_model import FittingModel
from adaptra.frontend.saved.optimizer_state import FittingState, NamedState, check_step

_KEYS: Final = ("model", "optimizer", "groups", "optimized")


class TrainingState:
    """A pipeline's state and its optimizer's, by the parameters' names in the user's model.

        state = {"training": adaptra.TrainingState(pipe, optimizer)}
        torch.distributed.checkpoint.save(state, checkpoint_id="checkpoint")  # every rank; load(...) likewise

    It is a stateful object of torch.distributed.checkpoint: each rank writes its stages, and reads those that it has after a
    restart. It includes the number of the step, on which random numbers depend, and that of updates, where some were in
    x-order. So a continued run is bitwise equal to one that never ended. Buffers that differ between replicas, such as
    BatchNorm's statistics, are the first replica's. A parameter of which the optimizer has no state, since it has not stepped
    it yet, has none after loading either.

    Args:
        pipe: The pipeline. It must be compiled, so give ``example_inputs`` or run a step.
        optimizer: An optimizer of this pipeline's parameters.

    Raises:
        StateError: The optimizer has parameters that are not this pipeline's.
    """

    def __init__(self, pipe: Pipeline, optimizer: torch.optim.Optimizer) -> None:
        self._pipe = pipe
        self._optimizer = optimizer
        self._names()

    def _names(self) -> dict[Tensor, str]:
        # Anew each time: changes of roles and cuts bring other tensors.
        self._pipe.require_own(self._optimizer)
        saved_as = self._pipe.session.held.saved_as
        return {parameter: saved_as[name] for name, parameter in self._pipe.named_parameters()}

    def state_dict(self) -> dict[str, Any]:
        """Return the model's tensors, the optimizer's state by parameter, its groups' settings, and the number of steps.

        All ranks call this. A group's settings are, for example, its learning rate. ``optimized`` has each parameter's group,
        and whether the optimizer has state of it. Where it has none, ``optimizer`` has zeros, or nothing if it is not trained.

        Raises:
            StateError: Sites update by themselves, so there is no one state. Or microbatches are deferred to the next step,
                see :meth:`adaptra.Pipeline.defer_nothing`. Or a parameter's state has no known form, as of LBFGS, whose step
                takes a closure.
        """
        session = self._pipe.session
        if session.launched.world.sites > 1:
            raise StateError(
                "training state: sites differ under Options(synchrony=...): expected that each rank saves "
                "pipe.state_dict(), optimizer.state_dict() and pipe.outer_state_dict() in a file of its own"
            )
        session.local.require_nothing_deferred("TrainingState.state_dict")
        named = NamedState.of(self._optimizer, self._names())
        model = session.held.named(session.held.saved())
        parts = {"optimizer": named.entries, "groups": named.groups, "optimized": named.optimized}
        step, updates = session.training_step, self._pipe.updates
        return {"model": model, **parts, "step": step if step == updates else (step, updates)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of :meth:`state_dict`, also of a pipeline with other stages of the same model. All ranks call this.

        Everything is checked first. If any rank refuses its state, no rank has changed.

        Raises:
            StateError: The state is of another model or optimizer, or a part of it is missing. The text names it.
        """
        session = self._pipe.session
        model, optimizer, numbers = session.held.agreed_to_load(lambda: self._fitting(state), "TrainingState.load_state_dict")
        self._pipe.take(model)
        optimizer.load_into(self._optimizer)
        session.go_on_at(*numbers)

    def _fitting(self, state: Mapping[str, Any]) -> tuple[FittingModel, FittingState, tuple[int, int]]:
        saved: Any = state
        if not isinstance(saved, Mapping):
            raise StateError(
                f"training state: a {type(saved).__name__}: expected a dict, as TrainingState.state_dict() returns"
            )
        numbers = check_step(state.get("step"))
        absent = [key for key in _KEYS if key not in state]
        if absent:
            raise StateError(f"training state: it lacks {', '.join(absent)}: expected all of TrainingState.state_dict()")
        model = self._pipe.session.held.fitting(state["model"], strict=True)
        return model, FittingState.of(self._optimizer, self._names(), state), numbers
