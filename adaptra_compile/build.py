"""From a request to running ranks: capture and cut the model, plan, and start a worker for every rank of this process.

This is the path from model to instruction list in one place, top to bottom.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor, nn

from adaptra.cost import Case, CostModel
from adaptra.errors import BatchError, PeerLostError, PipelineError
from adaptra.estimate import estimated_cost
from adaptra.first_plan import first_plan
from adaptra.graph import CompiledStages, compile_stages
from adaptra.graph.round_messages import round_messages
from adaptra.planner import plan
from adaptra.program import Program
from adaptra.report import perfetto
from adaptra.request import Request
from adaptra.runtime.batch import example_microbatch, split_batch
from adaptra.runtime.coordinator import Planning
from adaptra.runtime.emulation import Pacing
from adaptra.runtime.launch import Launch, agree, disagree, launch
from adaptra.runtime.options import Options
from adaptra.runtime.plan import Plan
from adaptra.runtime.telemetry.options import Telemetry
from adaptra.runtime.telemetry.rank import RankTelemetry
from adaptra.runtime.telemetry.recorder import Recorder
from adaptra.runtime.telemetry.start import of_replica, start_recorder
from adaptra.runtime.transports.faulty import FaultyTransport
from adaptra.runtime.worker import Batch, Worker
from adaptra.simulate import lower_bound, simulate

Result = TypeVar("Result")


class Built:
    """A compiled pipeline: its stages and the workers of this process.

    Args:
        compiled: The model's stages.
        workers: One per rank run here, by rank.
        microbatches: Microbatches per step.
        recorder: Of what the workers tell.
    """

    def __init__(self, compiled: CompiledStages, workers: Sequence[Worker], microbatches: int, recorder: Recorder) -> None:
        self.compiled = compiled
        self.workers = tuple(workers)
        self._microbatches = microbatches
        self._ranks = {worker.rank for worker in workers}
        self._failure: BaseException | None = None
        self._threads = ThreadPoolExecutor(len(workers), "adaptra-rank") if len(workers) > 1 else None
        # Also when the process ends without a close: the transports' threads must not outlive the interpreter.
        self._end = weakref.finalize(self, _end, self.workers, self._threads, recorder)

    @property
    def state(self) -> dict[str, Tensor]:
        """The state of this process's stages; of a parameter with several copies the first stage's."""
        merged: dict[str, Tensor] = {}
        for worker in self.workers:
            merged = {**worker.state, **merged}
        return merged

    @property
    def saved_names(self) -> dict[str, str]:
        """Every name of the model's state_dict, on whatever rank, to the one that stages know the tensor by."""
        left_out = self.compiled.non_persistent
        return {name: canonical for name, canonical in self.compiled.aliases.items() if canonical not in left_out}

    def split_inputs(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Batch:
        """The microbatches of a batch's inputs, or nothing where the first stage is elsewhere."""
        if 0 not in self._ranks:
            return ()
        form = self.compiled.inputs
        return split_batch(form.flatten(args, kwargs), form.specs, self._microbatches, "inputs")

    def split_targets(self, targets: Any) -> Batch:
        """The microbatches of a batch's targets, or nothing where the last stage is elsewhere."""
        if len(self.compiled.train) - 1 not in self._ranks:
            return ()
        form = self.compiled.targets
        return split_batch(form.flatten(targets), form.specs, self._microbatches, "targets")

    @contextmanager
    def at_the_door(self) -> Generator[None]:
        """Around what checks a batch before anything runs.

        Where all ranks are in this process a batch that is refused changes nothing. The ranks of other processes may already
        wait for this one's messages, so there it ends the pipeline on all of them.
        """
        self.require_running()
        try:
            yield
        except Exception as error:
            if self._threads is None and not self.workers[0].is_alone:
                self._failure = error
                self.workers[0].fail(error)
            raise

    def require_running(self) -> None:
        """Refuse to go on after the end.

        Raises:
            PipelineError: The pipeline is closed or has failed.
        """
        if not self._end.alive:
            raise PipelineError("this pipeline is closed: call adaptra.compile for another one")
        if self._failure is not None:
            raise PipelineError(
                "this pipeline has failed and can't go on: close it, call adaptra.compile again and load the last checkpoint; "
                f"it failed by {type(self._failure).__name__}: {self._failure}"
            ) from self._failure

    def on_every_rank(self, run: Callable[[Worker], Result]) -> list[Result]:
        """Run something on every worker of this process, each on its own thread, and wait for all.

        Raises:
            PipelineError: The pipeline is closed or has failed.
            Exception: What the first worker to fail raised; the others' errors only say that it failed. The pipeline has
                failed then.
        """
        self.require_running()
        try:
            return self._run(run)
        except BaseException as error:
            self._failure = error
            raise

    def _run(self, run: Callable[[Worker], Result]) -> list[Result]:
        if self._threads is None:
            return [run(self.workers[0])]
        futures = [self._threads.submit(run, worker) for worker in self.workers]
        try:
            errors = [error for error in (future.exception() for future in futures) if error is not None]
        except BaseException as error:
            # Such as Ctrl-C, which reaches this thread only: the ranks would go on without it.
            for worker in self.workers:
                worker.abort(PipelineError(f"the step was interrupted: {type(error).__name__}"))
            raise
        if errors:
            raise next((error for error in errors if not isinstance(error, PeerLostError)), errors[0])
        return [future.result() for future in futures]

    def close(self) -> None:
        """End all workers. May be called again."""
        self._end()


def _end(workers: Sequence[Worker], threads: ThreadPoolExecutor | None, recorder: Recorder) -> None:
    """Close all workers of this process."""
    for worker in workers:
        worker.leave()
    for worker in workers:
        worker.close()
    if threads is not None:
        threads.shutdown()
    recorder.close()


def build(request: Request, args: tuple[Any, ...], targets: Any, kwargs: Mapping[str, Any]) -> Built:
    """Compile a model for batches like this one and start its workers.

    Args:
        request: What to compile.
        args, kwargs: The model's arguments, a whole batch.
        targets: The loss's targets, a whole batch, or None.

    Raises:
        As :func:`adaptra.api.compile`.
    """
    options = request.options
    launched = launch(
        request.stages,
        request.transport,
        request.facts(),
        options.timeout,
        with_delegate=options.uses_delegate,
        addresses=options.addresses,
    )
    telemetry = of_replica(options.telemetry, None if launched.replicas is None else launched.replicas.index)
    with ExitStack() as opened:
        for transport in launched.transports:
            opened.callback(transport.close)
        try:
            recorder = _recorder(telemetry, options, launched)
            opened.callback(recorder.close)
            compiled, initial, planning = _compile(request, args, targets, kwargs)
        except Exception as error:
            for transport in launched.transports:
                disagree(transport, "pipeline", error)
            raise
        if len(launched.transports) == 1:  # the ranks of one process have compiled once, for all
            agree(launched.transports[0], "pipeline", _facts(compiled, initial), options.timeout)
        workers: list[Worker] = []
        folder = None if telemetry.folder is None else Path(telemetry.folder)
        pacing = Pacing(initial.case.cost if options.emulate is not None else None, request.faults)
        for transport in launched.transports:
            carrier = FaultyTransport(transport, request.faults) if request.faults else transport
            opened.callback(carrier.close)
            worker = Worker(
                compiled,
                _state(compiled, transport.rank, request.model),
                request.microbatches,
                carrier,
                initial,
                planning,
                launched.replicas,
                pacing,
                RankTelemetry(transport.rank, recorder, transport, folder, perfetto.write),
                options,
            )
            opened.callback(worker.close)
            workers.append(worker)
        opened.pop_all()
    return Built(compiled, workers, request.microbatches, recorder)


def _recorder(telemetry: Telemetry, options: Options, launched: Launch) -> Recorder:
    """Opens what the user wants to be told by, before anything that takes time."""
    ranks = [transport.rank for transport in launched.transports]
    first = 0 if launched.replicas is None else launched.replicas.first_rank
    return start_recorder(telemetry, options.on_event, ranks, first + ranks[0])


def _compile(
    request: Request, args: tuple[Any, ...], targets: Any, kwargs: Mapping[str, Any]
) -> tuple[CompiledStages, Plan, Planning]:
    """The stages, the first plan, and how to make later ones: all that every rank comes to for itself."""
    if request.loss is not None and targets is None:
        raise BatchError(
            "loss= compares outputs with targets, but no targets were given: expected example_inputs=(inputs, targets), a "
            "tuple of two, or a first step with both on every rank"
        )
    args, targets, kwargs = example_microbatch((args, targets, dict(kwargs)), request.microbatches, "example_inputs")
    compiled = compile_stages(
        request.model, args, kwargs, stages=request.stages, loss=request.loss, targets=targets, split=request.split
    )
    if request.options.lossy_bf16:
        compiled = round_messages(compiled)
    cost, options = estimated_cost(compiled), request.options
    if options.emulate is not None:
        cost = options.emulate.apply(cost)
    if request.memory is not None:
        cost = replace(cost, memory_limit=(float(request.memory),) * request.stages)
    case = Case(cost, request.microbatches, tuple(range(request.stages)), name="compiled")
    planning = Planning(partial(_better_plan, options.planning_seconds), _makespan, lambda costs: lower_bound(costs).value)
    return compiled, first_plan(options, case), planning


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


def _better_plan(seconds: float, case: Case, incumbent: Program) -> Program:
    """Only the coordinator asks and all ranks get what it found, so the search may end by time.

    It takes at most half a step: a plan that is there before the next step ends is run a step sooner.
    """
    return plan(case, incumbent=incumbent, budget=min(seconds, 0.5 * _makespan(incumbent, case.cost)))


def _makespan(program: Program, cost: CostModel) -> float:
    return simulate(program, cost).makespan
