"""Scaling the loss of a pipeline, so that the gradients of float16 don't vanish, and skipping steps whose gradients overflowed.

All is torch's own but two things: the pipeline's last stage scales the gradient that backward passes start from, where one
process scales the loss; and whether some gradient is not finite is asked of the ranks of all stages, so that all of them skip
the same steps and their scales stay equal. The replicas of a stage have the same gradients and need not be asked.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from adaptra.errors import PipelineError
from adaptra.frontend.session import Session


class GradScaler(torch.amp.GradScaler):
    """What ``torch.amp.GradScaler`` is in one process, for a pipeline; made by
    :meth:`adaptra.frontend.api.Pipeline.grad_scaler`.

    All ranks call its methods in the same order. ``state_dict()`` is the same on every rank, and that of torch's.

    Args:
        built: The pipeline.
        settings: As torch's take them.
    """

    def __init__(self, built: Session, **settings: Any) -> None:
        devices = [parameter.device for worker in built.workers for parameter in worker.trainable.values()]
        device = devices[0] if devices else torch.device("cpu")
        super().__init__(device.type, **settings)
        self._built = built
        if self.is_enabled():
            self._lazy_init_scale_growth_tracker(device)

    def scale(self, outputs: object) -> NoReturn:
        """Refuse a call that a pipeline has no use for.

        Raises:
            PipelineError: Says what to call instead.
        """
        raise PipelineError(
            "scaler.scale: the pipeline's step scales the loss and runs the backward passes itself: expected pipe.step, then "
            "scaler.step(optimizer) and scaler.update()"
        )

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        # Torch comes here once for each step of an optimizer, whether it unscales itself (fused) or not.
        with self._built.at_the_door():
            found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        here = any(bool(one) for one in found.values())
        anywhere = any(self._built.on_every_rank(lambda worker: worker.found_anywhere(here), "scaler.unscale_"))
        return {found_inf.device: torch.full_like(found_inf, float(anywhere))}
