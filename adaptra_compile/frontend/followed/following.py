"""The compilation of a model that has changed: the same cut, the same state, other ops or other trained parameters."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from adaptra.errors import AdaptraError, CaptureError, OptionError, PipelineError
from adaptra.frontend.arguments.wrapped_models import refuse_wrapped
from adaptra.frontend.followed.marks import shown
from adaptra.frontend.followed.same_stages import are_same, evaluate_the_same
from adaptra.frontend.followed.watch import Watch
from adaptra.frontend.shapes.recompile import Recompile
from adaptra.graph import CompiledStages, compile_stages
from adaptra.graph.capture.capture import state_names
from adaptra.graph.capture.skeleton import skeleton
from adaptra.graph.compile_modules import compile_modules
from adaptra.graph.evaluation_only import compile_evaluation
from adaptra.graph.ops.specs import MessageSpec
from adaptra.graph.training_only import compile_training

_OFTEN: Final = 3
"""Changes in this number of steps in a row are worth a warning."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ChangedStages:
    """What a changed model is compiled to.

    Attributes:
        stages: The stages.
        states: The state of each rank of this process.
        is_replaced: Whether a parameter or buffer is another tensor than before.
    """

    stages: CompiledStages
    states: list[Mapping[str, Tensor]]
    is_replaced: bool


class Following:
    """Notices changes of a model and its loss, and compiles them anew.

    Args:
        model: The model; a ModuleList of the stages if they were given as a list.
        loss: The user's loss, or None.
        stage_loss: The loss that stages compute of it.
        empty_on: The device of the model's tensors that are on the meta device here; None if there are none.
        is_list: Whether the model is a list of stages.
        keeps: Whether to keep the model, else it is held weakly.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[..., Any] | None,
        stage_loss: Callable[..., Any] | None,
        empty_on: torch.device | None,
        *,
        is_list: bool,
        keeps: bool,
    ) -> None:
        self._watch = Watch(model, loss, is_list=is_list, keeps=keeps)
        self._loss = stage_loss
        self._empty_on = empty_on
        self._is_list = is_list
        self._held: tuple[Tensor, ...] = ()
        self._flags: list[bool] = []
        self._skeleton: Recompile | None = None
        self._last_step = self._in_a_row = 0

    def model(self) -> nn.Module | None:
        """Return the model, or None if it is gone."""
        return self._watch.model()

    def changed(self, compiled: CompiledStages, states: Sequence[Mapping[str, Tensor]], *, evaluates: bool) -> str | None:
        """Return what has changed since the last compilation, for people; None if nothing has.

        Args:
            compiled: The pipeline's stages.
            states: The state of each rank of this process.
            evaluates: Whether the stages are about to evaluate. Then the modes of modules don't count.

        Raises:
            PipelineError: The model, or a whole stage of a list, was set to evaluation mode, and a step is to train it.
        """
        held = tuple(one for state in states for one in state.values())
        if len(held) != len(self._held) or any(map(_differs, held, self._held)):
            self._held, self._flags = held, self._flags_of(compiled, states)
        switched = [one.requires_grad for one in held] != self._flags
        changes = self._watch.changes(evaluates=evaluates)
        if not changes and not switched:
            return None
        left = self._watch.left_training()
        if left and not evaluates:
            raise PipelineError(
                f"{'the model' if left == [''] else f'stage {left[0]}'} was set to evaluation mode after adaptra.compile: "
                "expected training mode in a step; call train() of it, or eval() of the parts alone that stay as they are"
            )
        for name, value in self._switched(compiled, states).items():
            changes.setdefault(name, f"requires_grad is {value}")
        return shown(changes)

    def _flags_of(self, compiled: CompiledStages, states: Sequence[Mapping[str, Tensor]]) -> list[bool]:
        trained = _trained(compiled)
        return [name in trained for state in states for name in state]

    def _switched(self, compiled: CompiledStages, states: Sequence[Mapping[str, Tensor]]) -> dict[str, bool]:
        """Return whether parameters require a gradient now, by name, of those of which any copy differs from before."""
        known = _trained(compiled)
        switched = {compiled.aliases.get(name, name): value for name, value in self._watch.switched().items()}
        for state in states:
            switched |= {name: one.requires_grad for name, one in state.items() if one.requires_grad is not (name in known)}
        return switched

    def compiled(
        self,
        changes: str,
        before: CompiledStages,
        others: Sequence[CompiledStages],
        states: Sequence[Mapping[str, Tensor]],
        placed: Sequence[Sequence[int]],
    ) -> ChangedStages | None:
        """Compile the model as it is now; return None if this gives the same stages, of all shapes.

        Args:
            changes: What has changed, for errors.
            before: The stages.
            others: The stages of other shapes.
            states: The state of each rank of this process.
            placed: The stages of each of these ranks.

        Raises:
            CaptureError: The changed model can't be compiled, or not with the pipeline's state. Nothing has changed then.
        """
        try:
            switched = self._switched(before, states)
            model = self._prepared(before, states, switched)
            replaced = {before.aliases[name]: one for name, one in self._watch.replaced().items()}
            own = self._stages(model, before)
            memory = self._watch.addresses()
            if not switched and not replaced and are_same(before, own, memory):
                trained = (are_same(one, self._stages(model, one), memory) for one in others if one.trains)
                evaluated = (self._evaluates_the_same(model, one, before, memory) for one in others if not one.trains)
                if all(trained) and all(evaluated):
                    return None
            return ChangedStages(own, _states(own, states, placed, replaced), bool(replaced))
        except AdaptraError as error:
            raise CaptureError(f"the model has changed since adaptra.compile ({changes}): {error}") from error

    def accepted(self, recompile: Recompile | None, step: int) -> Recompile | None:
        """Take the model as it is now for what is compiled; return what compiles it for other shapes.

        ``step`` is the number of the next step.
        """
        self._in_a_row = self._in_a_row + 1 if step - self._last_step <= 1 else 1
        self._last_step = step
        if self._in_a_row == _OFTEN:
            logger.warning(
                "the model or its loss changes with every step, and each change compiles anew: make the value a buffer or a "
                "tensor that is changed in place, such as self.beta.fill_(value), which is followed at no cost"
            )
        device, self._held = self._device, ()
        model = self._watch.model()
        if model is None:
            return recompile
        self._watch.accept()
        self._skeleton = None if recompile is None else Recompile.of(model, self._loss, device)
        return self._skeleton

    def keep_skeleton(self, recompile: Recompile | None) -> None:
        """Compile this if the model is gone."""
        self._skeleton = recompile

    def _prepared(
        self, before: CompiledStages, states: Sequence[Mapping[str, Tensor]], switched: Mapping[str, bool]
    ) -> nn.Module:
        """Return what is compiled, with the same flags in all copies of each parameter."""
        model = self._watch.model()
        if model is not None:
            refuse_wrapped(model, stages_as_given=self._is_list)
            _check_names(before, model)
        elif self._skeleton is None:
            raise OptionError("the model itself is gone: expected one that is kept, to be compiled anew")
        prepared = self._skeleton.model if model is None and self._skeleton is not None else model
        assert prepared is not None, "the model or its skeleton is there"
        own = dict(prepared.named_parameters(remove_duplicate=False))
        for name, value in switched.items():
            for one in (own.get(name), *(state.get(name) for state in states)):
                if one is not None:
                    one.requires_grad_(value)
        has_values = self._empty_on is None and not any(one.is_meta for one in own.values())
        return prepared if model is None or has_values else skeleton(prepared, self._device)

    def _evaluates_the_same(
        self, model: nn.Module, known: CompiledStages, like: CompiledStages, memory: Collection[int]
    ) -> bool:
        args, kwargs, targets = self._microbatch_of(known)
        loss = self._loss if known.with_loss else None
        try:
            now = compile_evaluation(model, args, kwargs, like=like, loss=loss, targets=targets, with_loss=known.with_loss)
        except (AdaptraError, RuntimeError):
            return False  # an evaluation of this shape, if there is another, says why
        return evaluate_the_same(known, now, memory)

    def _microbatch_of(self, compiled: CompiledStages) -> tuple[tuple[Any, ...], Mapping[str, Any], Any]:
        """Return the arguments and targets of a microbatch for which stages were compiled."""
        args, kwargs = compiled.inputs.arguments(_example(compiled.inputs.specs, self._device))
        return args, kwargs, compiled.targets.unflatten(_example(compiled.targets.specs, self._device))

    @property
    def _device(self) -> torch.device:
        """The device of what the stages hold."""
        return self._empty_on or next((one.device for one in self._held), torch.device("cpu"))

    def _stages(self, model: nn.Module, like: CompiledStages) -> CompiledStages:
        args, kwargs, targets = self._microbatch_of(like)
        if isinstance(model, nn.ModuleList) and self._is_list:
            return compile_modules(model, args, kwargs, loss=self._loss, targets=targets)
        if not like.evaluates:
            return compile_training(model, args, kwargs, like=like, loss=self._loss, targets=targets, same_state=False)
        return compile_stages(
            model,
            args,
            kwargs,
            stages=len(like.train),
            loss=self._loss if like.with_loss else None,
            targets=targets,
            like=like,
            same_state=False,
            with_loss=like.with_loss,
        )


def _differs(one: Tensor, other: Tensor) -> bool:
    return one is not other


def _trained(compiled: CompiledStages) -> frozenset[str]:
    """Return the names of the parameters that required a gradient, used or not, when the stages were compiled."""
    if compiled.captured is not None:
        return compiled.captured.names.trainable
    return frozenset(name for stage in compiled.train for name in stage.trainable)


def _example(specs: MessageSpec, device: torch.device) -> list[Tensor]:
    """Return tensors of these specs. A capture reads no values; modules that run get ones and the first class."""
    return [
        torch.ones(one.shape, dtype=one.dtype, device=device)
        if one.dtype.is_floating_point or one.dtype == torch.bool
        else torch.zeros(one.shape, dtype=one.dtype, device=device)
        for one in specs
    ]


def _check_names(before: CompiledStages, model: nn.Module) -> None:
    now = state_names(model).aliases
    other = sorted(name for name in now.keys() | before.aliases.keys() if now.get(name) != before.aliases.get(name))
    if other:
        raise CaptureError(
            f"it has other parameters or buffers now, or ties them in another way: {', '.join(other[:3])}: expected those of "
            "before; call adaptra.compile again, with a new optimizer"
        )


def _states(
    compiled: CompiledStages,
    states: Sequence[Mapping[str, Tensor]],
    placed: Sequence[Sequence[int]],
    replaced: Mapping[str, Tensor],
) -> list[Mapping[str, Tensor]]:
    """Return the state of each rank of this process: the tensors that it has, or those that have replaced them."""
    followed: list[Mapping[str, Tensor]] = []
    tied, taken = {one.name for one in compiled.tied}, set[int]()
    for state, stages in zip(states, placed, strict=True):
        own: dict[str, Tensor] = {}
        for name in (name for stage in stages for name in compiled.train[stage].state_names):
            if name in own:
                continue
            tensor = replaced.get(name, state.get(name))
            if tensor is None:
                raise CaptureError(
                    f"{name} is on another stage now: expected the stages of before; call adaptra.compile again, with a new "
                    "optimizer"
                )
            if name in tied and id(tensor) in taken:
                if name not in replaced:
                    raise CaptureError(
                        f"{name} was frozen at adaptra.compile, and several stages use it: expected one that is trained from "
                        "the begin, as each stage needs a copy that the optimizer has; call adaptra.compile again"
                    )
                tensor = nn.Parameter(tensor.detach().clone())
            taken.add(id(tensor))
            own[name] = tensor
        followed.append(own)
    return followed
