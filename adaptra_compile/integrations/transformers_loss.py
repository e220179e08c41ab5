"""The loss of a transformers Trainer, computed inside the model's forward, where a pipeline captures it."""

# Outputs of transformers' models have many types.
# pyright: basic

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from adaptra.errors import OptionError
from adaptra.runtime.worker.stages.loss_reduction import NO_LABEL, NUMBER_OF_ITEMS

SCALE = "adaptra_loss_scale"
"""The name of the factor of a loss that is a mean over labels."""

ROUTERS = "router_aux_loss_coef"
"""The name of the factor of the routers' loss in models of mixed experts."""


def divides_by_items(model: nn.Module, batch: dict[str, Any]) -> bool | None:
    """Return whether a model's loss is a sum that it divides by the number of items, or else a mean of its own.

    The first row is tried with two numbers. None if it is neither.

    Raises:
        OptionError: The model can't run the row.
    """
    row = {name: one[:1] if isinstance(one, Tensor) and one.dim() else one for name, one in batch.items()}
    labels = row["labels"]
    if not labels.is_floating_point():
        row["labels"] = labels.where(labels != NO_LABEL, 0)
    row.pop(NUMBER_OF_ITEMS, None)
    tried = copy.copy(model)
    if hasattr(model, ROUTERS):
        setattr(tried, ROUTERS, 0.0)
    before = model.training
    model.eval()
    try:
        with torch.no_grad():
            by_one, by_two = (_loss(tried(**row, **{NUMBER_OF_ITEMS: torch.tensor(count)})).item() for count in (1.0, 2.0))
    except TypeError:
        return False  # its forward takes no such number
    except Exception as error:  # the model's own complaint of its rows
        raise OptionError(
            f"model: a {type(model).__name__}: its forward fails on the first row of train_dataset: {type(error).__name__}: "
            f"{error}: expected inputs and labels of this model"
        ) from error
    finally:
        model.train(before)
    if by_one == by_two:
        return False
    return True if abs(by_one - 2 * by_two) <= 1e-3 * abs(by_one) else None


def checkpoint_activations(model: Any, args: Any) -> None:
    """Checkpoint a model's activations as a Trainer does when training begins, so that the capture has it.

    Raises:
        OptionError: The arguments ask for a kind that can't be captured.
    """
    if not args.activation_checkpointing:
        return
    options: dict[str, Any] = dict(args.activation_checkpointing_kwargs or {})
    every, offload = options.pop("every_n_layers", 1), options.pop("offload", False)
    if offload or options.pop("use_reentrant", False):
        raise OptionError(
            "TrainingArguments: activation_checkpointing_kwargs: expected no offload=True and no use_reentrant=True, which "
            "can't be captured"
        )
    named: Any = {"activation_checkpointing_kwargs": options | {"use_reentrant": False}, "every_n_layers": every}
    model.activation_checkpointing_enable(**named)


def with_trainer_loss(
    model: nn.Module, device_type: str, dtype: torch.dtype | None, smoother: Any, *, of_labels: bool = False, parts: int = 1
) -> nn.Module:
    """Return a model of the same modules that computes what a Trainer computes around it.

    A Trainer runs the forward under autocast and gives its outputs in float32. It smooths labels by the logits.

    Args:
        model: A model that returns its loss. It stays as it is.
        device_type: Where autocast applies.
        dtype: The dtype of autocast; None without it.
        smoother: The Trainer's label smoother; None without one.
        of_labels: Whether the loss is a mean over labels. It then returns a sum, the number of labels, and the other outputs.
        parts: The number of parts of a batch, whose losses of routers are averaged.
    """
    routes = hasattr(model, ROUTERS) and getattr(model.config, "output_router_logits", False)
    if dtype is None and smoother is None and not of_labels and not routes:
        return model
    from accelerate.utils.operations import convert_to_fp32

    kind: Any = type(model)

    def outputs_of(self: Any, kwargs: dict[str, Any]) -> Any:
        with nullcontext() if dtype is None else torch.autocast(device_type, dtype=dtype):
            outputs = kind.forward(self, **kwargs)
        return outputs if dtype is None else convert_to_fp32(outputs)

    def forward(self: Any, **kwargs: Any) -> Any:
        labels = None if smoother is None else kwargs.pop("labels")
        outputs = outputs_of(self, kwargs)
        if smoother is None:
            return outputs
        loss = smoother(outputs, labels, shift_labels=True, num_items_in_batch=kwargs["num_items_in_batch"])
        return type(outputs)(loss=loss, **outputs) if isinstance(outputs, dict) else (loss, *outputs)

    def forward_of_labels(self: Any, **kwargs: Any) -> Any:
        scale, labels = kwargs.pop(SCALE), kwargs["labels"]
        count = torch.full((), float(labels.shape[0]), device=labels.device)
        if not labels.is_floating_point():
            count = (labels != NO_LABEL).sum()
            kwargs["labels"] = labels.where(count > 0, 0)  # the mean of no label is nan, and so are its gradients
        outputs = outputs_of(self, kwargs)
        named = dict(outputs) if isinstance(outputs, dict) else {str(index): one for index, one in enumerate(outputs[1:])}
        left_out = {"loss", "past_key_values"}
        return _loss(outputs) * count * scale, count, {name: one for name, one in named.items() if name not in left_out}

    # A module around the model would rename its parameters.
    new_model = copy.copy(model)
    new: Any = {"forward": forward_of_labels if of_labels else forward, "__module__": kind.__module__}
    new_model.__class__ = type(kind.__name__, (kind,), new)
    if routes:
        setattr(new_model, ROUTERS, getattr(model, ROUTERS) / parts)
    return new_model


def _loss(outputs: Any) -> Tensor:
    return outputs["loss"] if isinstance(outputs, dict) else outputs[0]
