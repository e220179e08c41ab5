"""The backend of ``torch.compile(model, backend="adaptra", options={"stages": 4, "microbatches": 16})``.

    compiled = torch.compile(model, backend="adaptra", options={"stages": 4, "microbatches": 16})
    loss = compiled(inputs, targets)
    loss.backward()
    optimizer.step()

A backend gets only the graph of the forward pass, and returns a function that runs it. The backward pass comes later, through
autograd. If the compiled function returns its scalar loss, a call runs a whole adapted step, forward and backward of all
microbatches, and keeps the gradients. ``backward`` then scales them by the incoming gradient and returns them to autograd,
which accumulates them as always. The loss is the mean of the microbatches' losses, on every rank.

If the function returns anything else, a call runs the forward pass of all microbatches, and ``backward`` runs their backward
pass. See :mod:`adaptra.frontend.two_pass` for its cost.

Under torchrun every rank has the whole model and runs the same lines. Each rank computes one stage but gets the gradients of
all, so that its module stays complete and up to date: see :mod:`adaptra.frontend.gradients_everywhere`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, Final, Self, TypeVar

import torch
from torch import Tensor, fx, nn
from torch._dynamo import lookup_backend
from torch.autograd.function import once_differentiable
from torch.func import functional_call

from adaptra.checks import require_call, require_count, require_word
from adaptra.errors import CaptureError, OptionError, PartitionError
from adaptra.frontend.api import Pipeline
from adaptra.frontend.arguments.arguments import CompileArguments
from adaptra.frontend.arguments.wrapped_models import refuse_wrapped_callers
from adaptra.frontend.gradients_everywhere import Everywhere
from adaptra.frontend.two_pass import Call, TwoPassPipeline
from adaptra.graph.capture.dynamo_batch import require_any_batch, require_rows, rows_of
from adaptra.graph.capture.dynamo_graph import GraphModel, is_state, source_of
from adaptra.graph.inner_compiler import check_inner
from adaptra.graph.ops.autocast import DEVICES, without_autocast
from adaptra.graph.ops.ops import results_of
from adaptra.runtime.launch.launch import world_size
from adaptra.runtime.options import Options
from adaptra.runtime.worker.stages.loss_reduction import looks_like_sum

T = TypeVar("T", bound=Pipeline)
EVERYWHERE: Final = "everywhere"
STAGE: Final = "stage"
MICROBATCHES_PER_STAGE: Final = 4
"""Default of the most microbatches per stage. About a quarter of a step is then spent on filling and draining."""


@dataclass(frozen=True, slots=True)
class BackendOptions:
    """The keys of torch.compile's ``options=`` for this backend. Every field of :class:`adaptra.Options` is a key too.

    Attributes:
        stages, microbatches, memory, transport: As in :func:`adaptra.compile`. The default of ``stages`` is the number of
            ranks, that of ``microbatches`` a divisor of the batch, up to four per stage.
        gradients: Under a launcher, ``"everywhere"`` sends the gradients of all stages, and buffers that they change, to every
            rank. So every rank's module stays complete. With ``"stage"`` a rank has those of its own stage only.
        on_pipeline: Called once with each new :class:`adaptra.Pipeline`, to explain, trace or close it.
        runtime: The fields of :class:`adaptra.Options`. Its ``inner`` also compiles functions that are not pipelined: with one
            stage and one microbatch, for calls without gradients, and if no parameters are trained.
    """

    stages: int | None = None
    microbatches: int | None = None
    gradients: str = EVERYWHERE
    memory: int | str | None = None
    transport: str | None = None
    on_pipeline: Callable[[Pipeline], object] | None = None
    runtime: Options = field(default_factory=Options)

    @classmethod
    def parse(cls, options: Mapping[str, Any]) -> Self:
        """Read the options.

        Raises:
            OptionError: An option is unknown or invalid.
        """
        own = {one.name for one in fields(cls)} - {"runtime"}
        runtime = {one.name for one in fields(Options)}
        unknown = sorted(set(options) - own - runtime)
        if unknown:
            raise OptionError(f"options: unknown {', '.join(unknown)}: expected any of {', '.join(sorted(own | runtime))}")
        return cls(
            **{name: value for name, value in options.items() if name in own},
            runtime=Options(**{name: value for name, value in options.items() if name in runtime}),
        )

    def settled(self, ranks: int, rows: int | None) -> Settled:
        """Return these options with their defaults for a job of ``ranks`` ranks and batches of ``rows`` rows."""
        stages = ranks if self.stages is None else self.stages
        if stages == 1 and ranks > 1:
            warnings.warn(
                f"stages=1 under {ranks} ranks: each has the whole model, "
                + ("and nothing joins them" if self.microbatches in (None, 1) else f"{ranks} replicas of it"),
                stacklevel=2,
            )
        if self.microbatches is not None:
            microbatches = self.microbatches
        else:
            microbatches = 1 if stages == 1 or rows is None else divisor(rows, MICROBATCHES_PER_STAGE * stages)
        numbers: dict[str, Any] = {one.name: getattr(self, one.name) for one in fields(self)}
        numbers |= {"stages": stages, "microbatches": microbatches, "ranks": ranks}
        return Settled(**numbers)

    def __post_init__(self) -> None:
        for name in ("stages", "microbatches"):
            if (number := getattr(self, name)) is not None:
                require_count(name, number)
        require_word("gradients", self.gradients, (EVERYWHERE, STAGE))
        check_inner(self.runtime.inner)
        require_call("on_pipeline", self.on_pipeline, "pipeline")


@dataclass(frozen=True, slots=True)
class Settled(BackendOptions):
    """Options for one function, with a number for each one that was omitted.

    Attributes:
        stages, microbatches: As of :class:`BackendOptions`.
        ranks: The number of ranks of the job.
    """

    stages: int = 1
    microbatches: int = 1
    ranks: int = 1


def divisor(rows: int, most: int) -> int:
    """Return the largest divisor of ``rows`` up to ``most``."""
    return max(number for number in range(1, max(1, min(rows, most)) + 1) if rows % number == 0)


@contextmanager
def naming_the_cut(graph: fx.GraphModule) -> Generator[None]:
    """Add to errors, within this context, where and why torch.compile broke the function's graph."""
    reason: Any = getattr(graph, "compile_subgraph_reason", None)
    try:
        yield
    except (CaptureError, PartitionError) as error:
        if reason is None or not reason.graph_break or not reason.user_stack:
            raise
        line = reason.user_stack[-1]
        why = str(reason.reason).strip().splitlines()[0]
        raise type(error)(
            f"{error}; this is a part of the function, which torch.compile has cut at {line.filename}:{line.lineno} ({why})"
        ) from error


def adaptra_backend(
    graph: fx.GraphModule,
    examples: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile one graph; torch.compile calls it.

    Args:
        graph: The forward pass, with all tensors as inputs.
        examples: The inputs of the call that is being compiled.
        options: See :class:`BackendOptions`.
        mode: Must be None.

    Raises:
        OptionError: An option is unknown or invalid, or a mode is given.
        CaptureError: The graph can't become a pipeline. The text says why and what to change.
    """
    if mode is not None:
        raise OptionError(f"mode={mode!r}: expected none: modes are inductor's; options={{'inner': 'inductor'}} compiles by it")
    chosen = BackendOptions.parse(options or {})
    refuse_wrapped_callers(
        (node.name, one) for node, one in zip(graph.graph.find_nodes(op="placeholder"), examples, strict=True)
    )
    inner = partial(lookup_backend(chosen.runtime.inner), graph, list(examples))
    ranks = 1 if chosen.transport == "local" else world_size()
    chosen = chosen.settled(ranks, rows_of(graph, examples))
    if chosen.stages == chosen.microbatches == 1:
        return inner()
    results = [one.meta["example_value"] for one in results_of(graph.graph)]
    if not torch.is_grad_enabled() or not any(isinstance(one, Tensor) and one.requires_grad for one in results):
        if ranks > 1 and chosen.stages > 1 and chosen.gradients == STAGE:
            raise CaptureError(
                "a call without gradients: with gradients='stage' a rank trains the parameters of its own stage only, and this "
                "call needs all of them: expected gradients='everywhere', or adaptra.compile and its eval_step"
            )
        return inner()
    if not any(isinstance(one, nn.Parameter) and one.requires_grad for one in examples):
        # No parameters to train by stages, such as a criterion after a graph break, applied to a pipeline's outputs.
        return inner()
    with naming_the_cut(graph):
        return _pipelined(graph, examples, results, chosen)


def _pipelined(graph: fx.GraphModule, examples: Sequence[Any], results: Sequence[Any], chosen: Settled) -> _OnePass | _TwoPass:
    if chosen.microbatches > 1:
        require_any_batch(graph, examples, chosen.microbatches)
    if len(results) > 1 or not isinstance(results[0], Tensor) or results[0].dim() > 0:
        if chosen.microbatches > 1:
            require_rows(graph, examples, results)
        return _TwoPass(graph, examples, chosen)
    for node, example in zip(graph.graph.find_nodes(op="placeholder"), examples, strict=True):
        if isinstance(example, Tensor) and example.requires_grad and not is_state(node, example):
            raise CaptureError(
                f"{source_of(node).name}: an input that requires a gradient, of a function that returns its loss: expected "
                "none, as a step is of parameters alone; compile what comes before together with it, or return no loss"
            )
    return _OnePass(graph, examples, chosen)


class _Pipelined:
    """A compiled function. Each call runs a pipeline, which the first call with batches of that shape makes."""

    _with_loss = True

    def __init__(self, graph: fx.GraphModule, examples: Sequence[Any], options: Settled) -> None:
        autocasts = [(device, torch.get_autocast_dtype(device)) for device in DEVICES if torch.is_autocast_enabled(device)]
        self._model = GraphModel(graph, examples, autocasts)
        self._options = options
        self._made: dict[tuple[torch.Size, ...], Any] = {}
        self._everywhere: dict[Pipeline, Everywhere] = {}

    def _inputs(self, given: Sequence[Any]) -> tuple[Tensor, ...]:
        return tuple(given[position] for position in self._model.inputs)

    def _pass_on_state(self, pipeline: Pipeline, arguments: Sequence[Any]) -> None:
        """Copy the optimizer's changes to the stages' own copies of shared parameters."""
        with torch.no_grad():
            for name, tensor in pipeline.held_tensors():
                original = arguments[self._model.state[name]]
                if tensor.data_ptr() != original.data_ptr():
                    tensor.copy_(original)

    def _take_gradients(self, pipeline: Pipeline) -> dict[str, Tensor]:
        """Remove the gradients from the pipeline and return them by name, of this process's stages or of all stages."""
        gradients: dict[str, Tensor] = {}
        for name, tensor in pipeline.held_tensors():
            if tensor.grad is not None:
                gradients.setdefault(name, tensor.grad)
                tensor.grad = None
        everywhere = self._everywhere.get(pipeline)
        return gradients if everywhere is None else everywhere.gradients(gradients, self._model)

    def _take_buffers(self, pipeline: Pipeline) -> None:
        everywhere = self._everywhere.get(pipeline)
        if everywhere is not None:
            everywhere.take_buffers(self._model)

    def _pipeline_for(self, inputs: Sequence[Tensor], make: Callable[[CompileArguments], T]) -> tuple[T, bool]:
        """Return the pipeline for batches of this shape, and whether it is the first pipeline. Each shape has its own."""
        shapes = tuple(one.shape for one in inputs)
        is_first, options = not self._made, self._options
        if shapes in self._made:
            return self._made[shapes], False
        microbatches = options.microbatches
        if not is_first:
            rows = next((one.shape[0] for one in inputs if one.dim()), microbatches)
            microbatches = divisor(rows, microbatches)
        is_everywhere = options.ranks > 1 and options.gradients == EVERYWHERE
        pipeline = make(
            CompileArguments(
                self._model,
                options.stages,
                microbatches,
                loss=None,
                memory=options.memory,
                split=None,
                mesh=None,
                transport=options.transport,
                options=options.runtime,
                with_loss=self._with_loss,
                keeps_whole=options.ranks == 1 or is_everywhere,
            )
        )
        with naming_the_cut(self._model.graph):
            pipeline.build(tuple(inputs))
        self._made[shapes] = pipeline
        if is_everywhere:
            self._everywhere[pipeline] = Everywhere(pipeline.session, options.runtime.timeout)
        if options.on_pipeline is not None:
            options.on_pipeline(pipeline)
        return pipeline, is_first


class _OnePass(_Pipelined):
    """A function that returns its loss: each call is a step."""

    _steps = 0

    def __call__(self, *arguments: Any) -> tuple[Tensor]:
        """Run a step on the graph's inputs, in order."""
        with without_autocast():  # an autocast around the call is part of the graph, which enters it
            return self._run(arguments)

    def _run(self, arguments: Sequence[Any]) -> tuple[Tensor]:
        inputs = self._inputs(arguments)
        pipeline, is_first = self._pipeline_for(inputs, Pipeline)
        whole = self._loss_of_whole_batch(inputs) if is_first else None
        self._pass_on_state(pipeline, arguments)
        pipeline.session.go_on_at(self._steps)  # random numbers depend on the step of the training, not on the pipeline
        loss = pipeline.step(inputs)
        self._steps += 1
        if whole is not None and looks_like_sum(whole, loss, self._options.microbatches):
            raise CaptureError(
                f"the loss of the whole batch is {whole:g} and the mean of its microbatches' losses {loss:g}: expected a mean "
                "over the rows, so that these are about equal; this one looks like a sum: divide it by the number of rows"
            )
        gradients = self._take_gradients(pipeline)
        self._take_buffers(pipeline)
        parameters = [arguments[self._model.state[name]] for name in gradients]
        return (_Deliver.apply(loss, list(gradients.values()), *parameters),)  # pyright: ignore[reportReturnType]

    def _loss_of_whole_batch(self, inputs: tuple[Tensor, ...]) -> Tensor:
        """Return the loss as the uncompiled function would, except for random numbers. Nothing changes."""
        buffers = {name: buffer.clone() for name, buffer in self._model.named_buffers()}
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            (loss,) = functional_call(self._model, buffers, inputs)
            return loss


class _Deliver(torch.autograd.Function):
    """The step's loss as an autograd function. Its gradients are known already and are only scaled."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: list[Tensor], *_: Tensor) -> Tensor:
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator's
        (above,) = grad_outputs
        return None, None, *(gradient * above for gradient in ctx.gradients)


class _TwoPass(_Pipelined):
    """A function that returns no loss. Each call runs the forward pass; autograd later starts the backward pass."""

    _with_loss = False

    def __call__(self, *arguments: Any) -> tuple[Tensor, ...]:
        """Run the forward pass on the graph's inputs, in order."""
        inputs = self._inputs(arguments)
        parameters = [arguments[self._model.state[name]] for name, _ in self._model.named_parameters()]
        with without_autocast():  # an autocast around the call is part of the graph, which enters it
            pipeline, _ = self._pipeline_for(inputs, partial(TwoPassPipeline))
            self._pass_on_state(pipeline, arguments)
            outputs, call = pipeline.forward([one.detach() for one in inputs], [*parameters, *inputs])
            self._take_buffers(pipeline)
        return _Later.apply(self, pipeline, call, outputs, *parameters, *inputs)  # pyright: ignore[reportReturnType]

    def backward(self, pipeline: TwoPassPipeline, call: Call, tangents: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        """Return the gradients of the function's parameters, None for those of other ranks, and of its inputs."""
        wanted = [one for one, has_gradient in zip(tangents, pipeline.differentiable, strict=True) if has_gradient]
        with without_autocast():  # a backward pass runs under its forward pass's autocast
            of_inputs = iter(pipeline.backward(call, wanted))
        of_parameters = self._take_gradients(pipeline)
        return (
            *(of_parameters.get(name) for name, _ in self._model.named_parameters()),
            *(next(of_inputs) if has_gradient else None for has_gradient in pipeline.differentiated),
        )


class _Later(torch.autograd.Function):
    """The outputs as an autograd function, whose backward pass is the pipeline's."""

    @staticmethod
    def forward(
        ctx: Any, phases: _TwoPass, pipeline: TwoPassPipeline, call: Call, outputs: tuple[Tensor, ...], *_: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.run = partial(phases.backward, pipeline, call)
        constant = (one for one, has_gradient in zip(outputs, pipeline.differentiable, strict=True) if not has_gradient)
        ctx.mark_non_differentiable(*constant)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator's
        return None, None, None, None, *ctx.run(grad_outputs)
