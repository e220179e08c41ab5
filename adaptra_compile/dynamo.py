"""The backend of ``torch.compile(model, backend="adaptra", options={"stages": 4, "microbatches": 16})``.

    compiled = torch.compile(model, backend="adaptra", options={"stages": 4, "microbatches": 16})
    loss = compiled(inputs, targets)
    loss.backward()
    optimizer.step()

A backend is given the forward pass alone, and what it returns is one call; the backward pass comes later, from outside. So the
compiled function must return its scalar loss: then a call runs a whole adapted step, forward and backward of all microbatches,
and keeps the gradients; ``backward`` scales them by what comes from above and hands them to autograd, which puts them where it
always does. The loss is the mean of the microbatches' losses, on every rank.

Under torchrun every rank has the whole model and runs the same lines. It computes one stage, so only that stage's parameters
get gradients and take steps; those of the other stages, which this rank never uses, stay as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final, Self

import sympy
import torch
from torch import Tensor, fx
from torch._dynamo import lookup_backend, maybe_mark_dynamic
from torch._dynamo.exc import InvalidBackend, TensorifyScalarRestartAnalysis, UnspecializeRestartAnalysis
from torch.autograd.function import once_differentiable
from torch.func import functional_call
from torch.fx.experimental.symbolic_shapes import is_concrete_int

from adaptra.api import Pipeline
from adaptra.api import compile as compile_pipeline
from adaptra.errors import CaptureError, OptionError
from adaptra.graph.dynamo_graph import GraphModel, is_state, source_of
from adaptra.graph.ops import results_of
from adaptra.runtime.launch import is_launched
from adaptra.runtime.options import Options, is_whole


@dataclass(frozen=True, slots=True)
class BackendOptions:
    """What ``options=`` of torch.compile says to this backend; it also takes every field of :class:`adaptra.Options`.

    Attributes:
        stages, microbatches, memory, transport: As in :func:`adaptra.compile`.
        inner: The backend that compiles what is not a pipeline: everything with one stage and one microbatch, and calls
            without gradients.
        on_pipeline: Called once with each :class:`adaptra.Pipeline` that is made, to explain, trace or close it.
        runtime: The fields of :class:`adaptra.Options`.
    """

    stages: int = 1
    microbatches: int = 1
    memory: int | str | None = None
    transport: str | None = None
    inner: str = "eager"
    on_pipeline: Callable[[Pipeline], object] | None = None
    runtime: Options = field(default_factory=Options)

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> Self:
        """Read the options.

        Raises:
            OptionError: An option is unknown or not what it should be.
        """
        own = {one.name for one in fields(cls)} - {"runtime"}
        runtime = {one.name for one in fields(Options)}
        unknown = sorted(set(given) - own - runtime)
        if unknown:
            raise OptionError(f"options: unknown {', '.join(unknown)}: expected any of {', '.join(sorted(own | runtime))}")
        return cls(
            **{name: value for name, value in given.items() if name in own},
            runtime=Options(**{name: value for name, value in given.items() if name in runtime}),
        )

    def __post_init__(self) -> None:
        for name in ("stages", "microbatches"):
            number: Any = getattr(self, name)
            if not is_whole(number) or number < 1:
                raise OptionError(f"{name}={number!r}: expected a whole number of at least 1")
        inner: Any = self.inner
        try:
            is_known = isinstance(inner, str) and inner != "adaptra" and lookup_backend(inner) is not None
        except InvalidBackend:
            is_known = False
        if not is_known:
            raise OptionError(f"inner={inner!r}: expected another backend of torch.compile, such as 'eager' or 'inductor'")
        called: Any = self.on_pipeline
        if called is not None and not callable(called):
            raise OptionError(f"on_pipeline={called!r}: expected a function that is called with each pipeline, or None")


class _TraceAgain(UnspecializeRestartAnalysis, TensorifyScalarRestartAnalysis):
    """Asks dynamo to trace the function anew; of the first kind it forgets how far it had come, the second one reaches it."""


def adaptra_backend(
    graph: fx.GraphModule,
    examples: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile one graph; torch.compile calls it.

    Args:
        graph: The forward pass, with everything as input.
        examples: The inputs of the call that is being compiled.
        options: See :class:`BackendOptions`.
        mode: Must be None.

    Raises:
        OptionError: An option is unknown or not what it should be, or a mode is given.
        CaptureError: The graph can't become a pipeline; says why and what to change.
    """
    if mode is not None:
        raise OptionError(f"mode={mode!r}: expected none: modes are inductor's; options={{'inner': 'inductor'}} compiles by it")
    chosen = BackendOptions.parse(options or {})
    if chosen.stages == chosen.microbatches == 1:
        return lookup_backend(chosen.inner)(graph, list(examples))
    results = [one.meta["example_value"] for one in results_of(graph.graph)]
    if not torch.is_grad_enabled() or not any(isinstance(one, Tensor) and one.requires_grad for one in results):
        if is_launched() and chosen.stages > 1:
            raise CaptureError(
                "a call without gradients: under a launcher a rank trains the parameters of its own stage only, and this call "
                "needs all of them: load the ranks' states into a plain model, or use adaptra.compile and its eval_step"
            )
        return lookup_backend(chosen.inner)(graph, list(examples))
    if len(results) != 1 or results[0].dim() != 0:
        shown = ", ".join(f"{str(one.dtype).removeprefix('torch.')}{list(one.shape)}" for one in results)
        raise CaptureError(
            f"the compiled function returns {shown}: expected one scalar, the loss, since all backward passes run within the "
            "call: compile a function that returns the loss; if it does, a graph break has cut it in two, which "
            "torch.compile(..., fullgraph=True) shows"
        )
    if chosen.microbatches > 1:
        _require_any_batch(graph, examples, chosen.microbatches)
    return _Step(graph, examples, chosen)


def _require_any_batch(graph: fx.GraphModule, examples: Sequence[Any], microbatches: int) -> None:
    """Make sure that the graph holds for the rows of a microbatch; a first trace, which takes all sizes as fixed, is made anew.

    Raises:
        CaptureError: The model's code goes by the number of rows.
    """
    inputs = [
        (node, example)
        for node, example in zip(graph.graph.find_nodes(op="placeholder"), examples, strict=True)
        if isinstance(example, Tensor) and example.dim() > 0 and not is_state(node, example)
    ]
    fixed = [example for node, example in inputs if isinstance(node.meta["example_value"].shape[0], int)]
    if any(not hasattr(example, _MARKED) for example in fixed):
        for example in fixed:
            maybe_mark_dynamic(example, 0)
            setattr(example, _MARKED, True)
        raise _TraceAgain(restart_reason="adaptra needs a graph of any number of rows")
    for node, example in inputs:
        rows = example.shape[0]
        if not _holds_for(node.meta["example_value"].shape[0], rows // microbatches):
            raise CaptureError(
                f"{source_of(node).name}: what was traced for {rows} rows does not hold for the {rows // microbatches} of a "
                "microbatch: expected code for any batch size: don't compare or convert the size of the first dimension"
            )


def _holds_for(size: int | torch.SymInt, rows: int) -> bool:
    """Whether what dynamo has assumed of a size is also true of so many rows."""
    if is_concrete_int(size):
        return False
    assert isinstance(size, torch.SymInt), "a size that is not known is symbolic"
    symbol, environment = size.node.expr, size.node.shape_env
    return all(guard.expr.subs(symbol, rows) != sympy.false for guard in environment.guards)


_MARKED: Final = "_adaptra_any_rows"


class _Step:
    """The compiled function: each call is a step of a pipeline, which the first one makes."""

    def __init__(self, graph: fx.GraphModule, examples: Sequence[Any], options: BackendOptions) -> None:
        self._model = GraphModel(graph, examples)
        self._options = options
        self._pipeline: Pipeline | None = None

    def __call__(self, *given: Any) -> tuple[Tensor]:
        """Run a step on what the graph takes, in its order."""
        inputs = tuple(given[position] for position in self._model.inputs)
        whole = self._loss_of_whole_batch(inputs) if self._pipeline is None else None
        pipeline = self._pipeline or self._build(inputs)
        held = pipeline.held_tensors()
        with torch.no_grad():
            for name, tensor in held:
                original = given[self._model.state[name]]
                if tensor.data_ptr() != original.data_ptr():  # a parameter of several stages, of which each has a copy
                    tensor.copy_(original)
        loss = pipeline.step(inputs)
        if whole is not None and (whole - loss * self._options.microbatches).abs() < (whole - loss).abs():
            raise CaptureError(
                f"the loss of the whole batch is {whole:g} and the mean of its microbatches' losses {loss:g}: expected a mean "
                "over the rows, so that these are about equal; this one looks like a sum: divide it by the number of rows"
            )
        gradients: dict[str, Tensor] = {}
        for name, tensor in held:
            if tensor.grad is not None:
                gradients.setdefault(name, tensor.grad)
                tensor.grad = None
        parameters = [given[self._model.state[name]] for name in gradients]
        return (_Deliver.apply(loss, list(gradients.values()), *parameters),)  # pyright: ignore[reportReturnType]

    def _loss_of_whole_batch(self, inputs: tuple[Tensor, ...]) -> Tensor:
        """The loss as the uncompiled function would return it, but for random numbers; nothing is changed by asking."""
        buffers = {name: buffer.clone() for name, buffer in self._model.named_buffers()}
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            return functional_call(self._model, buffers, inputs)

    def _build(self, inputs: tuple[Tensor, ...]) -> Pipeline:
        options = self._options
        self._pipeline = compile_pipeline(
            self._model,
            stages=options.stages,
            microbatches=options.microbatches,
            example_inputs=(inputs,),
            memory=options.memory,
            transport=options.transport,
            options=options.runtime,
        )
        if options.on_pipeline is not None:
            options.on_pipeline(self._pipeline)
        return self._pipeline


class _Deliver(torch.autograd.Function):
    """The step's loss as autograd sees it: its gradients are known, and are only scaled."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: list[Tensor], *_: Tensor) -> Tensor:
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator's
        (above,) = grad_outputs
        return None, None, *(gradient * above for gradient in ctx.gradients)
