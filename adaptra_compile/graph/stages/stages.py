"""Stages: the parts of a model that the runtime runs on its ranks.

To the runtime they are opaque: ``run_forward → run_input_grad → run_weight_grad``. Each passes its saved values to the next.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn

from adaptra.errors import BatchError
from adaptra.graph.ops.random_state import RandomKey
from adaptra.graph.ops.specs import MessageSpec

Take = Callable[[int, Tensor], None]
"""Takes the number of a result of W, and the result. It must not keep or change it: W may still read it."""

ForwardWithOutputs = Callable[
    [Mapping[str, Tensor], Sequence[Tensor], RandomKey, Sequence[Tensor]], tuple[tuple[Tensor, ...], Any, tuple[Tensor, ...]]
]
"""Runs F on one microbatch, as :meth:`TrainStage.run_forward`, and returns the flat outputs of the model as a third value."""


@dataclass(frozen=True, slots=True)
class Flops:
    """Floating-point operations of one microbatch on one stage; a multiply-add is two."""

    forward: int
    input_grad: int
    weight_grad: int


@dataclass(frozen=True, slots=True)
class Peaks:
    """Peak bytes of F, I and W of one microbatch while they run. Inputs are included, state is not."""

    forward: int
    input_grad: int
    weight_grad: int


@dataclass(frozen=True, slots=True)
class TrainStage(ABC):
    """One stage of a training pipeline.

    Attributes:
        index: The stage's index.
        parameters, buffers: The state of this stage, by the names in the user's model.
        trainable: The parameters of this stage that have a gradient, on this stage or, if shared, on another.
        contributions: The parameter of each of W's results. A parameter that no later stage uses occurs once, for the sum over
            its uses here. A parameter that a later stage uses too occurs once for each use here, the latest first.
        inputs, outputs: The tensors that F receives and returns. A tensor is sent contiguous, with its dimensions in the order
            of its strides.
        targets: The loss's targets, which F of the last stage takes.
        grad_inputs, grad_outputs: The tensors that I returns and receives: a gradient for each input or output that has one.
        flops: Floating-point operations of F, I and W.
        parameter_bytes: Bytes of the stage's parameters.
        kept_after_forward: Bytes that one microbatch keeps from F to I. Received messages are included, state is not.
        kept_after_input_grad: Bytes that one microbatch keeps from I to W. Received messages are included here too.
        peaks: Peak bytes while F, I and W run.
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
        """The graphs of F, I and W; none if the stage runs a module."""
        return ()

    @property
    def fresh_gradients(self) -> tuple[bool, ...]:
        """Whether W returns a tensor to which nothing else refers, for each of ``contributions``."""
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
        """Return this stage's parameters and buffers from the whole model: the model's tensors, not copies."""
        tensors: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
        tensors |= dict(model.named_buffers(remove_duplicate=False))
        return OrderedDict((name, tensors[name]) for name in self.state_names)

    @abstractmethod
    def run_forward(
        self, state: Mapping[str, Tensor], inputs: Sequence[Tensor], random: RandomKey, targets: Sequence[Tensor] = ()
    ) -> tuple[tuple[Tensor, ...], Any]:
        """Run F on one microbatch.

        Args:
            state: The stage's state by name. Buffers are changed in place where the model does so.
            inputs: Tensors with the specs of ``inputs``. Outputs and saved values may share their memory. So do not write to it
                before W has run and the outputs have been sent.
            random: The key of the random numbers.
            targets: On the last stage, the flat targets.

        Returns:
            The tensors for the next stage, or the loss on the last stage; and the saved values for I and W.

        Raises:
            BatchError: An input or target does not have the shape or dtype for which the stage was compiled.
        """

    def forward_with_outputs(self) -> ForwardWithOutputs:
        """Return F of the last stage that returns the model's outputs as well.

        Loss and saved values are computed by the same ops as in :meth:`run_forward`. An output may share the memory of the
        inputs, of the targets or of the state.

        Raises:
            OptionError: An output is not there on the last stage. The text names it.
        """
        raise NotImplementedError(f"stage {self.index}: only the last stage has the model's outputs")

    @abstractmethod
    def run_input_grad(self, saved: Any, grad_outputs: Sequence[Tensor | None]) -> tuple[tuple[Tensor, ...], Any]:
        """Run I on one microbatch.

        Args:
            saved: The values that F saved. It is empty afterwards.
            grad_outputs: Gradients with the specs of ``grad_outputs``; None means zeros. On the last stage, the gradient of the
                loss.

        Returns:
            The gradients for the stage before, and the saved values for W.
        """

    @abstractmethod
    def run_weight_grad(self, saved: Any) -> tuple[Tensor | None, ...]:
        """Run W on one microbatch.

        Args:
            saved: The values that I saved. It is empty afterwards.

        Returns:
            One tensor for each of ``contributions``, or None if this microbatch has no gradient for it.
        """

    def weight_grad_in_turn(self) -> Callable[[Any, Take], None]:
        """Return a function that runs W on saved values and hands each result over as soon as it is computed.

        Its ops are those of :meth:`run_weight_grad` in the same order, so the bits are the same. Where W can't be interrupted,
        all results are handed over at its end.
        """

        def run(saved: Any, take: Take) -> None:
            for number, result in enumerate(self.run_weight_grad(saved)):
                if result is not None:
                    take(number, result)

        return run


@dataclass(frozen=True, slots=True)
class EvalStage(ABC):
    """One stage of the model in evaluation mode, forward only.

    Attributes:
        index: The stage's index.
        inputs: The specs of the tensors that it receives.
        outputs: The specs of the tensors that it returns; on the last stage those of the model's outputs.
        loss: On the last stage, the spec of the loss.
        targets: On the last stage, the specs of the targets.
    """

    index: int
    inputs: MessageSpec
    outputs: MessageSpec
    loss: MessageSpec
    targets: MessageSpec

    @property
    def graphs(self) -> tuple[fx.GraphModule, ...]:
        """The graphs that it runs; none if the stage runs a module."""
        return ()

    @abstractmethod
    def run_forward(
        self,
        state: Mapping[str, Tensor],
        inputs: Sequence[Tensor],
        targets: Sequence[Tensor] = (),
        *,
        with_loss: bool = True,
        with_outputs: bool = False,
    ) -> tuple[Tensor, ...]:
        """Run one microbatch.

        Args:
            state: The stage's state by name.
            inputs: Tensors with the specs of ``inputs``.
            targets: The flat targets. Only the last stage uses them, and only with the loss.
            with_loss: Whether the last stage returns the loss, else the model's outputs.
            with_outputs: Whether the last stage returns the model's outputs behind the loss.

        Returns:
            The tensors for the next stage; on the last stage ``(loss,)``, the flat outputs, or the loss and the outputs.

        Raises:
            BatchError: An input or target does not have the shape or dtype for which the stage was compiled.
        """


def check(
    what: str, stage: int, tensors: Sequence[Tensor], specs: MessageSpec, positions: Sequence[Tensor | None] | None = None
) -> None:
    """Refuse tensors for which a stage was not compiled.

    Raises:
        BatchError: A tensor differs from its spec. The text names the stage, the tensor and the expected spec.
    """
    count = len(tensors if positions is None else positions)
    if count != len(specs):
        raise BatchError(f"stage {stage}: {count} {what}: expected {len(specs)}")
    chosen = specs if positions is None else [spec for spec, one in zip(specs, positions, strict=True) if one is not None]
    for index, (tensor, spec) in enumerate(zip(tensors, chosen, strict=True)):
        if tensor.shape != spec.shape or tensor.dtype != spec.dtype:
            raise BatchError(
                f"stage {stage}: {what}: tensor {index} is {tensor.dtype}{list(tensor.shape)}: expected {spec.dtype}"
                f"{list(spec.shape)}, as when the pipeline was compiled; a smaller last batch must be dropped or padded"
            )


def _bytes(message: MessageSpec) -> int:
    return sum(spec.travelling_bytes for spec in message)
