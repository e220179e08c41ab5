"""One microbatch of a model, by which training and evaluation graphs are captured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from adaptra.graph.capture.batch import InputFormat, LossFunction, OutputFormat, TargetFormat
from adaptra.graph.capture.capture import FlatGraph, StateNames, capture, state_names
from adaptra.graph.ops.fake import fake_like, fake_mode
from adaptra.graph.partition.analyze import Analysis, analyze


@dataclass(frozen=True, slots=True)
class Microbatch:
    """A model, its loss, and one microbatch of its inputs and targets.

    Attributes:
        model: The model. It is only read.
        loss: Called as ``loss(outputs, targets)``, or None.
        with_loss: Whether there is a loss, be it the model's own.
        names: The names of the model's state.
        inputs, targets: The formats of inputs and targets.
        flat_inputs, flat_targets: The microbatch in flat order.
        mode: The fake mode of all analyses.
    """

    model: nn.Module
    loss: LossFunction | None
    with_loss: bool
    names: StateNames
    inputs: InputFormat
    targets: TargetFormat
    flat_inputs: tuple[Tensor, ...]
    flat_targets: tuple[Tensor, ...]
    mode: FakeTensorMode

    @staticmethod
    def of(
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        targets: Any,
        loss: LossFunction | None,
        *,
        with_loss: bool,
    ) -> Microbatch:
        """Return the microbatch of these arguments of the model and these targets.

        Raises:
            BatchError: The example is not a call that the model accepts.
        """
        names = state_names(model)
        inputs, wanted = InputFormat(model, args, kwargs), TargetFormat(targets)
        flat_inputs, flat_targets = (
            # A batch that was made for inference can't be captured with what is trained; its copy can.
            tuple(one.clone() if one.is_inference() else one for one in flat)
            for flat in (inputs.flatten(args, kwargs), wanted.flatten(targets))
        )
        return Microbatch(model, loss, with_loss, names, inputs, wanted, flat_inputs, flat_targets, fake_mode())

    def captured(self, *, evaluation: bool, changed: frozenset[str]) -> tuple[FlatGraph, Analysis, OutputFormat]:
        """Return the graph for training or for evaluation, its analysis, and the format of its outputs.

        Args:
            evaluation: Whether the modules are in evaluation mode.
            changed: The buffers that another graph changes.

        Raises:
            CaptureError: The model can't become one graph. The text names its module and line.
        """
        flat, outputs = capture(
            self.model,
            self.flat_inputs,
            self.inputs,
            self.flat_targets,
            self.targets,
            self.loss,
            names=self.names,
            evaluation=evaluation,
            with_loss=self.with_loss,
        )
        with self.mode:
            example = self._example(flat)
            if not self.with_loss:
                for node, tensor in zip(flat.inputs, self.flat_inputs, strict=True):
                    example[node].requires_grad_(tensor.requires_grad)
            return flat, analyze(flat, frozenset(self.names.buffers) - changed, example), outputs

    def _example(self, flat: FlatGraph) -> dict[fx.Node, Tensor]:
        tensors: dict[str, Tensor] = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
        example = {node: fake_like(tensors[name], name in self.names.trainable) for node, name in flat.state.items()}
        example |= {node: fake_like(tensor) for node, tensor in flat.constants.items()}
        example |= {node: fake_like(tensor) for node, tensor in zip(flat.inputs, self.flat_inputs, strict=True)}
        example |= {node: fake_like(tensor) for node, tensor in zip(flat.targets, self.flat_targets, strict=True)}
        return example
