"""Capture: a model and one microbatch of example inputs become one flat FX graph.

The graph is torch.export's training graph: ATen ops in the order of execution, before autograd and before any decomposition.
State enters it as inputs, so it contains no parameters. The user's model is only read.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from types import FunctionType
from typing import Any, Final

import torch
from torch import Tensor, fx, nn
from torch.autograd.function import BackwardCFunction
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from adaptra.errors import CaptureError
from adaptra.graph.capture.as_eager import as_eager
from adaptra.graph.capture.batch import InputFormat, LossFunction, OutputFormat, TargetFormat, loss_of
from adaptra.graph.capture.collectives import refuse_collectives, refusing_collectives
from adaptra.graph.capture.eager_ops import EagerOp, eager_ops
from adaptra.graph.capture.hooks import hiding_wrappers, refusing_tensor_hooks
from adaptra.graph.capture.inputs_kept import copy_what_changes
from adaptra.graph.capture.replaced_buffers import following_replaced_buffers, read_before_replaced, refuse_cumulative_averages
from adaptra.graph.capture.transforms import refusing_gradients
from adaptra.graph.effects.effects import Effects
from adaptra.graph.effects.lines import user_line
from adaptra.graph.effects.plain_tensors import Watched, copy_of
from adaptra.graph.effects.snapshot import kept
from adaptra.graph.ops.autocast import noting_autocast
from adaptra.graph.ops.checkpoints import numbering_checkpoints
from adaptra.graph.ops.ops import changes_in_place, reads_values, results_of


@dataclass(frozen=True, slots=True)
class StateNames:
    """The names of a model's state.

    Attributes:
        parameters, buffers: One name of each tensor: the first, if it has several.
        aliases: Every name to the tensor's name in ``parameters`` or ``buffers``.
        trainable: The parameters that require a gradient.
        saved: Every name in the model's state_dict, as its hooks make it, to the tensor's name.
    """

    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    aliases: Mapping[str, str]
    trainable: frozenset[str]
    saved: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class FlatGraph:
    """One graph of the whole model and its loss.

    Attributes:
        module: The module of the graph and of the submodules of its higher-order ops, without parameters.
        state: Placeholder to the name of its state.
        constants: Placeholder to its tensor, a constant in the model's code.
        inputs, targets: Placeholders of the flat inputs and targets.
        loss: The node of the loss, or None.
        outputs: The nodes of the model's outputs, flat; empty for a training graph with a loss.
        placements: Node to the qualified names of the modules whose forward it runs in, outermost first.
        beside: The nodes of the model's outputs of a training graph with a loss, flat. Only a step that is asked for them
            returns them.
        aside: The nodes that only these outputs need. They belong to no stage.
    """

    module: fx.GraphModule
    state: Mapping[fx.Node, str]
    constants: Mapping[fx.Node, Tensor]
    inputs: tuple[fx.Node, ...]
    targets: tuple[fx.Node, ...]
    loss: fx.Node | None
    outputs: tuple[fx.Node, ...]
    placements: Mapping[fx.Node, tuple[str, ...]]
    beside: tuple[fx.Node, ...] = ()
    aside: frozenset[fx.Node] = frozenset()

    @property
    def results(self) -> tuple[fx.Node, ...]:
        """The nodes that the graph returns. The backward pass of a training graph starts from them."""
        return self.outputs if self.loss is None else (self.loss, *self.outputs)


def state_names(model: nn.Module) -> StateNames:
    """Name every parameter and buffer of a model once."""
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    for name, tensor in (parameters | buffers).items():
        aliases[name] = first.setdefault(id(tensor), name)
    saved: dict[str, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in first or name in aliases:  # a hook may have replaced a tensor by a copy
            saved[name] = first[id(tensor)] if id(tensor) in first else aliases[name]
    return StateNames(
        parameters=tuple(name for name in parameters if aliases[name] == name),
        buffers=tuple(name for name in buffers if aliases[name] == name),
        aliases=aliases,
        trainable=frozenset(
            name for name, parameter in parameters.items() if parameter.requires_grad and aliases[name] == name
        ),
        saved=saved,
    )


def capture(
    model: nn.Module,
    inputs: tuple[Tensor, ...],
    input_format: InputFormat,
    targets: tuple[Tensor, ...],
    target_format: TargetFormat,
    loss: LossFunction | None,
    *,
    names: StateNames,
    evaluation: bool,
    with_loss: bool = True,
) -> tuple[FlatGraph, OutputFormat]:
    """Capture a model and its loss as one graph.

    Args:
        model: The user's model. Its mode is restored, and nothing else of it changes. A training capture keeps the modules' own
            modes if the model is in training mode. Otherwise it sets training mode during the capture.
        inputs, input_format: One microbatch of the model's inputs.
        targets, target_format: One microbatch of targets.
        loss: Called as ``loss(outputs, targets)``; None if the model returns the loss itself.
        names: The names of the model's state.
        evaluation: Whether to capture in evaluation mode and with the model's outputs among the results.
        with_loss: Whether there is a loss. Without one the results of a training graph too are the model's outputs.

    Returns:
        The graph, and the format of the model's outputs.

    Raises:
        CaptureError: The model can't be captured. The text names the module and the line of the user's model, with torch's
            reason. Torch's own error is chained.
    """
    formats: list[OutputFormat] = []
    step = _ModelWithLoss(model, input_format, target_format, loss, with_loss, formats, evaluation=evaluation)
    examples = (tuple(tensor.detach() for tensor in inputs), tuple(tensor.detach() for tensor in targets))
    where = _place_in(model, capture)
    effects = step.watch(where)

    def export() -> torch.export.ExportedProgram:
        with (
            _mode(model, evaluation),
            numbering_checkpoints(),
            noting_autocast(),
            refusing_tensor_hooks(),
            hiding_wrappers(),
            refusing_collectives(where, is_captured=True),
        ):
            refuse_cumulative_averages(model.named_modules())
            try:
                with refusing_gradients(where):
                    return torch.export.export(step, examples, strict=False)
            except CaptureError:
                raise
            except Exception as error:
                raise CaptureError(_explain(model, error)) from error

    exported = effects.settled(export)
    refuse_collectives(exported.graph_module.graph.nodes)
    return _flat_graph(exported, names, len(inputs), with_loss, evaluation), formats[0]


def list_eager_ops(
    model: nn.Module,
    inputs: tuple[Tensor, ...],
    input_format: InputFormat,
    targets: tuple[Tensor, ...],
    target_format: TargetFormat,
    loss: LossFunction | None,
    *,
    names: StateNames,
    with_loss: bool = True,
) -> tuple[EagerOp, ...]:
    """List the ops that eager torch runs for the training step that :func:`capture` captures; checkpointed regions once."""
    step = _ModelWithLoss(model, input_format, target_format, loss, with_loss, [], with_outputs=not with_loss)
    state = dict(step.named_parameters(remove_duplicate=False)) | dict(step.named_buffers(remove_duplicate=False))

    def leaf(tensor: Tensor) -> Tensor:
        # A copy, as the example is real and the model may change it.
        return copy_of(tensor).requires_grad_(tensor.requires_grad and not with_loss)

    examples = tuple(map(leaf, inputs)), tuple(map(leaf, targets))
    with _mode(model, evaluation=False), numbering_checkpoints(), hiding_wrappers(), kept(model, loss):
        return eager_ops(step, state, [_MODEL + name for name in names.trainable], examples, _place_in(model, eager_ops))


def _place_in(model: nn.Module, within: FunctionType) -> Callable[[], str]:
    """Return a function that returns the module and line of the model that run now, ``within`` a call of this function."""
    named = {id(module): name for name, module in model.named_modules()}

    def place() -> str:
        # No further out: a look at the locals of the user's own functions would keep alive objects that they delete.
        inside = takewhile(lambda one: one[0].f_code is not within.__code__, traceback.walk_stack(None))
        found = user_line(inside, named)
        return "in the loss" if found is None else f"{found[0]} at {found[1]}"

    return place


class _ModelWithLoss(nn.Module):
    """A model followed by its loss, called with flat tensors only."""

    def __init__(
        self,
        model: nn.Module,
        inputs: InputFormat,
        targets: TargetFormat,
        loss: LossFunction | None,
        with_loss: bool,
        formats: list[OutputFormat],
        *,
        evaluation: bool = False,
        with_outputs: bool = True,
    ) -> None:
        super().__init__()
        self.model = model
        # A loss that is a module is registered, so that export finds its state; any other callable is only called.
        self.loss = loss
        self._inputs = inputs
        self._targets = targets
        self._evaluation = evaluation
        self._with_loss = with_loss
        self._with_outputs = with_outputs
        # A plain list, since export restores the attributes of a module afterwards.
        self._formats = formats
        self._watched: Watched | None = None

    def watch(self, where: Callable[[], str]) -> Effects:
        """Have the effects of the model's code looked at. ``where`` returns the module and line that run now."""
        state = {**dict(self.named_parameters(remove_duplicate=False)), **dict(self.named_buffers(remove_duplicate=False))}
        effects = Effects(self.model, self.loss, frozenset(state))
        self._watched = Watched(effects, effects.before.plain_tensors(self.model, self.loss), where)
        return effects

    def forward(self, inputs: tuple[Tensor, ...], targets: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if self._watched is None:
            with as_eager(), following_replaced_buffers(self):
                return self._run(inputs, targets)
        with as_eager(self._watched.refuse_write), self._watched.effects.running(), following_replaced_buffers(self):
            results = self._run(inputs, targets)
        if not self._evaluation:
            self._watched.refuse_trained(results[:1] if self._with_loss else results)
        self._watched.effects.note()
        return results

    def _run(self, inputs: tuple[Tensor, ...], targets: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        outputs = self._inputs.call(self.model, inputs)
        results = [loss_of(outputs, self.loss, self._targets, targets)] if self._with_loss else []
        differentiated = len(results)
        if self._with_outputs:
            self._formats.append(OutputFormat(outputs))
            results += self._formats[-1].flatten(outputs)
        if not self._evaluation:
            _refuse_custom_gradients(results[:differentiated] if self._with_loss else results)
        return tuple(results)


def _refuse_custom_gradients(results: Sequence[Tensor]) -> None:
    """Refuse an autograd.Function. A graph of ops can't contain its backward method, and torch would omit it silently."""
    waiting: list[Any] = [one.grad_fn for one in results]
    seen: set[Any] = {None}
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        function: Any = getattr(type(node), "_forward_cls", type(node))
        # torch.library's register_autograd makes one too, but for an op, which the graph does contain.
        if isinstance(node, BackwardCFunction) and function.forward.__module__ != "torch._library.autograd":
            mode = get_proxy_mode()
            if mode is not None:  # a collective within it is the better reason
                refuse_collectives(mode.tracer.graph.nodes)
            code = function.forward.__code__
            raise CaptureError(
                f"{function.__qualname__} at {code.co_filename}:{code.co_firstlineno}: the model calls a "
                "torch.autograd.Function, whose backward method a graph can't hold: expected ops of torch; make it an op with "
                "torch.library.custom_op and register_autograd"
            )
        waiting += [following for following, _ in node.next_functions]


@contextmanager
def _mode(model: nn.Module, evaluation: bool) -> Generator[None]:
    before = [(module, module.training) for module in model.modules()]
    if evaluation:
        model.eval()
    elif not model.training:
        model.train()
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


def _flat_graph(
    exported: torch.export.ExportedProgram, names: StateNames, inputs: int, with_loss: bool, evaluation: bool
) -> FlatGraph:
    graph, signature = exported.graph_module.graph, exported.graph_signature
    unexpected = [spec for spec in signature.output_specs if spec.kind is not OutputKind.USER_OUTPUT]
    assert not unexpected, f"a training graph has effects as ops, not as outputs: {unexpected}"
    placeholders = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    state: dict[fx.Node, str] = {}
    constants: dict[fx.Node, Tensor] = {}
    users: list[fx.Node] = []
    for spec in signature.input_specs:
        node = placeholders[spec.arg.name]
        target = spec.target or ""
        match spec.kind:
            case InputKind.PARAMETER | InputKind.BUFFER if target.startswith(_MODEL):
                state[node] = names.aliases[target.removeprefix(_MODEL)]
            case InputKind.PARAMETER | InputKind.BUFFER:
                constants[node] = _loss_state(exported, target)
            case InputKind.CONSTANT_TENSOR:
                constants[node] = _tensor(target, exported.constants[target])
            case InputKind.USER_INPUT:
                users.append(node)
            case _:
                kept = type(exported.constants.get(target)).__name__
                what = f"{kept}, as of generator=" if kept == "Generator" else spec.kind.name.lower()
                raise CaptureError(
                    f"{target}: the model keeps a {what}: expected tensors only; random ops draw by the seed, step and "
                    "microbatch without a generator"
                )
    _forget_reads(graph)
    copy_what_changes(graph, users)
    read_before_replaced(graph, state)
    results = results_of(graph)
    trains = with_loss and not evaluation
    return FlatGraph(
        module=exported.graph_module,
        state=state,
        constants=constants,
        inputs=tuple(users[:inputs]),
        targets=tuple(users[inputs:]),
        loss=results[0] if with_loss else None,
        outputs=() if trains else results[1:] if with_loss else results,
        placements={node: _placement(node) for node in graph.nodes},
        beside=results[1:] if trains else (),
        aside=_needless(graph, results[0]) if trains else frozenset(),
    )


def _needless(graph: fx.Graph, result: fx.Node) -> frozenset[fx.Node]:
    """Return the nodes that a graph with this result alone would not have, as torch removes them."""
    copied: dict[fx.Node, fx.Node] = {}
    alone = fx.Graph()
    alone.graph_copy(graph, copied)
    alone.output(copied[result])
    alone.eliminate_dead_code(lambda node: _acts(graph.owning_module, node))
    left = set(alone.nodes)
    return frozenset(node for node, copy in copied.items() if node.op == "call_function" and copy not in left)


def _acts(owner: Any, node: fx.Node) -> bool:
    """Return whether a node does more than return a result. A region without gradients does so if an op within it does."""
    if node.is_impure():
        return True
    inner = [getattr(owner, str(one.target), None) for one in node.all_input_nodes if one.op == "get_attr"]
    graphs = [one for one in inner if isinstance(one, fx.GraphModule)]
    return any(
        changes_in_place(one.target) or _acts(held, one)
        for held in graphs
        for one in held.graph.nodes
        if one.op == "call_function"
    )


def _forget_reads(graph: fx.Graph) -> None:
    """Remove reads of constants, whose values the model's code has already used, and nodes that only such reads need."""
    needless = {node for node in graph.nodes if reads_values(node.target)}
    for node in reversed(graph.nodes):
        if node in needless and node.op == "call_function" and not node.users and not changes_in_place(node.target):
            needless.update(node.all_input_nodes)
            graph.erase_node(node)


_MODEL: Final = "model."
_CALL_NUMBER: Final = re.compile(r"@\d+")


def _loss_state(exported: torch.export.ExportedProgram, target: str) -> Tensor:
    tensor = _tensor(target, exported.state_dict.get(target, exported.constants.get(target)))
    if tensor.requires_grad:
        raise CaptureError(
            f"the loss function has a trainable parameter {target.removeprefix('loss.')!r}: expected all trainable "
            "parameters in "
            "the model; let the model compute this loss and leave out loss="
        )
    return tensor.detach()


def _tensor(name: str, value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        raise CaptureError(f"{name}: the model keeps a {type(value).__name__}: expected tensors only")
    return value


def _placement(node: fx.Node) -> tuple[str, ...]:
    paths = (_CALL_NUMBER.sub("", str(path)) for path, _ in node.meta.get("nn_module_stack", {}).values())
    return tuple(path.removeprefix(_MODEL) for path in paths if path.startswith(_MODEL))


def _explain(model: nn.Module, error: BaseException) -> str:
    names = {id(module): name for name, module in model.named_modules()}
    place: tuple[str, str] | None = None
    cause: BaseException | None = error
    # Torch wraps errors in its own, so the frames of the user's code may only be in a cause.
    while cause is not None and place is None:
        place = _user_frame(cause, names)
        cause = cause.__cause__ or cause.__context__
    reason = next((line.strip() for line in str(error).splitlines() if line.strip()), "no reason given")
    where = "" if place is None else f"{place[0]} at {place[1]}: "
    return (
        f"{where}the model can't become one graph: {type(error).__name__}: {reason[:300]}; expected a model that torch.export "
        "can capture, without control flow that depends on the values of tensors"
    )


def _user_frame(error: BaseException, names: Mapping[int, str]) -> tuple[str, str] | None:
    return user_line(reversed([*traceback.walk_tb(error.__traceback__)]), names)
