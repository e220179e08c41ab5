"""The build of a pipeline: capture and cut the model, plan, and start a worker for every rank of this process.

This is the path from a model to instruction lists. Its part after the cut is in :mod:`adaptra.frontend.planned.stage_planning`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from adaptra.errors import BatchError, CaptureError, LaunchError, OptionError, StateError
from adaptra.frontend.arguments.arguments import CompileArguments
from adaptra.frontend.arguments.placed_parts import devices_of
from adaptra.frontend.arguments.placing import STRAIGHT
from adaptra.frontend.arguments.shared_memory import refuse_shared_memory
from adaptra.frontend.arguments.shared_models import Sharing
from adaptra.frontend.followed.following import Following
from adaptra.frontend.losses.batch_look import BatchLook, example_weights
from adaptra.frontend.losses.rows_together import rows_together
from adaptra.frontend.planned.open_tails import check_within_step, require_tail_memory
from adaptra.frontend.planned.site_memory import require_site_memory
from adaptra.frontend.planned.stage_planning import PipelineSpec, PlannedPipeline
from adaptra.frontend.planned.worker_factory import close_all, open_recorders, states_with_guests
from adaptra.frontend.running.local_workers import LocalWorkers
from adaptra.frontend.running.session import Session
from adaptra.frontend.saved.model_names import ModelNames
from adaptra.frontend.shapes.recompile import Recompile
from adaptra.frontend.weights.materialise import is_empty, materialise
from adaptra.graph import compile_stages
from adaptra.graph.capture.batch import all_beside
from adaptra.graph.capture.collectives import refuse_context_parallel
from adaptra.graph.capture.skeleton import skeleton
from adaptra.graph.compile_modules import compile_modules
from adaptra.graph.effects.generators import generators_kept
from adaptra.graph.effects.plain_tensors import copy_of, kept_with_values
from adaptra.graph.inner_compiler import EAGER, prepare
from adaptra.graph.modes import as_for_training
from adaptra.graph.ops.autocast import refuse_autocast
from adaptra.graph.ops.weighted_loss import WeightedLoss
from adaptra.planning.synchrony.modes import Apart, WithinStep
from adaptra.program.placement import is_straight, stages_of
from adaptra.progress import Progress, log_progress, shown_progress
from adaptra.runtime.devices.determinism import set_deterministic
from adaptra.runtime.launch.agreement import agree_here, disagree
from adaptra.runtime.launch.carriers import DelegateSetup
from adaptra.runtime.launch.first_world import Wanted, sites_of
from adaptra.runtime.launch.free_memory import free_memory
from adaptra.runtime.launch.job import Launch
from adaptra.runtime.launch.launch import launch
from adaptra.runtime.worker.batch import example_microbatch, rows_of, split_rows
from adaptra.runtime.worker.stages.gradient_hooks import copy_is_hooked, is_hooked
from adaptra.runtime.worker.stages.loss_reduction import UNEQUAL, Reduction, refuse_number_of_items, refuse_sum, unequal_weights

logger = logging.getLogger(__name__)


@as_for_training()
def build(request: CompileArguments, args: tuple[Any, ...], targets: Any, kwargs: Mapping[str, Any]) -> Session:
    """Compile a model for batches like this one and start its workers.

    Args:
        request: The arguments of ``compile``.
        args, kwargs: The model's arguments, a whole batch.
        targets: The loss's targets, a whole batch, or None.

    Raises:
        As :func:`adaptra.frontend.api.compile`.
    """
    refuse_autocast("adaptra.compile")
    refuse_context_parallel("adaptra.compile")
    options = request.options
    empty_on = _device_of_empty(request, (args, targets, kwargs))
    devices, (args, targets, kwargs) = _beside(request, (args, targets, kwargs), empty_on)
    launched = launch(
        request.ranks,
        request.transport,
        request.facts(),
        options.timeout,
        device=devices[0],
        placement=request.placed,
        delegate=DelegateSetup(options.uses_delegate, options.addresses),
        wanted=Wanted(request.roles or request.replicas, request.survival, options.apart),
    )
    with ExitStack() as opened:
        opened.callback(launched.give_up)
        _check_contract(request, launched)
        spec = _spec(request, launched, devices, is_to_come=empty_on is not None)
        try:
            if options.deterministic:
                set_deterministic(devices[0])
            recorders = open_recorders(options, launched)
            opened.callback(close_all, recorders)
            with _progress(launched) as progress:
                with generators_kept():
                    planned = _compile(request, spec, args, targets, kwargs, progress, empty_on)
                    look = _check_mean(request, planned, launched, devices[-1], args, targets, kwargs)
                _check_compiled(request, planned, launched, is_empty=empty_on is not None)
                stages_here = [stage for rank in launched.ranks for stage in stages_of(rank, request.placed)]
                _prepare_all(planned, stages_here if options.inner != EAGER else (), options.inner, progress)
                model = request.whole_model
                if empty_on is not None:
                    here = [name for stage in stages_here for name in planned.compiled.train[stage].state_names]
                    state = (planned.compiled.aliases, planned.compiled.saved)
                    materialise(model, here, *state, request.weights, empty_on, progress)
                sharing = Sharing(None if request.keeps_whole else model, planned.compiled, request.placed, launched)
        except Exception as error:
            for transport in launched.transports:
                disagree(transport, "pipeline", error)
            raise
        if planned.compiled.difference is not None and launched.is_first:
            logger.warning("%s; Options(captured='accept') leaves this out", planned.compiled.difference)
        for line in planned.alone if launched.is_first else ():
            logger.info(line)
        if not launched.in_threads:  # which compile once together
            agree_here(launched, planned.facts(), options.timeout)
        at_home = sharing.states(model, planned.compiled, request.placed, launched.ranks)
        workers = planned.factory.workers(
            launched, recorders, states_with_guests(launched, at_home, planned.compiled), planned.initial
        )
        opened.pop_all()
    recompile, following = _later_compilations(request, planned, model, empty_on, is_alone=launched.in_threads)
    names = ModelNames(model, planned.compiled.saved)
    local = LocalWorkers(planned, launched, workers, recorders, sharing)
    session = Session(spec, local, names, recompile, look, following)
    try:
        session.held.align_copies()
    except BaseException:
        session.close()
        raise
    return session


def _check_compiled(request: CompileArguments, planned: PlannedPipeline, launched: Launch, *, is_empty: bool) -> None:
    """Refuse what shows only once the stages are known.

    Raises:
        OptionError: A parameter has a hook, or memory in common with another, where copies would become different. Or sites
            can't update the model by themselves, or replicas can't take microbatches from each other.
    """
    model, apart = request.whole_model, request.options.apart
    _refuse_hooked_copies(model, planned.compiled.copied(request.placed))
    if apart is not None and launched.world.sites > 1:
        smallest = min((one.element_size() for one in model.parameters()), default=4)
        require_site_memory(apart, planned, launched, launched.world, smallest, request.options.timeout)
    for mode in request.options.possible_synchrony:
        if isinstance(mode, WithinStep):
            check_within_step(mode, planned, launched.world, in_order=launched.in_order)
            parameters = dict(model.named_parameters(remove_duplicate=False))
            require_tail_memory(mode, planned, launched, parameters, request.options.timeout)
        elif isinstance(mode, Apart):
            sites_of(launched.world, mode)
    refuse_shared_memory(model, planned.compiled, request.placed, launched, is_empty=is_empty)


def _prepare_all(planned: PlannedPipeline, stages: Sequence[int], inner: str, progress: Progress) -> None:
    """Have the inner compiler compile what these stages train by."""
    for done, stage in enumerate(stages, 1):
        prepare(planned.compiled.train[stage])
        progress(f"compiled by {inner}", done, len(stages))


def _later_compilations(
    request: CompileArguments,
    planned: PlannedPipeline,
    model: nn.Module,
    empty_on: torch.device | None,
    *,
    is_alone: bool,
) -> tuple[Recompile | None, Following | None]:
    """Return what compiles the model for other shapes, and what does so after it has changed."""
    loss = _loss_of(request, Reduction(request.reduction))
    recompile = following = None
    if planned.compiled.captured is not None and planned.compiled.with_loss:
        recompile = Recompile.of(model, loss, empty_on)
    if request.with_loss and not request.keeps_whole:
        is_list = request.stage_modules is not None
        # In one process the stages have all of its tensors anyway.
        following = Following(model, request.loss, loss, empty_on, is_list=is_list, keeps=is_alone)
        following.keep_skeleton(recompile)
    return recompile, following


def _progress(launched: Launch) -> AbstractContextManager[Progress]:
    """Return the progress display. Only the first rank shows it, since all ranks do the same."""
    return shown_progress() if launched.is_first else nullcontext(log_progress)


def _compile(
    request: CompileArguments,
    spec: PipelineSpec,
    args: tuple[Any, ...],
    targets: Any,
    kwargs: Mapping[str, Any],
    progress: Progress,
    empty_on: torch.device | None,
) -> PlannedPipeline:
    """Return the stages, the first plan and the means for later plans. Every rank computes them on its own.

    ``empty_on`` is the device on which an empty model gets its values; None if it has them.
    """
    if request.loss is not None and targets is None:
        raise BatchError(
            "loss= compares outputs with targets, but no targets were given: expected example_inputs=(inputs, targets), a "
            "tuple of two, or a first step with both on every rank"
        )
    refuse_number_of_items(kwargs, spec.reduction)
    args, targets, kwargs = example_microbatch((args, targets, dict(kwargs)), request.microbatches, "example_inputs")
    modules = request.stage_modules
    loss = _loss_of(request, spec.reduction)
    if modules is not None:
        if empty_on is not None:
            raise StateError(
                "weights: the model is a list of stages on the meta device, which can't run without values: expected one "
                "model, or stages with values"
            )
        with kept_with_values(modules, loss):
            compiled = compile_modules(modules, args, kwargs, loss=loss, targets=targets)
    else:
        compiled = compile_stages(
            request.whole_model if empty_on is None else skeleton(request.whole_model, empty_on),
            args,
            kwargs,
            stages=request.stages,
            loss=loss,
            targets=targets,
            split=request.split,
            with_loss=request.with_loss,
            compare=spec.options.captured != "accept",
            progress=progress,
        )
        if compiled.difference is not None and spec.options.captured == "error":
            raise CaptureError(f"{compiled.difference}; expected the same ops, as captured='error' asks")
    planned = spec.prepare(compiled)
    progress("planned", 1, 1)
    return planned


def _loss_of(request: CompileArguments, reduction: Reduction) -> Callable[..., Any] | None:
    return WeightedLoss(request.loss) if reduction is Reduction.WEIGHTED else request.loss


def _check_mean(
    request: CompileArguments,
    planned: PlannedPipeline,
    launched: Launch,
    device: torch.device,
    args: tuple[Any, ...],
    targets: Any,
    kwargs: Mapping[str, Any],
) -> BatchLook | None:
    """Check on the example that the loss is a mean of its microbatches' losses. Refuse a sum, warn of unequal weights.

    Returns what looks at later batches; None if no mean of microbatches is taken.
    """
    if Reduction(request.reduction) is not Reduction.MEAN or not request.with_loss:
        return None
    targets = pytree.tree_map_only(Tensor, copy_of, targets)
    given = args, targets, dict(kwargs)
    compiled = planned.compiled
    example = example_microbatch(given, request.microbatches, "example_inputs")
    rows = rows_of(example)
    look = BatchLook(compiled)
    flat = compiled.inputs.flatten(args, kwargs), compiled.targets.flatten(targets)
    has_values = not any(one.is_meta for side in flat for one in side)
    text, unequal = None, None
    with kept_with_values(request.whole_model, request.loss):
        if request.loss is not None and not _is_one(request, launched):
            refuse_sum(request.loss, compiled, example[1], rows, device)
        if has_values:
            weights = example_weights(compiled, split_rows([*flat[0], *flat[1]], (rows,) * request.microbatches))
            unequal = next((one for one in weights if not one.are_alike), None)
        if has_values and launched.is_first:
            text = rows_together(request.whole_model, request.loss, compiled, *flat, request.microbatches)
            text = text or unequal_weights(request.loss, compiled, targets, request.microbatches, rows, device)
    if text is None and unequal is not None:
        text = f"reduction='mean': microbatches of the example {unequal}, {UNEQUAL}"
    if text is not None:
        look.end()
        if launched.is_first:
            logger.warning(text)
    return look


def _is_one(request: CompileArguments, launched: Launch) -> bool:
    """Return whether the batch is one microbatch, so that any loss of it is the loss of the batch."""
    return request.microbatches == launched.world.replicas == 1


def _spec(request: CompileArguments, launched: Launch, devices: Sequence[torch.device], *, is_to_come: bool) -> PipelineSpec:
    """Return what all plans of the pipeline begin with. Under a launcher the ranks tell each other their free memory."""
    options = request.options
    replicas = launched.world.replicas
    if options.noise_scale and replicas == launched.world.sites:
        raise OptionError(
            "noise_scale=True with one replica, or one in each site: expected several, as the noise scale "
            "is known by how their gradients differ"
        )
    for fault in request.faults:  # all ranks gave the same ones and refuse them alike
        fault.check_job(replicas, in_threads=launched.in_threads)
    return PipelineSpec(
        request.placed,
        request.microbatches,
        request.limit,
        request.with_loss,
        request.faults,
        options,
        Reduction(request.reduction),
        free_memory(launched, dict(zip(request.placed, devices, strict=True)), options.timeout)
        if request.limit is None
        else None,
        replicas,
        launched.in_order,
        is_to_come=is_to_come,
        guests=launched.world.guests,
        crowd=launched.world.crowd,
    )


def _device_of_empty(request: CompileArguments, example: Any) -> torch.device | None:
    """Return the device on which a model on the meta device gets its values: the example's. None if it has or gets none.

    A model with an example on the meta device gets none, and serves analysis only.

    Raises:
        OptionError: ``weights=`` is given for a model that gets no values.
    """
    devices = _devices(example)
    if is_empty(request.whole_model) and devices:
        return devices[0]
    if request.weights is not None:
        raise OptionError(
            f"weights={str(request.weights)!r}: the model has values already, or the example has none: expected a model built "
            "within torch.device('meta'), and an example with values"
        )
    return None


def _beside(
    request: CompileArguments, example: tuple[Any, Any, Any], empty_on: torch.device | None
) -> tuple[tuple[torch.device, ...], tuple[Any, Any, Any]]:
    """Return the device of each stage, and the example where it is used: arguments with the first stage, targets with the last.

    Raises:
        OptionError: The model's parts lie on several devices, and can't train there.
        BatchError: The example is on another device, and not on the host.
    """
    devices = (empty_on,) * request.stages if empty_on is not None else devices_of(request)
    args, targets, kwargs = example
    args, kwargs = all_beside((args, kwargs), devices[0], "example_inputs: a tensor")
    return devices, (args, all_beside(targets, devices[-1], "example_inputs: a tensor"), kwargs)


def _devices(example: Any) -> list[torch.device]:
    return [leaf.device for leaf in pytree.tree_leaves(example) if isinstance(leaf, Tensor) and not leaf.is_meta]


def _refuse_hooked_copies(model: nn.Module, copied: frozenset[str]) -> None:
    for name, parameter in model.named_parameters():
        if name in copied and is_hooked(parameter):
            raise OptionError(copy_is_hooked(name))


def _check_contract(request: CompileArguments, launched: Launch) -> None:
    """Refuse a transport over which messages of several stages on a rank would deadlock. All ranks refuse it alike.

    Raises:
        LaunchError: The transport has only one queue per pair of ranks and direction of the pipeline.
    """
    contracts = [transport.contract for transport in launched.transports]
    if not is_straight(request.placed) and any(one.in_order and not one.one_way for one in contracts):
        raise LaunchError(
            f"placement={request.placement!r} over a transport with one queue between two ranks, where both ways would be in "
            f"line: expected {STRAIGHT!r}, or a transport whose contract says in_order=False or one_way=True"
        )
