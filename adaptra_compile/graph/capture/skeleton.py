"""Skeletons of models: the same modules with fake tensors instead of parameters and buffers, so with next to no memory.

A skeleton gives the same stages as its model. So a model is captured that no host could hold, and again for another shape after
its parameters have gone to the stages.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode


def skeleton(model: nn.Module, device: torch.device | None = None) -> nn.Module:
    """Return a copy of a model whose parameters and buffers are fake tensors.

    Tied tensors stay tied, and ``requires_grad``, dtypes, strides, modes and hooks stay as they are. Tensors that are neither
    parameters nor buffers stay real, since a capture takes them as constants. They share their memory with the model's, so
    that what changes them in place changes those of every stage.

    Args:
        model: The model. Nothing of it changes, and none of its state is copied.
        device: The device of the fakes of tensors on the meta device; without it they stay there.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        if id(tensor) not in memo:
            memo[id(tensor)] = _fake(tensor, mode, device)
    fake_model = copy.deepcopy(model, memo)
    for one in memo.get(id(memo), ()):  # where deepcopy keeps all that it has copied
        if isinstance(one, Tensor):
            memo[id(one)].data = one.detach()
    return fake_model


def _fake(tensor: Tensor, mode: FakeTensorMode, device: torch.device | None) -> Tensor:
    where = device if tensor.is_meta and device is not None else tensor.device
    with mode:
        fake = torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device=where)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(fake, tensor.requires_grad)
        return fake.requires_grad_(tensor.requires_grad)
