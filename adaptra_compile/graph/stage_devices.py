"""The device of each stage of a list of modules: that of its own parameters and buffers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

import torch
from torch import Tensor, nn


def stage_devices(modules: Iterable[nn.Module], first: torch.device) -> tuple[torch.device, ...]:
    """Return each stage's device. One without tensors is on that of the stage before it, or on ``first``."""
    devices: list[torch.device] = []
    for module in modules:
        tensors = chain(module.parameters(), module.buffers())
        devices.append(next((tensor.device for tensor in tensors), devices[-1] if devices else first))
    return tuple(devices)


def moved(tensors: Sequence[Tensor], device: torch.device) -> tuple[Tensor, ...]:
    """Return what a stage on ``device`` receives of these tensors."""
    return tuple(tensor.to(device) for tensor in tensors)
