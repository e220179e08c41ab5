"""Stage modules: the stages of a model given as a list of modules, which run as they are, by eager autograd.

The way out where a model can't be captured. Autograd finds the gradients of a stage's inputs and parameters in one pass, so I
computes both and W only hands on those of the parameters.
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
from adaptra.graph.capture.batch import InputFormat, LossFunction, TargetFormat, loss_of
from adaptra.graph.ops.layout import Layout
from adaptra.graph.ops.random_state import RandomKey, default_generator_seeded
from adaptra.graph.ops.specs import MessageSpec
from adaptra.graph.stages.stage_graphs import NOTHING_RANDOM
from adaptra.graph.stages.stages import EvalStage, TrainStage, check


@dataclass(frozen=True, slots=True)
class Boundary:
    """What travels from a module to the next: its structure, where in it tensors stand, and how each travels."""

    structure: pytree.TreeSpec
    is_tensor: tuple[bool, ...]
    layouts: tuple[Layout, ...]

    @staticmethod
    def of(returned: Any) -> Boundary:
        """The boundary behind a module that has returned this.

        Raises:
            CaptureError: There is something in it that can't travel.
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
        """The tensors in what the module returned.

        Raises:
            BatchError: It has another structure.
        """
        leaves, structure = pytree.tree_flatten(returned)
        if structure != self.structure or tuple(isinstance(leaf, Tensor) for leaf in leaves) != self.is_tensor:
            raise BatchError(
                f"a stage returned {structure} with this batch and {self.structure} with the example: expected one structure "
                "for all batches, with tensors in the same places"
            )
        return tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))

    def pack(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """These tensors as they are sent."""
        return tuple(layout.pack(tensor) for layout, tensor in zip(self.layouts, tensors, strict=True))

    def unpack(self, arrived: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The tensors as the module returned them."""
        return tuple(layout.unpack(tensor) for layout, tensor in zip(self.layouts, arrived, strict=True))

    def call(self, module: nn.Module, tensors: Sequence[Tensor]) -> Any:
        """Call the next module with these tensors: a tuple is its arguments, anything else its one argument."""
        remaining = iter(tensors)
        given = pytree.tree_unflatten([next(remaining) if here else None for here in self.is_tensor], self.structure)
        return module(*given) if isinstance(given, tuple) else module(given)


@dataclass(slots=True)
class Differentiable:
    """What F leaves for I: outputs that gradients come for, and the leaves that are to get theirs.

    ``run`` runs the module's code, which in backward computes again what a checkpoint did not keep.
    """

    outputs: tuple[Tensor, ...]
    inputs: tuple[Tensor, ...]
    parameters: dict[str, Tensor]
    run: Callable[[Callable[[], None]], None]

    def backward(self, grad_outputs: Sequence[Tensor | None]) -> tuple[list[Tensor | None], dict[str, Tensor]]:
        """The gradients of the inputs and of the parameters, as far as one arrives there. It is empty afterwards."""
        outputs, inputs, parameters = self.outputs, self.inputs, self.parameters
        self.outputs, self.inputs, self.parameters = (), (), {}
        reached = [
            (output, given)
            for output, given in zip(outputs, grad_outputs, strict=True)
            if output.requires_grad and given is not None
        ]
        # A leaf keeps its gradient with its own strides, and the next stage must see those that one process would see.
        arrived: list[Tensor | None] = [None] * len(inputs)
        for index, one in enumerate(inputs):
            one.register_hook(partial(arrived.__setitem__, index))
        if reached:
            self.run(lambda: torch.autograd.backward([output for output, _ in reached], [given for _, given in reached]))
        return arrived, {name: one.grad for name, one in parameters.items() if one.grad is not None}


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """How a stage's module is called.

    Attributes:
        index: Which stage.
        module: The module, with tensors of the meta device in place of its state, so that it holds nobody's memory.
        state: What it calls its parameters and buffers, each once, to their names in the user's model.
        takes: How its arguments arrive: the user's call on the first stage.
        loss, targets: What makes the loss, or None, of what the last stage's module returns.
    """

    index: int
    module: nn.Module
    state: Mapping[str, str]
    takes: InputFormat | Boundary
    loss: LossFunction | None
    targets: TargetFormat

    def run(self, state: Mapping[str, Tensor], inputs: Sequence[Tensor], random: RandomKey) -> Any:
        """Run the module. Its buffers change in place, also those that it replaces; its inputs stay as they are."""
        # Copies, which keep their strides: a module may change what it is given in place, and autograd has leaves left alone.
        return self.run_with(state, random, lambda: self.takes.call(self.module, [one.clone() for one in inputs]))

    def run_with(self, state: Mapping[str, Tensor], random: RandomKey, code: Callable[[], Any]) -> Any:
        """Run code that calls the module, with this state in it and the random numbers that belong to it."""
        given = {f"module.{name}": state[canonical] for name, canonical in self.state.items()}
        before = dict(given)
        device = next(iter(given.values()), torch.empty(0)).device
        with default_generator_seeded(device, random.of_op(self.index)):
            result = functional_call(_CodeOnModule(self.module), given, (code,))
        with torch.no_grad():
            for name, value in before.items():
                if given[name] is not value:
                    value.copy_(given[name])
        return result

    def run_differentiable(
        self,
        state: Mapping[str, Tensor],
        parameters: Sequence[str],
        inputs: Sequence[Tensor],
        specs: MessageSpec,
        random: RandomKey,
    ) -> tuple[Any, Differentiable]:
        """Run the module for gradients of these parameters, and of the inputs whose specs say so.

        Every microbatch has leaves of its own, over the memory that there is, so that its gradients lie apart from all others.
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
        """What arrived, with the strides that it had."""
        return self.takes.unpack(arrived) if isinstance(self.takes, Boundary) else tuple(arrived)

    def loss_of(self, returned: Any, targets: Sequence[Tensor]) -> Tensor:
        """The loss, on the last stage."""
        return loss_of(returned, self.loss, self.targets, targets)


class _CodeOnModule(nn.Module):
    """Any code, called as a module that holds another, so that what is given for that one's state is there meanwhile."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, code: Callable[[], Any]) -> Any:
        return code()


@dataclass(frozen=True, slots=True)
class StageModule(TrainStage):
    """One stage that is a module. On the last stage it returns the loss, else what ``_returns`` packs.

    Gradients have strides, and so layouts, of their own.
    """

    _call: ModuleCall
    _returns: Boundary | None
    _grad_inputs: tuple[Layout, ...]
    _grad_outputs: tuple[Layout, ...]

    def run_forward(
        self, state: Mapping[str, Tensor], inputs: Sequence[Tensor], random: RandomKey, targets: Sequence[Tensor] = ()
    ) -> tuple[tuple[Tensor, ...], Differentiable]:
        """See :meth:`TrainStage.run_forward`. Random numbers are the default generator's, seeded for stage and microbatch."""
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
        return sent, left

    def run_input_grad(
        self, saved: Differentiable, grad_outputs: Sequence[Tensor | None]
    ) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        """See :meth:`TrainStage.run_input_grad`. Finds the parameters' gradients too, for W."""
        check("output gradients", self.index, [one for one in grad_outputs if one is not None], self.grad_outputs, grad_outputs)
        inputs = saved.inputs
        given = zip(grad_outputs, self._grad_outputs, strict=True)
        arrived, found = saved.backward([None if one is None else layout.unpack(one) for one, layout in given])
        sent = tuple(
            layout.pack(torch.zeros_like(one) if new is None else new)
            for one, new, layout in zip(inputs, arrived, self._grad_inputs, strict=True)
        )
        return sent, found

    def run_weight_grad(self, saved: dict[str, Tensor]) -> tuple[Tensor | None, ...]:
        """See :meth:`TrainStage.run_weight_grad`. A module may leave parameters out, others for other values."""
        return tuple(saved.pop(name, None) for name in self.contributions)


@dataclass(frozen=True, slots=True)
class EvalModule(EvalStage):
    """One stage that is a module, in evaluation mode."""

    _call: ModuleCall
    _returns: Boundary | None

    def run_forward(
        self,
        state: Mapping[str, Tensor],
        inputs: Sequence[Tensor],
        targets: Sequence[Tensor] = (),
        *,
        with_loss: bool = True,
    ) -> tuple[Tensor, ...]:
        """See :meth:`EvalStage.run_forward`."""
        check("inputs", self.index, inputs, self.inputs)
        with torch.no_grad():
            returned = self._call.run(state, self._call.unpacked(inputs), NOTHING_RANDOM)
            if self._returns is not None:
                results = self._returns.pack(self._returns.tensors(returned))
            elif with_loss:
                check("targets", self.index, targets, self.targets)
                return (self._call.loss_of(returned, targets),)
            else:
                results = tuple(leaf for leaf in pytree.tree_leaves(returned) if isinstance(leaf, Tensor))
        check("outputs", self.index, results, self.outputs)
        return results
