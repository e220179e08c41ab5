"""Compilation of a pipeline's model for another shape of microbatch, after the pipeline was built."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from adaptra.graph import CompiledStages
from adaptra.graph.capture.skeleton import skeleton
from adaptra.graph.evaluation_only import compile_evaluation
from adaptra.graph.training_only import compile_training

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Recompile:
    """What is kept to compile the model again.

    Attributes:
        model: The model's modules. Nothing of the pipeline refers to its tensors.
        loss: The loss of one microbatch, or None if the model returns it.
    """

    model: nn.Module
    loss: Callable[..., Any] | None

    @staticmethod
    def of(model: nn.Module, loss: Callable[..., Any] | None, empty_on: torch.device | None) -> Recompile | None:
        """Keep a model for later compilations, without its parameters and buffers; None if its modules can't be copied.

        ``empty_on`` is the device of other ranks' tensors, which are on the meta device here; None if there are none.
        """
        try:
            return Recompile(skeleton(model, empty_on), loss)
        except Exception as error:  # copies run the user's code, and a pipeline of one shape needs none
            logger.info("batches of other sizes can't be compiled, as the model can't be copied: %s", error)
            return None

    def stages(
        self,
        like: CompiledStages,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        targets: Any,
        *,
        with_loss: bool,
        training: bool,
    ) -> CompiledStages:
        """Return stages for one microbatch like this one.

        Args:
            like: The stages for another shape, which have the same state.
            args, kwargs: The model's arguments, one microbatch.
            targets: The loss's targets, one microbatch.
            with_loss: Whether the loss is wanted. Stages that train always have it.
            training: Whether the stages train. They have graphs for training only, and others for evaluation only.

        Raises:
            CaptureError, PartitionError: The model can't be compiled for this shape, or its stages would have other state.
        """
        if training:
            return compile_training(self.model, args, kwargs, like=like, loss=self.loss, targets=targets)
        loss = self.loss if with_loss else None
        return compile_evaluation(self.model, args, kwargs, like=like, loss=loss, targets=targets, with_loss=with_loss)
