"""Stages: what the runtime runs of a model on one rank, whatever they are made of.

To the runtime they are opaque: ``run_forward → run_input_grad → run_weight_grad``, each handing on what it saved.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn

from adaptra.errors import BatchError
from adaptra.graph.ops.random_state import RandomKey
from adaptra.graph.ops.specs import MessageSpec


@dataclass(frozen=True, slots=True)
class Flops:
    """Floating-point operations of one microbatch on one stage; a multiply-add is two."""

    forward: int
    input_grad: int
    weight_grad: int


@dataclass(frozen=True, slots=True)
class Peaks:
    """The most bytes that F, I and W of one microbatch hold while they run, what they are given included, state not."""

    forward: int
    input_grad: int
    weight_grad: int


@dataclass(frozen=True, slots=True)
class TrainStage(ABC):
    """One stage of a training pipeline.

    Attributes:
        index: Which stage.
        parameters, buffers: The state this stage holds, by the names in the user's model.
        trainable: The parameters of this stage that have a gradient, on this stage or, if shared, on another.
        contributions: The parameter that each of W's results belongs to. One that no later stage uses is here once, with the
            sum over its uses here. One that a later stage uses too is here once for each of its uses here, the latest first.
        inputs, outputs: What F receives and returns. A tensor travels contiguous, with its dimensions in the order of its
            strides.
        grad_inputs, grad_outputs: What I returns and receives: a gradient for each input, or output, that has one.
        flops: Of F, I and W.
        parameter_bytes: Of the stage's parameters.
        kept_after_forward: Bytes that one microbatch keeps from F to I, inputs included, state not.
        kept_after_input_grad: Bytes that one microbatch keeps from I to W.
        peaks: Bytes while F, I and W run.
    """

    index: int
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    trainable: tuple[str, ...]
    contributions: tuple[str, ...]
    inputs: MessageSpec
    outputs: MessageSpec
    targets: MessageSpec
    grad_inputs: MessageSpec
    grad_outputs: MessageSpec
    flops: Flops
    parameter_bytes: int
    kept_after_forward: int
    kept_after_input_grad: int
    peaks: Peaks

    @property
    def graphs(self) -> tuple[fx.GraphModule, ...]:
        """The graphs that it runs for F, I and W; none if it runs modules."""
        return ()

    @property
    def fresh_gradients(self) -> tuple[bool, ...]:
        """For each of ``contributions``, whether W returns a tensor that nothing else refers to."""
        return (False,) * len(self.contributions)

    @property
    def state_names(self) -> tuple[str, ...]:
        """The parameters, then the buffers."""
        return (*self.parameters, *self.buffers)

    @property
    def input_bytes(self) -> int:
        """Bytes of the message F receives."""
        return _bytes(self.inputs)

    @property
    def output_bytes(self) -> int:
        """Bytes of the message F returns."""
        return _bytes(self.outputs)

    @property
    def grad_input_bytes(self) -> int:
        """Bytes of the message I returns."""
        return _bytes(self.grad_inputs)

    def state(self, model: nn.Module) -> OrderedDict[str, Tensor]:
        """This stage's own parameters and buffers out of the whole model: the model's tensors, not copies."""
        tensors: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
        tensors |= dict(model.named_buffers(remove_duplicate=False))
        return OrderedDict((name, tensors[name]) for name in self.state_names)

    @abstractmethod
    def run_forward(
        self, state: Mapping[str, Tensor], inputs: Sequence[Tensor], random: RandomKey, targets: Sequence[Tensor] = ()
    ) -> tuple[tuple[Tensor, ...], Any]:
        """Run F on one microbatch.

        Args:
            state: The stage's state by name; buffers are changed in place where the model does so.
            inputs: As ``inputs`` says. Both the outputs and what is saved may refer to their memory: it must not be written to
                before W has run and the outputs have been sent.
            random: Which random numbers to draw.
            targets: On the last stage, the flat targets.

        Returns:
            The tensors for the next stage, on the last stage the loss; and what I and W need.

        Raises:
            BatchError: An input or target has not the shape or dtype the stage was compiled for.
        """

    @abstractmethod
    def run_input_grad(self, saved: Any, grad_outputs: Sequence[Tensor | None]) -> tuple[tuple[Tensor, ...], Any]:
        """Run I on one microbatch.

        Args:
            saved: What F left; it is empty afterwards.
            grad_outputs: As ``grad_outputs`` says; None stands for zeros. On the last stage the gradient of the loss.

        Returns:
            The gradients for the stage before, and what W needs.
        """

    @abstractmethod
    def run_weight_grad(self, saved: Any) -> tuple[Tensor | None, ...]:
        """Run W on one microbatch.

        Args:
            saved: What I left; it is empty afterwards.

        Returns:
            One tensor for each of ``contributions``, None where this microbatch has no gradient.
        """


@dataclass(frozen=True, slots=True)
class EvalStage(ABC):
    """One stage of the model in evaluation mode, forward only.

    Attributes:
        index: Which stage.
        inputs: What it receives.
        outputs: What it returns; on the last stage the model's outputs.
        loss: On the last stage, what the loss looks like.
        targets: On the last stage, what the targets look like.
    """

    index: int
    inputs: MessageSpec
    outputs: MessageSpec
    loss: MessageSpec
    targets: MessageSpec

    @property
    def graphs(self) -> tuple[fx.GraphModule, ...]:
        """The graphs that it runs; none if it runs modules."""
        return ()

    @abstractmethod
    def run_forward(
        self,
        state: Mapping[str, Tensor],
        inputs: Sequence[Tensor],
        targets: Sequence[Tensor] = (),
        *,
        with_loss: bool = True,
    ) -> tuple[Tensor, ...]:
        """Run one microbatch.

        Args:
            state: The stage's state by name.
            inputs: As ``inputs`` says.
            targets: The flat targets; only looked at on the last stage and with the loss.
            with_loss: On the last stage: return the loss, else the model's outputs.

        Returns:
            The tensors for the next stage; on the last stage ``(loss,)`` or the flat outputs.

        Raises:
            BatchError: An input or target has not the shape or dtype the stage was compiled for.
        """


def check(
    what: str, stage: int, given: Sequence[Tensor], specs: MessageSpec, positions: Sequence[Tensor | None] | None = None
) -> None:
    """Refuse tensors that a stage was not compiled for.

    Raises:
        BatchError: Says which stage, which tensor, what it is and what was expected.
    """
    count = len(given if positions is None else positions)
    if count != len(specs):
        raise BatchError(f"stage {stage}: {count} {what}: expected {len(specs)}")
    chosen = specs if positions is None else [spec for spec, one in zip(specs, positions, strict=True) if one is not None]
    for index, (tensor, spec) in enumerate(zip(given, chosen, strict=True)):
        if tensor.shape != spec.shape or tensor.dtype != spec.dtype:
            raise BatchError(
                f"stage {stage}: {what}: tensor {index} is {tensor.dtype}{list(tensor.shape)}: expected {spec.dtype}"
                f"{list(spec.shape)}, as when the pipeline was compiled; a smaller last batch must be dropped or padded"
            )


def _bytes(message: MessageSpec) -> int:
    return sum(spec.travelling_bytes for spec in message)
