"""The state that a run needs to continue another one, with the same or another number of stages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from adaptra.checks import is_whole
from adaptra.errors import StateError
from adaptra.frontend.api import Pipeline
from adaptra.frontend.attached_optimizer import refuse_foreign


class TrainingState:
    """A pipeline's state and its optimizer's, by the parameters' names in the user's model.

        state = {"training": adaptra.TrainingState(pipe, optimizer)}
        torch.distributed.checkpoint.save(state, checkpoint_id="checkpoint")  # every rank; load(...) likewise

    It is a stateful object of torch.distributed.checkpoint: each rank writes its stages, and reads those that it has after a
    restart. It includes the number of the step, on which random numbers depend. So a continued run is bitwise equal to one that
    never ended. Buffers that differ between replicas, such as BatchNorm's statistics, are the first replica's.

    Args:
        pipe: The pipeline. It must be compiled, so give ``example_inputs`` or run a step.
        optimizer: An optimizer of this pipeline's parameters.

    Raises:
        StateError: The optimizer has parameters that are not this pipeline's.
    """

    def __init__(self, pipe: Pipeline, optimizer: torch.optim.Optimizer) -> None:
        self._pipe = pipe
        self._optimizer = optimizer
        self._names = {parameter: name for name, parameter in pipe.named_parameters()}
        refuse_foreign(optimizer, self._names)

    def state_dict(self) -> dict[str, Any]:
        """Return the model's tensors, the optimizer's state by parameter, its groups' settings, and the number of steps.

        All ranks call this. A group's settings are, for example, its learning rate.
        """
        session = self._pipe.session
        groups = [{key: value for key, value in group.items() if key != "params"} for group in self._optimizer.param_groups]
        model = session.named(session.saved_state())
        return {"model": model, "optimizer": self._by_name(), "groups": groups, "step": session.training_step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of :meth:`state_dict`, also of a pipeline with other stages of the same model.

        Raises:
            StateError: The state is of another model, or has no step number. Nothing changes then.
        """
        step: Any = state.get("step")
        if not is_whole(step) or step < 0:
            raise StateError(
                f"training state: its step is {step!r}: expected the number of steps that TrainingState.state_dict() has "
                "saved, by which dropout goes on; add 'step' to what an older version saved"
            )
        self._pipe.load_state_dict(state["model"])
        for parameter, name in self._names.items():
            if name in state["optimizer"]:
                # Every stage that uses a shared parameter has a copy of it, and each copy its own optimizer state.
                copied = {key: one.clone() if isinstance(one, Tensor) else one for key, one in state["optimizer"][name].items()}
                self._optimizer.state[parameter] = copied
        for group, given in zip(self._optimizer.param_groups, state["groups"], strict=True):
            group.update(given)
        self._pipe.session.go_on_at(step)

    def _by_name(self) -> dict[str, dict[str, Any]]:
        if self._optimizer.state:
            return self._named_state()
        # Loading writes into tensors of the same shape, and an optimizer has no state before its first step. It never has any
        # of parameters that are not trained, such as those beside adapters.
        before = [group["lr"] for group in self._optimizer.param_groups]
        gradients = {parameter: parameter.grad for parameter in self._names if parameter.requires_grad}
        try:
            for group in self._optimizer.param_groups:
                group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
            for parameter in gradients:
                parameter.grad = torch.zeros_like(parameter)
            self._optimizer.step()
            return self._named_state()
        finally:
            self._optimizer.state.clear()
            for group, rate in zip(self._optimizer.param_groups, before, strict=True):
                group["lr"] = rate
            for parameter, gradient in gradients.items():
                parameter.grad = gradient

    def _named_state(self) -> dict[str, dict[str, Any]]:
        state = self._optimizer.state
        return {name: dict(state[parameter]) for parameter, name in self._names.items() if parameter in state}
