"""The backend of ``torch.compile(model, backend="adaptra", options={"stages": 4, "microbatches": 16})``.

    compiled = torch.compile(model, backend="adaptra", options={"stages": 4, "microbatches": 16})
    loss = compiled(inputs, targets)
    loss.backward()
    optimizer.step()

A backend is given the forward pass alone, and what it returns is one call; the backward pass comes later, from outside. If the
compiled function returns its scalar loss, a call runs a whole adapted step, forward and backward of all microbatches, and keeps
the gradients; ``backward`` scales them by what comes from above and hands them to autograd, which puts them where it always
does. The loss is the mean of the microbatches' losses, on every rank.

If it returns anything else, a call runs the forward pass of all microbatches, and ``backward`` their backward pass, by what
comes from above. See :mod:`adaptra.phased` for what that costs.

Under torchrun every rank has the whole model and runs the same lines. It computes one stage, so only that stage's parameters
get gradients and take steps; those of the other stages, which this rank never uses, stay as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, fx, nn
from torch._dynamo import lookup_backend
from torch.autograd.function import once_differentiable
from torch.func import functional_call

from adaptra.api import Pipeline
from adaptra.errors import CaptureError, OptionError
from adaptra.graph.autocast import DEVICES, without_autocast
from adaptra.graph.dynamo_batch import require_any_batch, require_rows
from adaptra.graph.dynamo_graph import GraphModel, is_state, source_of
from adaptra.graph.inner import check_inner
from adaptra.graph.ops import results_of
from adaptra.losses import looks_like_sum
from adaptra.phased import Call, PhasedPipeline
from adaptra.request import Request
from adaptra.runtime.launch import is_launched
from adaptra.runtime.options import Options, is_whole
from adaptra.wrapped import refuse_wrapped_callers

Made = TypeVar("Made", bound=Pipeline)


@dataclass(frozen=True, slots=True)
class BackendOptions:
    """What ``options=`` of torch.compile says to this backend; it also takes every field of :class:`adaptra.Options`.

    Attributes:
        stages, microbatches, memory, transport: As in :func:`adaptra.compile`.
        on_pipeline: Called once with each :class:`adaptra.Pipeline` that is made, to explain, trace or close it.
        runtime: The fields of :class:`adaptra.Options`. Its ``inner`` also compiles what is not a pipeline: everything with one
            stage and one microbatch, calls without gradients, and what trains no parameters.
    """

    stages: int = 1
    microbatches: int = 1
    memory: int | str | None = None
    transport: str | None = None
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
        check_inner(self.runtime.inner)
        called: Any = self.on_pipeline
        if called is not None and not callable(called):
            raise OptionError(f"on_pipeline={called!r}: expected a function that is called with each pipeline, or None")


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
    refuse_wrapped_callers(
        (node.name, one) for node, one in zip(graph.graph.find_nodes(op="placeholder"), examples, strict=True)
    )
    if chosen.stages == chosen.microbatches == 1:
        return lookup_backend(chosen.runtime.inner)(graph, list(examples))
    results = [one.meta["example_value"] for one in results_of(graph.graph)]
    if not torch.is_grad_enabled() or not any(isinstance(one, Tensor) and one.requires_grad for one in results):
        if is_launched() and chosen.stages > 1:
            raise CaptureError(
                "a call without gradients: under a launcher a rank trains the parameters of its own stage only, and this call "
                "needs all of them: load the ranks' states into a plain model, or use adaptra.compile and its eval_step"
            )
        return lookup_backend(chosen.runtime.inner)(graph, list(examples))
    if not any(isinstance(one, nn.Parameter) and one.requires_grad for one in examples):
        # Such as the criterion of what a pipeline returns, behind a graph break: there is nothing to be trained by stages.
        return lookup_backend(chosen.runtime.inner)(graph, list(examples))
    if chosen.microbatches > 1:
        require_any_batch(graph, examples, chosen.microbatches)
    if len(results) > 1 or not isinstance(results[0], Tensor) or results[0].dim() > 0:
        if chosen.microbatches > 1:
            require_rows(graph, examples, results)
        return _Phases(graph, examples, chosen)
    for node, example in zip(graph.graph.find_nodes(op="placeholder"), examples, strict=True):
        if isinstance(example, Tensor) and example.requires_grad and not is_state(node, example):
            raise CaptureError(
                f"{source_of(node).name}: an input that requires a gradient, of a function that returns its loss: expected "
                "none, as a step is of parameters alone; compile what comes before together with it, or return no loss"
            )
    return _Step(graph, examples, chosen)


class _Pipelined:
    """A compiled function: each call is one of a pipeline, which the first one makes."""

    def __init__(self, graph: fx.GraphModule, examples: Sequence[Any], options: BackendOptions) -> None:
        autocasts = [(device, torch.get_autocast_dtype(device)) for device in DEVICES if torch.is_autocast_enabled(device)]
        self._model = GraphModel(graph, examples, autocasts)
        self._options = options

    def _inputs(self, given: Sequence[Any]) -> tuple[Tensor, ...]:
        return tuple(given[position] for position in self._model.inputs)

    def _pass_on_state(self, pipeline: Pipeline, given: Sequence[Any]) -> None:
        """Let the stages see what an optimizer did: of a parameter of several stages each has a copy."""
        with torch.no_grad():
            for name, tensor in pipeline.held_tensors():
                original = given[self._model.state[name]]
                if tensor.data_ptr() != original.data_ptr():
                    tensor.copy_(original)

    def _take_gradients(self, pipeline: Pipeline) -> dict[str, Tensor]:
        """The gradients of this process's stages by name; the pipeline has them no longer."""
        gradients: dict[str, Tensor] = {}
        for name, tensor in pipeline.held_tensors():
            if tensor.grad is not None:
                gradients.setdefault(name, tensor.grad)
                tensor.grad = None
        return gradients

    def _request(self, *, with_loss: bool) -> Request:
        options = self._options
        return Request(
            self._model,
            options.stages,
            options.microbatches,
            loss=None,
            memory=options.memory,
            split=None,
            mesh=None,
            transport=options.transport,
            options=options.runtime,
            with_loss=with_loss,
        )

    def _built(self, pipeline: Made, inputs: tuple[Tensor, ...]) -> Made:
        pipeline.build(inputs)
        if self._options.on_pipeline is not None:
            self._options.on_pipeline(pipeline)
        return pipeline


class _Step(_Pipelined):
    """A function that returns its loss: each call is a step."""

    _pipeline: Pipeline | None = None

    def __call__(self, *given: Any) -> tuple[Tensor]:
        """Run a step on what the graph takes, in its order."""
        with without_autocast():  # around the call it is the model's, which enters it
            return self._run(given)

    def _run(self, given: Sequence[Any]) -> tuple[Tensor]:
        inputs = self._inputs(given)
        whole = self._loss_of_whole_batch(inputs) if self._pipeline is None else None
        pipeline = self._pipeline or self._build(inputs)
        self._pass_on_state(pipeline, given)
        loss = pipeline.step(inputs)
        if whole is not None and looks_like_sum(whole, loss, self._options.microbatches):
            raise CaptureError(
                f"the loss of the whole batch is {whole:g} and the mean of its microbatches' losses {loss:g}: expected a mean "
                "over the rows, so that these are about equal; this one looks like a sum: divide it by the number of rows"
            )
        gradients = self._take_gradients(pipeline)
        parameters = [given[self._model.state[name]] for name in gradients]
        return (_Deliver.apply(loss, list(gradients.values()), *parameters),)  # pyright: ignore[reportReturnType]

    def _loss_of_whole_batch(self, inputs: tuple[Tensor, ...]) -> Tensor:
        """The loss as the uncompiled function would return it, but for random numbers; nothing is changed by asking."""
        buffers = {name: buffer.clone() for name, buffer in self._model.named_buffers()}
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            (loss,) = functional_call(self._model, buffers, inputs)
            return loss

    def _build(self, inputs: tuple[Tensor, ...]) -> Pipeline:
        self._pipeline = self._built(Pipeline(self._request(with_loss=True)), inputs)
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


class _Phases(_Pipelined):
    """A function that returns no loss: each call is a forward pass, whose backward pass comes when autograd asks for it."""

    _pipeline: PhasedPipeline | None = None

    def __call__(self, *given: Any) -> tuple[Tensor, ...]:
        """Run the forward pass on what the graph takes, in its order."""
        inputs = self._inputs(given)
        parameters = [given[self._model.state[name]] for name, _ in self._model.named_parameters()]
        with without_autocast():  # around the call it is the model's, which enters it
            pipeline = self._pipeline or self._build(inputs)
            self._pass_on_state(pipeline, given)
            outputs, call = pipeline.forward([one.detach() for one in inputs], [*parameters, *inputs])
        return _Later.apply(self, pipeline, call, outputs, *parameters, *inputs)  # pyright: ignore[reportReturnType]

    def backward(self, pipeline: PhasedPipeline, call: Call, tangents: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        """The gradients of the function's parameters, None of those of other ranks, and of its inputs."""
        wanted = [one for one, has_gradient in zip(tangents, pipeline.differentiable, strict=True) if has_gradient]
        with without_autocast():  # a backward pass runs in what its forward pass ran in
            of_inputs = iter(pipeline.backward(call, wanted))
        of_parameters = self._take_gradients(pipeline)
        return (
            *(of_parameters.get(name) for name, _ in self._model.named_parameters()),
            *(next(of_inputs) if has_gradient else None for has_gradient in pipeline.differentiated),
        )

    def _build(self, inputs: tuple[Tensor, ...]) -> PhasedPipeline:
        self._pipeline = self._built(PhasedPipeline(self._request(with_loss=False)), inputs)
        return self._pipeline


class _Later(torch.autograd.Function):
    """The outputs as autograd sees them: their backward pass is the pipeline's."""

    @staticmethod
    def forward(
        ctx: Any, phases: _Phases, pipeline: PhasedPipeline, call: Call, outputs: tuple[Tensor, ...], *_: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.run = partial(phases.backward, pipeline, call)
        constant = (one for one, has_gradient in zip(outputs, pipeline.differentiable, strict=True) if not has_gradient)
        ctx.mark_non_differentiable(*constant)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator's
        return None, None, None, None, *ctx.run(grad_outputs)
