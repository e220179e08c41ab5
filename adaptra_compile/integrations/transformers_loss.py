"""The loss of a transformers Trainer, computed inside the model's forward, where a pipeline captures it."""

# Outputs of transformers' models have many types.
# pyright: basic

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn


def with_trainer_loss(model: nn.Module, device_type: str, dtype: torch.dtype | None, smoother: Any) -> nn.Module:
    """Return a model of the same modules that computes what a Trainer computes around it.

    A Trainer runs the forward under autocast and gives its outputs in float32. It smooths labels by the logits.

    Args:
        model: A causal language model that returns its loss. It stays as it is.
        device_type: Where autocast applies.
        dtype: The dtype of autocast; None without it.
        smoother: The Trainer's label smoother; None without one.
    """
    if dtype is None and smoother is None:
        return model
    from accelerate.utils.operations import convert_to_fp32

    kind: Any = type(model)

    def forward(self: Any, **given: Any) -> Any:
        labels = None if smoother is None else given.pop("labels")
        with nullcontext() if dtype is None else torch.autocast(device_type, dtype=dtype):
            outputs = kind.forward(self, **given)
        if dtype is not None:
            outputs = convert_to_fp32(outputs)
        if smoother is None:
            return outputs
        loss = smoother(outputs, labels, shift_labels=True, num_items_in_batch=given["num_items_in_batch"])
        return type(outputs)(loss=loss, **outputs) if isinstance(outputs, dict) else (loss, *outputs)

    # A module around the model would rename its parameters.
    made = copy.copy(model)
    made.__class__ = type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})
    return made
