"""Stage graphs: what one stage executes for F, I and W, with their shapes, FLOPs and bytes.

To the runtime they are opaque: ``run_forward → run_input_grad → run_weight_grad``, each handing on what it saved.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, fx, nn

from adaptra.errors import BatchError
from adaptra.graph.random_state import RandomKey
from adaptra.graph.specs import MessageSpec

NOTHING_RANDOM: Final = RandomKey(0, 0, 0)
"""For models that draw no random numbers in evaluation mode: nearly all."""


@dataclass(frozen=True, slots=True)
class Flops:
    """Floating-point operations of one microbatch on one stage; a multiply-add is two."""

    forward: int
    input_grad: int
    weight_grad: int


@dataclass(slots=True)
class Saved:
    """What F leaves for I, or I for W. The run that uses it empties it, so that each tensor is freed after its last use."""

    values: list[Tensor]

    def take(self) -> list[Tensor]:
        """The values; they are then no longer here."""
        values, self.values = self.values, []
        return values


@dataclass(frozen=True, slots=True)
class ForwardGraph:
    """A forward graph and what it is called with: state and constants by name, then inputs, targets and a RandomKey."""

    module: fx.GraphModule
    state: tuple[str, ...]
    constants: tuple[Tensor, ...]

    def run(
        self, state: Mapping[str, Tensor], inputs: Sequence[Tensor], targets: Sequence[Tensor], random: RandomKey
    ) -> list[Tensor]:
        """Run it without autograd. Buffers in ``state`` are changed in place where the model does so."""
        values: list[Tensor | RandomKey] = [*(state[name] for name in self.state), *self.constants, *inputs, *targets, random]
        with torch.no_grad():
            # Not the module's call, which looks for hooks that a traced graph has none of.
            return self.module.forward(values)


@dataclass(frozen=True, slots=True)
class StageGraphs:
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
    _forward: ForwardGraph
    _input_grad: fx.GraphModule
    _input_grad_takes: tuple[int, ...]
    _weight_grad: fx.GraphModule
    _weight_grad_takes: tuple[int, ...]

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

    @property
    def grad_output_bytes(self) -> int:
        """Bytes of the message I receives."""
        return _bytes(self.grad_outputs)

    def state(self, model: nn.Module) -> OrderedDict[str, Tensor]:
        """This stage's own parameters and buffers out of the whole model: the model's tensors, not copies."""
        return state_of(model, (*self.parameters, *self.buffers))

    def run_forward(
        self, state: Mapping[str, Tensor], inputs: Sequence[Tensor], random: RandomKey, targets: Sequence[Tensor] = ()
    ) -> tuple[tuple[Tensor, ...], Saved]:
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
        check("inputs", self.index, inputs, self.inputs)
        check("targets", self.index, targets, self.targets)
        results = self._forward.run(state, inputs, targets, random)
        count = len(self.outputs)
        return tuple(results[:count]), Saved(results[count:])

    def run_input_grad(self, saved: Saved, grad_outputs: Sequence[Tensor | None]) -> tuple[tuple[Tensor, ...], Saved]:
        """Run I on one microbatch.

        Args:
            saved: What F left; it is empty afterwards.
            grad_outputs: As ``grad_outputs`` says; None stands for zeros. On the last stage the gradient of the loss.

        Returns:
            The gradients for the stage before, and what W needs.
        """
        check("output gradients", self.index, [one for one in grad_outputs if one is not None], self.grad_outputs, grad_outputs)
        values = saved.take()
        device = values[0].device if values else None
        for given, spec in zip(grad_outputs, self.grad_outputs, strict=True):
            values.append(torch.zeros(spec.shape, dtype=spec.dtype, device=device) if given is None else given)
        taken = [values[index] for index in self._input_grad_takes]
        passed = [values[index] for index in self._weight_grad_takes]
        values.clear()
        with torch.no_grad():
            results: list[Tensor] = self._input_grad.forward(taken)
        count = len(self.grad_inputs)
        return tuple(results[:count]), Saved(passed + results[count:])

    def run_weight_grad(self, saved: Saved) -> tuple[Tensor, ...]:
        """Run W on one microbatch.

        Args:
            saved: What I left; it is empty afterwards.

        Returns:
            One tensor for each of ``contributions``.
        """
        with torch.no_grad():
            results: list[Tensor] = self._weight_grad.forward(saved.take())
        return tuple(results)


@dataclass(frozen=True, slots=True)
class EvalStage:
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
    _forward: ForwardGraph
    _loss: ForwardGraph | None

    def run_forward(
        self,
        state: Mapping[str, Tensor],
        inputs: Sequence[Tensor],
        targets: Sequence[Tensor] = (),
        *,
        with_loss: bool = True,
        random: RandomKey = NOTHING_RANDOM,
    ) -> tuple[Tensor, ...]:
        """Run one microbatch.

        Args:
            state: The stage's state by name.
            inputs: As ``inputs`` says.
            targets: The flat targets; only looked at on the last stage and with the loss.
            with_loss: On the last stage: return the loss, else the model's outputs.
            random: Which random numbers to draw, should the model draw any in evaluation mode.

        Returns:
            The tensors for the next stage; on the last stage ``(loss,)`` or the flat outputs.

        Raises:
            BatchError: An input or target has not the shape or dtype the stage was compiled for.
        """
        check("inputs", self.index, inputs, self.inputs)
        if self._loss is None or not with_loss:
            return tuple(self._forward.run(state, inputs, (), random))
        check("targets", self.index, targets, self.targets)
        return tuple(self._loss.run(state, inputs, targets, random))


def state_of(model: nn.Module, names: Iterable[str]) -> OrderedDict[str, Tensor]:
    """Parameters and buffers of a model by name: the model's tensors, not copies."""
    tensors: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    tensors |= dict(model.named_buffers(remove_duplicate=False))
    return OrderedDict((name, tensors[name]) for name in names)


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
