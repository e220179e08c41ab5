"""Gradient scaling for a pipeline, so that float16 gradients don't vanish. Steps with overflowed gradients are skipped.

It differs from torch's in two ways. One process scales the loss; a pipeline's last stage scales the gradient from which
backward passes start. And the ranks of all stages exchange whether a gradient is not finite, so that all skip the same steps
and their scales stay equal. Replicas of a stage have the same gradients, so they need no exchange.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from adaptra.errors import PipelineError
from adaptra.frontend.running.session import Session


class GradScaler(torch.amp.GradScaler):
    """A ``torch.amp.GradScaler`` for a pipeline, made by :meth:`adaptra.frontend.api.Pipeline.grad_scaler`.

    All ranks call its methods in the same order. ``state_dict()`` is the same on every rank and has torch's form.

    Args:
        session: The pipeline's session.
        settings: The arguments of torch's GradScaler.
    """

    def __init__(self, session: Session, **settings: Any) -> None:
        devices = [parameter.device for worker in session.workers for parameter in worker.trainable.values()]
        device = devices[0] if devices else torch.device("cpu")
        super().__init__(device.type, **settings)
        self._session = session
        if self.is_enabled():
            self._lazy_init_scale_growth_tracker(device)

    def scale(self, outputs: object) -> NoReturn:
        """Refuse this call, which a pipeline does not need.

        Raises:
            PipelineError: Always. The text says what to call instead.
        """
        raise PipelineError(
            "scaler.scale: the pipeline's step scales the loss and runs the backward passes itself: expected pipe.step, then "
            "scaler.step(optimizer) and scaler.update()"
        )

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        # Torch calls this once for each step of an optimizer, whether the optimizer unscales (fused) or not.
        with self._session.local.at_the_door():
            found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        here = any(bool(one) for one in found.values())
        anywhere = any(self._session.local.on_every_rank(lambda worker: worker.found_anywhere(here), "scaler.unscale_"))
        return {found_inf.device: torch.full_like(found_inf, float(anywhere))}
