"""Compilation of a list of modules into stages that run them, without capture. A run of the example shows the messages."""

from __future__ import annotations

import copy
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from adaptra.errors import AdaptraError, CaptureError, PartitionError
from adaptra.graph.capture.batch import InputFormat, LossFunction, OutputFormat, TargetFormat
from adaptra.graph.capture.capture import StateNames, state_names
from adaptra.graph.capture.collectives import refusing_collectives
from adaptra.graph.compile import CompiledStages
from adaptra.graph.effects.plain_tensors import refuse_trained
from adaptra.graph.effects.snapshot import Snapshot
from adaptra.graph.modes import as_for_training
from adaptra.graph.ops.layout import Layout
from adaptra.graph.ops.specs import MessageSpec, TensorSpec
from adaptra.graph.ops.work import CountWork
from adaptra.graph.stage_devices import moved, stage_devices
from adaptra.graph.stages.stage_graphs import NOTHING_RANDOM
from adaptra.graph.stages.stage_modules import Boundary, Differentiable, EvalModule, ModuleCall, StageModule
from adaptra.graph.stages.stages import Flops, Peaks
from adaptra.simulation.cut_points import CutPoint, CutPoints


@as_for_training()
def compile_modules(
    modules: nn.ModuleList,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    loss: LossFunction | None = None,
    targets: Any = None,
) -> CompiledStages:
    """Make a pipeline of modules, one per stage. No reference to their parameters and buffers is kept.

    The example runs with copies of the buffers, so the modules do not change.

    Args:
        modules: The stages. Each is called with the result of the one before; a tuple gives several arguments.
        args, kwargs: One microbatch of the first module's inputs.
        loss: Called as ``loss(outputs, targets)`` with the last module's result; None if that is or contains the loss.
        targets: One microbatch of targets.

    Raises:
        CaptureError: A module fails with the example, returns a value that can't be sent, or can't be copied. The text names
            the stage.
        PartitionError: Two stages share a buffer.
        BatchError: The example is not a call that the first module accepts.
    """
    inputs, target_format = InputFormat(modules[0], args, kwargs), TargetFormat(targets)
    flat = tuple(inputs.flatten(args, kwargs))
    example = _Example(
        modules=modules,
        names=state_names(modules),
        devices=stage_devices(modules, flat[0].device if flat else torch.device("cpu")),
        loss=loss,
        inputs=inputs,
        targets=target_format,
        flat_inputs=flat,
        flat_targets=tuple(target_format.flatten(targets)),
    )
    holders = example.holders()
    train, work = example.train(holders)
    evaluation, outputs = example.evaluate()
    cut_points = tuple(CutPoint(str(stage.index), stage.input_bytes, sum(work[: stage.index])) for stage in train[1:])
    trained = train[-1].output_format
    assert trained is not None, "the last stage has the model's outputs"
    formats = (inputs, target_format, outputs, trained)
    return CompiledStages.of(example.names, holders, train, evaluation, formats, CutPoints(cut_points, (), sum(work)))


@dataclass(frozen=True, slots=True)
class _Example:
    """The modules, and the example microbatch that they run."""

    modules: nn.ModuleList
    names: StateNames
    devices: tuple[torch.device, ...]
    loss: LossFunction | None
    inputs: InputFormat
    targets: TargetFormat
    flat_inputs: tuple[Tensor, ...]
    flat_targets: tuple[Tensor, ...]

    def holders(self) -> dict[str, tuple[int, ...]]:
        """Return the stages of each parameter and buffer."""
        users: dict[str, set[int]] = {}
        for alias, name in self.names.aliases.items():
            users.setdefault(name, set()).add(int(alias.split(".")[0]))
        for name in self.names.buffers:
            if len(users[name]) > 1:
                raise PartitionError(
                    f"{name}: stages {sorted(users[name])} share this buffer: expected each buffer in one stage, which alone "
                    "may change it"
                )
        return {name: tuple(sorted(stages)) for name, stages in users.items()}

    def train(self, holders: Mapping[str, tuple[int, ...]]) -> tuple[tuple[StageModule, ...], list[float]]:
        """Return the training stages, and the work of F on each, as counted by :mod:`adaptra.graph.ops.work`."""
        state = self._state()
        stages: list[StageModule] = []
        left: list[Differentiable] = []
        work: list[float] = []
        takes: InputFormat | Boundary = self.inputs
        travelling, specs = self.flat_inputs, self.inputs.specs
        for index in range(len(self.modules)):
            travelling = moved(travelling, self.devices[index])
            with _naming(index):
                call, targets = self._call(index, takes, training=True), self._targets_of(index)
                stage, returns = self._stage(call, state, travelling, specs, holders)
                kept = _SavedBytes(state.values())
                with kept.counted(), CountWork() as counted:
                    travelling, saved = stage.run_forward(state, travelling, NOTHING_RANDOM, targets)
            flops = Flops(counted.total.flops, 0, 0)
            stages.append(replace(stage, flops=flops, kept_after_forward=kept.bytes + stage.input_bytes))
            left.append(saved)
            work.append(counted.total.cost)
            takes, specs = returns or takes, stage.outputs
        loss_gradients = [torch.ones_like(one) for one, spec in zip(travelling, specs, strict=True) if spec.requires_grad]
        if not loss_gradients:
            raise CaptureError(
                "the loss depends on no trainable parameter: expected one at least; requires_grad_(True) makes a parameter one"
            )
        return self._with_gradients(stages, left, loss_gradients), work

    def _with_gradients(
        self, stages: Sequence[StageModule], left: Sequence[Differentiable], gradients: Sequence[Tensor]
    ) -> tuple[StageModule, ...]:
        """Return the stages completed by the results of a backward pass, which runs from the last stage to the first."""
        completed: list[StageModule] = []
        layouts, specs = _travelling(gradients)
        for stage, saved in reversed(list(zip(stages, left, strict=True))):
            inputs, gradients = saved.inputs, moved(gradients, self.devices[stage.index])
            with _naming(stage.index), CountWork() as counted:
                arrived, of_parameters = saved.backward(gradients)
            gradients = [torch.zeros_like(one) if new is None else new for one, new in zip(inputs, arrived, strict=True)]
            received, specs_received = layouts, specs
            layouts, specs = _travelling(gradients)
            kept = sum(one.nbytes for one in of_parameters.values())
            # The temporary memory of autograd's ops is not known.
            peaks = Peaks(stage.kept_after_forward, stage.kept_after_forward + kept, kept)
            completed.append(
                replace(
                    stage,
                    grad_inputs=specs,
                    grad_outputs=specs_received,
                    flops=replace(stage.flops, input_grad=counted.total.flops),
                    kept_after_input_grad=kept,
                    peaks=peaks,
                    _grad_inputs=layouts,
                    _grad_outputs=received,
                )
            )
        return tuple(reversed(completed))

    def evaluate(self) -> tuple[tuple[EvalModule, ...], OutputFormat]:
        """Return the evaluation stages, and the format of the last module's result."""
        state = self._state()
        stages: list[EvalModule] = []
        takes: InputFormat | Boundary = self.inputs
        travelling, specs = self.flat_inputs, self.inputs.specs
        for index in range(len(self.modules)):
            travelling = moved(travelling, self.devices[index])
            with _naming(index), torch.no_grad():
                call = self._call(index, takes, training=False)
                returned = call.run(state, call.unpacked(travelling), NOTHING_RANDOM)
                targets = _specs(self._targets_of(index))
                if index == len(self.modules) - 1:
                    outputs = OutputFormat(returned)
                    loss = _specs([call.loss_of(returned, self.flat_targets)])
                    made = _specs(outputs.flatten(returned))
                    stages.append(EvalModule(index, specs, made, loss, targets, call, None, outputs))
                    return tuple(stages), outputs
                returns = Boundary.of(returned)
                travelling = returns.pack(returns.tensors(returned))
            stages.append(EvalModule(index, specs, _specs(travelling), (), targets, call, returns))
            takes, specs = returns, stages[-1].outputs
        raise AssertionError("there is a last stage")

    def _stage(
        self,
        call: ModuleCall,
        state: Mapping[str, Tensor],
        inputs: tuple[Tensor, ...],
        specs: MessageSpec,
        holders: Mapping[str, tuple[int, ...]],
    ) -> tuple[StageModule, Boundary | None]:
        """Return a training stage, as far as a forward run determines it, and the boundary after it."""
        index, names = call.index, self.names
        parameters = tuple(name for name in names.parameters if index in holders[name])
        with torch.enable_grad():
            returned, left = call.run_differentiable(state, parameters, inputs, specs, NOTHING_RANDOM)
            form = None
            if index == len(self.modules) - 1:
                returns, results = None, (call.loss_of(returned, self.flat_targets),)
                form = OutputFormat(returned)
            else:
                returns = Boundary.of(returned)
                results = returns.pack(returns.tensors(returned))
        own = {id(one) for one in (*left.parameters.values(), *left.inputs)}
        refuse_trained(results, own, Snapshot(call.module, self.loss))
        outputs = tuple(TensorSpec(tuple(one.shape), one.dtype, one.requires_grad) for one in results)
        trainable = tuple(name for name in parameters if name in names.trainable)
        stage = StageModule(
            index=index,
            parameters=parameters,
            buffers=tuple(name for name in names.buffers if index in holders[name]),
            trainable=trainable,
            contributions=trainable,
            inputs=specs,
            outputs=outputs,
            targets=_specs(self._targets_of(index)),
            grad_inputs=(),
            grad_outputs=(),
            flops=Flops(0, 0, 0),
            parameter_bytes=sum(state[name].nbytes for name in parameters),
            kept_after_forward=0,
            kept_after_input_grad=0,
            peaks=Peaks(0, 0, 0),
            _call=call,
            _returns=returns,
            _grad_inputs=(),
            _grad_outputs=(),
            output_format=form,
        )
        return stage, returns

    def _call(self, index: int, takes: InputFormat | Boundary, *, training: bool) -> ModuleCall:
        module = _without_tensors(self.modules[index])
        # As for a captured model: a part in evaluation mode of a model in training mode stays in evaluation mode.
        if not training:
            module.eval()
        elif not module.training:
            module.train()
        own = {alias.split(".", 1)[1]: name for alias, name in self.names.aliases.items() if alias.startswith(f"{index}.")}
        first = {name: alias for alias, name in reversed(own.items())}
        state = {alias: name for name, alias in first.items()}
        return ModuleCall(index, module, state, takes, self.loss, self.targets)

    def _state(self) -> dict[str, Tensor]:
        """Return the parameters and copies of the buffers."""
        parameters = dict(self.modules.named_parameters())
        return parameters | {name: buffer.detach().clone() for name, buffer in self.modules.named_buffers()}

    def _targets_of(self, index: int) -> tuple[Tensor, ...]:
        return self.flat_targets if index == len(self.modules) - 1 else ()


class _SavedBytes:
    """Counts the bytes that autograd saves, without those of the given state."""

    def __init__(self, state: Iterable[Tensor]) -> None:
        self._known = {tensor.untyped_storage().data_ptr() for tensor in state}
        self._found: dict[int, int] = {}

    @property
    def bytes(self) -> int:
        return sum(self._found.values())

    @contextmanager
    def counted(self) -> Generator[None]:
        with saved_tensors_hooks(self._keep, lambda tensor: tensor):
            yield

    def _keep(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._known:
            self._found[storage.data_ptr()] = storage.nbytes()
        return tensor


def _without_tensors(module: nn.Module) -> nn.Module:
    """Return a copy of a module with tensors of the meta device instead of its parameters and buffers."""
    copied: dict[int, Any] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        empty = torch.empty_like(tensor, device="meta")
        is_parameter = isinstance(tensor, nn.Parameter)
        copied[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
    return copy.deepcopy(module, copied)


@contextmanager
def _naming(index: int) -> Generator[None]:
    """Add the stage's index to any error. A collective of its module is one."""
    try:
        with refusing_collectives(lambda: "its module", is_captured=False):
            yield
    except CaptureError as error:
        raise CaptureError(f"stage {index}: {error}") from error
    except AdaptraError:
        raise
    except Exception as error:
        raise CaptureError(
            f"stage {index}: its module failed with the example: {type(error).__name__}: {error}: expected modules of which "
            "each takes what the one before returns, a tuple as its arguments"
        ) from error


def _travelling(gradients: Sequence[Tensor]) -> tuple[tuple[Layout, ...], MessageSpec]:
    """Return the layouts and specs of gradients in messages."""
    layouts = tuple(map(Layout.with_gaps, gradients))
    return layouts, tuple(layout.spec(one, False) for layout, one in zip(layouts, gradients, strict=True))


def _specs(tensors: Sequence[Tensor]) -> MessageSpec:
    return tuple(TensorSpec(tuple(one.shape), one.dtype) for one in tensors)
