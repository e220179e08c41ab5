"""Stages of a captured model, which run graphs of ops for F, I and W."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor, fx

from adaptra.graph.ops.ops import results_of
from adaptra.graph.ops.random_state import RandomKey
from adaptra.graph.stages.results_in_turn import with_results_in_turn
from adaptra.graph.stages.stages import EvalStage, ForwardWithOutputs, Take, TrainStage, check

NOTHING_RANDOM: Final = RandomKey(0, 0, 0)
"""Random key in evaluation mode, where models hardly ever draw random numbers."""


@dataclass(slots=True)
class Saved:
    """Values that F saves for I, or I for W. The run that uses them empties it, so that each is freed after its last use."""

    values: list[Tensor]

    def take(self) -> list[Tensor]:
        """Return the values and keep no reference to them."""
        values, self.values = self.values, []
        return values


@dataclass(frozen=True, slots=True)
class ForwardGraph:
    """A forward graph and its arguments: state and constants by name, then inputs, targets and a RandomKey."""

    module: fx.GraphModule
    state: tuple[str, ...]
    constants: tuple[Tensor, ...]

    def run(
        self, state: Mapping[str, Tensor], inputs: Sequence[Tensor], targets: Sequence[Tensor], random: RandomKey
    ) -> list[Tensor]:
        """Run it without autograd. Buffers in ``state`` are changed in place where the model does so."""
        values: list[Tensor | RandomKey] = [*(state[name] for name in self.state), *self.constants, *inputs, *targets, random]
        with torch.no_grad():
            # Not the module's call, which looks for hooks; a traced graph has none.
            return self.module.forward(values)

    @property
    def results(self) -> tuple[fx.Node, ...]:
        """The nodes that it returns."""
        return results_of(self.module.graph)

    def with_graph(self, change: Callable[[fx.GraphModule], fx.GraphModule]) -> ForwardGraph:
        """Return a copy whose graph is the result of ``change``."""
        return replace(self, module=change(self.module))


@dataclass(frozen=True, slots=True)
class StageGraphs(TrainStage):
    """One stage of a captured model."""

    _forward: ForwardGraph
    _input_grad: fx.GraphModule
    _input_grad_takes: tuple[int, ...]
    _weight_grad: fx.GraphModule
    _weight_grad_takes: tuple[int, ...]
    _fresh_gradients: tuple[bool, ...]
    _forward_with_outputs: Callable[[], ForwardGraph] | None = None

    @property
    def fresh_gradients(self) -> tuple[bool, ...]:
        """See :attr:`TrainStage.fresh_gradients`."""
        return self._fresh_gradients

    @property
    def graphs(self) -> tuple[fx.GraphModule, ...]:
        """See :attr:`TrainStage.graphs`."""
        return (self._forward.module, self._input_grad, self._weight_grad)

    def with_graphs(self, change: Callable[[fx.GraphModule], fx.GraphModule]) -> StageGraphs:
        """Return the same stage, but with what ``change`` makes of each of its graphs, to be called as these are."""
        with_outputs = self._forward_with_outputs
        return replace(
            self,
            _forward=self._forward.with_graph(change),
            _forward_with_outputs=None if with_outputs is None else lambda: with_outputs().with_graph(change),
            _input_grad=change(self._input_grad),
            _weight_grad=change(self._weight_grad),
            # A changed graph may return one tensor for two equal results.
            _fresh_gradients=(False,) * len(self.contributions),
        )

    def run_forward(
        self, state: Mapping[str, Tensor], inputs: Sequence[Tensor], random: RandomKey, targets: Sequence[Tensor] = ()
    ) -> tuple[tuple[Tensor, ...], Saved]:
        """See :meth:`TrainStage.run_forward`."""
        check("inputs", self.index, inputs, self.inputs)
        check("targets", self.index, targets, self.targets)
        results = self._forward.run(state, inputs, targets, random)
        count = len(self.outputs)
        return tuple(results[:count]), Saved(results[count:])

    def with_outputs(self, make: Callable[[], ForwardGraph]) -> StageGraphs:
        """Return the same stage, which can also return the model's outputs. ``make`` makes F's graph for that, when asked."""
        return replace(self, _forward_with_outputs=make)

    def forward_with_outputs(self) -> ForwardWithOutputs:
        """See :meth:`TrainStage.forward_with_outputs`."""
        assert self._forward_with_outputs is not None, "the last stage of a pipeline with a loss has the model's outputs"
        graph, count, kept = self._forward_with_outputs(), len(self.outputs), len(self._forward.results)

        def run(
            state: Mapping[str, Tensor], inputs: Sequence[Tensor], random: RandomKey, targets: Sequence[Tensor]
        ) -> tuple[tuple[Tensor, ...], Saved, tuple[Tensor, ...]]:
            check("inputs", self.index, inputs, self.inputs)
            check("targets", self.index, targets, self.targets)
            results = graph.run(state, inputs, targets, random)
            return tuple(results[:count]), Saved(results[count:kept]), tuple(results[kept:])

        return run

    def run_input_grad(self, saved: Saved, grad_outputs: Sequence[Tensor | None]) -> tuple[tuple[Tensor, ...], Saved]:
        """See :meth:`TrainStage.run_input_grad`."""
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
        """See :meth:`TrainStage.run_weight_grad`."""
        with torch.no_grad():
            results: list[Tensor] = self._weight_grad.forward(saved.take())
        return tuple(results)

    def weight_grad_in_turn(self) -> Callable[[Saved, Take], None]:
        """See :meth:`TrainStage.weight_grad_in_turn`."""
        graph = with_results_in_turn(self._weight_grad)

        def run(saved: Saved, take: Take) -> None:
            with torch.no_grad():
                graph.forward([*saved.take(), take])

        return run


@dataclass(frozen=True, slots=True)
class EvalGraphs(EvalStage):
    """One stage of a captured model in evaluation mode."""

    _forward: ForwardGraph
    _loss: ForwardGraph | None
    _both: ForwardGraph | None

    @property
    def graphs(self) -> tuple[fx.GraphModule, ...]:
        """See :attr:`EvalStage.graphs`. The one of an evaluation that returns both loss and outputs is not among them."""
        return tuple(one.module for one in (self._forward, self._loss) if one is not None)

    def with_graphs(self, change: Callable[[fx.GraphModule], fx.GraphModule]) -> EvalGraphs:
        """Return the same stage, but with what ``change`` makes of each of its graphs, to be called as these are."""
        loss = None if self._loss is None else self._loss.with_graph(change)
        both = None if self._both is None else self._both.with_graph(change)
        return replace(self, _forward=self._forward.with_graph(change), _loss=loss, _both=both)

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
        graph = self._both if with_outputs else self._loss
        if graph is None or not with_loss:
            return tuple(self._forward.run(state, inputs, (), NOTHING_RANDOM))
        check("targets", self.index, targets, self.targets)
        return tuple(graph.run(state, inputs, targets, NOTHING_RANDOM))
