"""From a request to running ranks: capture and cut the model, plan, and start a worker for every rank of this process.

This is the path from model to instruction list in one place, top to bottom.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Final

from torch import Tensor, nn

from adaptra.built import Built
from adaptra.cost import Case, CostModel
from adaptra.errors import BatchError
from adaptra.estimate import estimated_cost
from adaptra.first_plan import first_plan, two_phase_plan
from adaptra.graph import CompiledStages, compile_stages
from adaptra.graph.autocast import refuse_autocast
from adaptra.graph.compile_modules import compile_modules
from adaptra.graph.inner import EAGER, compiled_by, prepare
from adaptra.graph.round_messages import round_messages
from adaptra.memory import in_bytes, parse_size
from adaptra.planner import plan
from adaptra.program import Program
from adaptra.progress import Progress, log_progress, shown_progress
from adaptra.remedies import Means, find_remedies
from adaptra.request import Request
from adaptra.runtime.batch import example_microbatch
from adaptra.runtime.launch import Launch, agree, disagree, launch
from adaptra.runtime.plan import Plan
from adaptra.runtime.planning import Planning
from adaptra.simulate import lower_bound, simulate
from adaptra.start import Starter, open_recorder

PLANNER_SHARE: Final = 0.5
"""The part of a step that a search takes at most: a plan that is there before the next step ends is run a step sooner."""

DRAFT_SHARE: Final = 0.1
"""The same for what is only suspected: all ranks must have got ready for the plan before the next step ends."""


def build(request: Request, args: tuple[Any, ...], targets: Any, kwargs: Mapping[str, Any]) -> Built:
    """Compile a model for batches like this one and start its workers.

    Args:
        request: What to compile.
        args, kwargs: The model's arguments, a whole batch.
        targets: The loss's targets, a whole batch, or None.

    Raises:
        As :func:`adaptra.api.compile`.
    """
    refuse_autocast("adaptra.compile")
    options = request.options
    launched = launch(
        request.stages,
        request.transport,
        request.facts(),
        options.timeout,
        roles=request.roles,
        with_delegate=options.uses_delegate,
        addresses=options.addresses,
    )
    with ExitStack() as opened:
        for transport in launched.transports:
            opened.callback(transport.close)
        try:
            recorder = open_recorder(options, launched)
            opened.callback(recorder.close)
            with _progress(launched) as progress:
                compiled, initial, planning, means = _compile(request, args, targets, kwargs, progress)
                ranks = [transport.rank for transport in launched.transports] if options.inner != EAGER else []
                for done, rank in enumerate(ranks, 1):
                    prepare(compiled.train[rank])
                    progress(f"compiled by {options.inner}", done, len(ranks))
        except Exception as error:
            for transport in launched.transports:
                disagree(transport, "pipeline", error)
            raise
        if len(launched.transports) == 1:  # the ranks of one process have compiled once, for all
            agree(launched.transports[0], "pipeline", _facts(compiled, initial), options.timeout)
        starter = Starter(compiled, request.microbatches, planning, request.faults, options)
        model = request.whole_model
        states = [_state(compiled, transport.rank, model) for transport in launched.transports]
        workers = starter.workers(launched, recorder, states, initial)
        opened.pop_all()
    return Built(starter, launched, workers, recorder, means)


def _progress(launched: Launch) -> AbstractContextManager[Progress]:
    """Of all ranks, which do the same, the first one shows how far it is."""
    is_first = launched.transports[0].rank == 0 and (launched.replicas is None or launched.replicas.index == 0)
    return shown_progress() if is_first else nullcontext(log_progress)


def _compile(
    request: Request, args: tuple[Any, ...], targets: Any, kwargs: Mapping[str, Any], progress: Progress
) -> tuple[CompiledStages, Plan, Planning, Means]:
    """The stages, the first plan, how to make later ones and what helps them: all that every rank comes to for itself."""
    if request.loss is not None and targets is None:
        raise BatchError(
            "loss= compares outputs with targets, but no targets were given: expected example_inputs=(inputs, targets), a "
            "tuple of two, or a first step with both on every rank"
        )
    args, targets, kwargs = example_microbatch((args, targets, dict(kwargs)), request.microbatches, "example_inputs")
    modules = request.stage_modules
    if modules is not None:
        compiled = compile_modules(modules, args, kwargs, loss=request.loss, targets=targets)
    else:
        compiled = compile_stages(
            request.whole_model,
            args,
            kwargs,
            stages=request.stages,
            loss=request.loss,
            targets=targets,
            split=request.split,
            with_loss=request.with_loss,
            progress=progress,
        )
    compiled = compiled_by(request.options.inner, compiled)
    if request.options.lossy_bf16:
        rounded = round_messages(compiled)  # which also refuses what can't be rounded, before a plan wants to
        compiled = rounded if request.options.lossy_bf16 is True else compiled
    cost, options = estimated_cost(compiled), request.options
    if options.emulate is not None:
        cost = options.emulate.apply(cost)
    if isinstance(request.memory, str):
        cost = in_bytes(cost, compiled.train, parse_size(request.memory))
    elif request.memory is not None:
        cost = replace(cost, memory_limit=(float(request.memory),) * request.stages)
    case = Case(cost, request.microbatches, tuple(range(request.stages)), name="compiled")
    means = Means(options.uses_delegate, options.lossy_bf16 == "slow", compiled.places)
    planner, draft = (partial(_better_plan, options.planning_seconds, share) for share in (PLANNER_SHARE, DRAFT_SHARE))
    planning = Planning(planner, _makespan, lambda costs: lower_bound(costs).value, partial(find_remedies, means=means), draft)
    initial = first_plan(options, case) if request.with_loss else two_phase_plan(options, case)
    progress("planned", 1, 1)
    return compiled, initial, planning, means


def _facts(compiled: CompiledStages, initial: Plan) -> list[object]:
    """What every rank must have come to for itself."""
    stages = [[str(one.inputs), str(one.outputs), *one.parameters, *one.buffers] for one in compiled.train]
    return [str(initial.program), [list(edge) for edge in initial.delegated], stages]


def _state(compiled: CompiledStages, stage: int, model: nn.Module) -> dict[str, Tensor]:
    """A stage's state: the model's own tensors, but a copy of a tied parameter that another stage owns."""
    state = dict(compiled.train[stage].state(model))
    for tied in compiled.tied:
        if tied.name in state and tied.owner != stage:
            state[tied.name] = nn.Parameter(state[tied.name].detach().clone())
    return state


def _better_plan(seconds: float, share: float, case: Case, incumbent: Program) -> Program:
    """Only the coordinator asks and all ranks get what it found, so the search may end by time: a share of a step at most."""
    return plan(case, incumbent=incumbent, budget=min(seconds, share * _makespan(incumbent, case.cost)))


def _makespan(program: Program, cost: CostModel) -> float:
    return simulate(program, cost).makespan
