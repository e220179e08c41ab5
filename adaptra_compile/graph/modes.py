"""The modes of torch in which graphs are captured and differentiated, whatever the caller's are."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch


@contextmanager
def as_for_training() -> Generator[None]:
    """Within this context gradients are recorded, and neither inference mode nor anomaly mode is on.

    A loop may evaluate a new shape, or compile, under ``torch.no_grad()`` or ``torch.inference_mode()``.
    """
    with torch.inference_mode(False), torch.enable_grad(), torch.autograd.set_detect_anomaly(False):
        yield
