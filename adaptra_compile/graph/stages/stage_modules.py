"""Stages of a model given as a list of modules, which run unchanged, by eager autograd.

They serve models that can't be captured. Autograd computes the gradients of a stage's inputs and parameters in one pass, so I
computes both. W only returns those of the parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils import _pytree as pytree

from adaptra.errors import BatchError, CaptureError
from adaptra.graph.capture.batch import InputFormat, LossFunction, OutputFormat, TargetFormat, loss_of
from adaptra.graph.effects.plain_tensors import copy_of
from adaptra.graph.ops.layout import Layout
from adaptra.graph.ops.random_state import RandomKey, default_generator_seeded
from adaptra.graph.ops.specs import MessageSpec
from adaptra.graph.stages.stage_graphs import NOTHING_RANDOM
from adaptra.graph.stages.stages import EvalStage, ForwardWithOutputs, TrainStage, check


@dataclass(frozen=True, slots=True)
class Boundary:
    """The message from one module to the next: its structure, the positions of tensors in it, and their layouts."""

    structure: pytree.TreeSpec
    is_tensor: tuple[bool, ...]
    layouts: tuple[Layout, ...]

    @staticmethod
    def of(returned: Any) -> Boundary:
        """Return the boundary after a module that has returned this.

        Raises:
            CaptureError: A part of it can't be sent.
        """
        leaves, structure = pytree.tree_flatten(returned)
        for leaf in leaves:
            if leaf is not None and not isinstance(leaf, Tensor):
                raise CaptureError(
                    f"returns a {type(leaf).__name__}: expected tensors, or tuples, lists or dicts of tensors and None, which "
                    "can travel to the next stage"
                )
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        return Boundary(structure, tuple(isinstance(leaf, Tensor) for leaf in leaves), tuple(map(Layout.of, tensors)))

    def tensors(self, returned: Any) -> tuple[Tensor, ...]:
        """Return the tensors in the module's result.

        Raises:
            BatchError: The result has another structure.
        """
        leaves, structure = pytree.tree_flatten(returned)
        if structure != self.structure or tuple(isinstance(leaf, Tensor) for leaf in leaves) != self.is_tensor:
            raise BatchError(
                f"a stage returned {structure} with this batch and {self.structure} with the example: expected one structure "
                "for all batches, with tensors in the same places"
            )
        return tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))

    def pack(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return these tensors as they are sent."""
        return tuple(layout.pack(tensor) for layout, tensor in zip(self.layouts, tensors, strict=True))

    def unpack(self, arrived: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the tensors as the module returned them."""
        return tuple(layout.unpack(tensor) for layout, tensor in zip(self.layouts, arrived, strict=True))

    def call(self, module: nn.Module, tensors: Sequence[Tensor]) -> Any:
        """Call the next module with these tensors: a tuple is its arguments, anything else its one argument."""
        remaining = iter(tensors)
        given = pytree.tree_unflatten([next(remaining) if here else None for here in self.is_tensor], self.structure)
        return module(*given) if isinstance(given, tuple) else module(given)


@dataclass(slots=True)
class Differentiable:
    """Values that F saves for I: the outputs that get gradients, and the leaves whose gradients I computes.

    ``run`` runs the module's code; in the backward pass a checkpoint computes again what it did not keep.
    """

    outputs: tuple[Tensor, ...]
    inputs: tuple[Tensor, ...]
    parameters: dict[str, Tensor]
    run: Callable[[Callable[[], None]], None]

    def backward(self, grad_outputs: Sequence[Tensor | None]) -> tuple[list[Tensor | None], dict[str, Tensor]]:
        """Compute the gradients of the inputs and of the parameters. The saved values are released.

        Returns:
            The gradient of each input or None, and the gradients of the parameters that have one.
        """
        outputs, inputs, parameters = self.outputs, self.inputs, self.parameters
        self.outputs, self.inputs, self.parameters = (), (), {}
        reached = [
            (output, given)
            for output, given in zip(outputs, grad_outputs, strict=True)
            if output.requires_grad and given is not None
        ]
        # A leaf stores its gradient with the leaf's strides, but the next stage must see those that one process would see.
        arrived: list[Tensor | None] = [None] * len(inputs)
        for index, one in enumerate(inputs):
            one.register_hook(partial(arrived.__setitem__, index))
        if reached:
            self.run(lambda: torch.autograd.backward([output for output, _ in reached], [given for _, given in reached]))
        return arrived, {name: one.grad for name, one in parameters.items() if one.grad is not None}


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """The call of a stage's module.

    Attributes:
        index: The stage's index.
        module: The module, with tensors of the meta device instead of its state, so that it keeps no memory alive.
        state: The module's own names of its parameters and buffers, each once, to their names in the user's model.
        takes: The form of its arguments: the user's call on the first stage.
        loss, targets: The loss function of the last stage's module and its targets, or None.
    """

    index: int
    module: nn.Module
    state: Mapping[str, str]
    takes: InputFormat | Boundary
    loss: LossFunction | None
    targets: TargetFormat

    def run(self, state: Mapping[str, Tensor], inputs: Sequence[Tensor], random: RandomKey) -> Any:
        """Run the module. Its buffers change in place, even those that it replaces. Its inputs do not change."""
        # Copies with the same strides: a module may change its inputs in place, and autograd allows no such change of leaves.
        return self.run_with(state, random, lambda: self.takes.call(self.module, [one.clone() for one in inputs]))

    def run_with(self, state: Mapping[str, Tensor], random: RandomKey, code: Callable[[], Any]) -> Any:
        """Run code that calls the module, with this state and with the random numbers of this key."""
        tensors = {f"module.{name}": state[canonical] for name, canonical in self.state.items()}
        before = dict(tensors)
        device = next(iter(tensors.values()), torch.empty(0)).device
        with default_generator_seeded(device, random.of_op(self.index)):
            result = functional_call(_CodeOnModule(self.module), tensors, (code,))
        with torch.no_grad():
            for name, value in before.items():
                if tensors[name] is not value:
                    value.copy_(tensors[name])
        return result

    def run_differentiable(
        self,
        state: Mapping[str, Tensor],
        parameters: Sequence[str],
        inputs: Sequence[Tensor],
        specs: MessageSpec,
        random: RandomKey,
    ) -> tuple[Any, Differentiable]:
        """Run the module such that these parameters, and the inputs whose specs require it, get gradients.

        Every microbatch has its own leaves, which share the memory of the state. So its gradients are separate.
        """
        leaves = tuple(
            one.detach().requires_grad_(spec.requires_grad) for one, spec in zip(self.unpacked(inputs), specs, strict=True)
        )
        own = {name: state[name].detach().requires_grad_(state[name].requires_grad) for name in parameters}
        used = {**state, **own}
        left = Differentiable(
            outputs=(),
            inputs=tuple(one for one in leaves if one.requires_grad),
            parameters=own,
            run=lambda code: self.run_with(used, random, code),
        )
        return self.run(used, leaves, random), left

    def unpacked(self, arrived: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the received tensors with the sender's strides."""
        return self.takes.unpack(arrived) if isinstance(self.takes, Boundary) else tuple(arrived)

    def loss_of(self, returned: Any, targets: Sequence[Tensor]) -> Tensor:
        """Return the loss. Only the last stage has one. The targets do not change."""
        return loss_of(returned, self.loss, self.targets, [copy_of(one) for one in targets])


class _CodeOnModule(nn.Module):
    """A module that runs any code and contains another module, so that the other's state can be replaced meanwhile."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def __call__(self, code: Callable[[], Any]) -> Any:
        return code()  # hooks of all modules are for the user's


@dataclass(frozen=True, slots=True)
class StageModule(TrainStage):
    """One stage that is a module. The last stage returns the loss, every other stage the tensors packed by ``_returns``.

    Gradients have their own strides, and so their own layouts.
    """

    _call: ModuleCall
    _returns: Boundary | None
    _grad_inputs: tuple[Layout, ...]
    _grad_outputs: tuple[Layout, ...]
    output_format: OutputFormat | None

    def run_forward(
        self, state: Mapping[str, Tensor], inputs: Sequence[Tensor], random: RandomKey, targets: Sequence[Tensor] = ()
    ) -> tuple[tuple[Tensor, ...], Differentiable]:
        """See :meth:`TrainStage.run_forward`. The default generator, seeded by stage and microbatch, draws random numbers."""
        return self._run_forward(state, inputs, random, targets)[:2]

    def forward_with_outputs(self) -> ForwardWithOutputs:
        """See :meth:`TrainStage.forward_with_outputs`."""
        form = self.output_format
        assert form is not None, "only the last stage has the model's outputs"

        def run(
            state: Mapping[str, Tensor], inputs: Sequence[Tensor], random: RandomKey, targets: Sequence[Tensor]
        ) -> tuple[tuple[Tensor, ...], Differentiable, tuple[Tensor, ...]]:
            sent, left, returned = self._run_forward(state, inputs, random, targets)
            return sent, left, tuple(one.detach() for one in form.flatten_alike(returned))

        return run

    def _run_forward(
        self, state: Mapping[str, Tensor], inputs: Sequence[Tensor], random: RandomKey, targets: Sequence[Tensor]
    ) -> tuple[tuple[Tensor, ...], Differentiable, Any]:
        check("inputs", self.index, inputs, self.inputs)
        check("targets", self.index, targets, self.targets)
        with torch.enable_grad():
            returned, left = self._call.run_differentiable(state, self.parameters, inputs, self.inputs, random)
            if self._returns is None:
                results: tuple[Tensor, ...] = (self._call.loss_of(returned, targets),)
            else:
                results = self._returns.tensors(returned)
        sent = tuple(result.detach() for result in results)
        sent = sent if self._returns is None else self._returns.pack(sent)
        check("outputs", self.index, sent, self.outputs)
        for index, (result, spec) in enumerate(zip(results, self.outputs, strict=True)):
            if result.requires_grad and not spec.requires_grad:
                raise BatchError(
                    f"stage {self.index}: output {index} has a gradient with this batch and had none with the example: "
                    "expected an example that takes a way with a gradient"
                )
        left.outputs = tuple(result for result, spec in zip(results, self.outputs, strict=True) if spec.requires_grad)
        return sent, left, returned

    def run_input_grad(
        self, saved: Differentiable, grad_outputs: Sequence[Tensor | None]
    ) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        """See :meth:`TrainStage.run_input_grad`. It computes the parameters' gradients too, for W."""
        check("output gradients", self.index, [one for one in grad_outputs if one is not None], self.grad_outputs, grad_outputs)
        inputs = saved.inputs
        given = zip(grad_outputs, self._grad_outputs, strict=True)
        arrived, parameter_grads = saved.backward([None if one is None else layout.unpack(one) for one, layout in given])
        sent = tuple(
            layout.pack(torch.zeros_like(one) if new is None else new)
            for one, new, layout in zip(inputs, arrived, self._grad_inputs, strict=True)
        )
        return sent, parameter_grads

    def run_weight_grad(self, saved: dict[str, Tensor]) -> tuple[Tensor | None, ...]:
        """See :meth:`TrainStage.run_weight_grad`. The parameters that a module uses may depend on the values of its inputs."""
        return tuple(saved.pop(name, None) for name in self.contributions)


@dataclass(frozen=True, slots=True)
class EvalModule(EvalStage):
    """One stage that is a module, in evaluation mode."""

    _call: ModuleCall
    _returns: Boundary | None
    _outputs: OutputFormat | None = None

    def run_forward(
        self,
        state: Mapping[str, Tensor],
        inputs: Sequence[Tensor],
        targets: Sequence[Tensor] = (),
        *,
        with_loss: bool = True,
        with_outputs: bool = False,
    ) -> tuple[Tensor, ...]:
        """See :meth:`EvalStage.run_forward`."""
        check("inputs", self.index, inputs, self.inputs)
        with torch.no_grad():
            returned = self._call.run(state, self._call.unpacked(inputs), NOTHING_RANDOM)
            if self._returns is not None:
                results = self._returns.pack(self._returns.tensors(returned))
                check("outputs", self.index, results, self.outputs)
                return results
            loss: tuple[Tensor, ...] = ()
            if with_loss:
                check("targets", self.index, targets, self.targets)
                loss = (self._call.loss_of(returned, targets),)
                if not with_outputs:
                    return loss
            assert self._outputs is not None, "the last stage has the model's outputs"
            outputs = tuple(self._outputs.flatten_alike(returned))
        check("outputs", self.index, outputs, self.outputs)
        return (*loss, *outputs)
