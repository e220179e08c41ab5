"""Programs of one rank, lowered for its transport: the running one, and those that may run next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from operator import or_
from typing import Final

from adaptra.errors import PlanError
from adaptra.graph import CompiledStages
from adaptra.graph.ops.specs import MessageSpec
from adaptra.graph.round_messages import round_edges
from adaptra.passes.insert_comm import InsertComm
from adaptra.passes.insert_crossing import InsertCrossing
from adaptra.passes.lower_comm import LowerComm
from adaptra.planning.least_memory import plan_least_memory
from adaptra.planning.planner import plan as search
from adaptra.program import Kind, Program
from adaptra.program.dependencies import other_end, peer_stage
from adaptra.program.schedules import forward_only
from adaptra.program.verify import verify
from adaptra.runtime.control.plans.plan import Edges, Plan
from adaptra.runtime.devices.device_clock import OpClock
from adaptra.runtime.injection.emulation import Pacing
from adaptra.runtime.measuring.monitor import Monitor
from adaptra.runtime.transports.base import Transport
from adaptra.runtime.worker.stages.stage import ForwardStage, Stage
from adaptra.runtime.worker.step.executor import Executor
from adaptra.runtime.worker.step.program_messages import BatchShapes, MessageShapes
from adaptra.runtime.worker.step.shapes import FIRST, RankShape, StepShape
from adaptra.simulation.cost import CostModel
from adaptra.simulation.simulate import Simulation, simulate

MOST_PREPARED: Final = 4
"""The number of executors of proposed plans that are kept. A plan that was evicted is lowered again when it runs."""


_HOME: Final = -1
"""Stands for the first shape in a step that runs at home, because another replica's batch has another shape."""


@dataclass(slots=True)
class _Runnable:
    """A program of one shape under one plan, ready to run.

    Attributes:
        version, number: The version of the plan, and the number of the shape or :data:`_HOME`.
        program: The program without messages.
        executor: Runs it.
        is_reserved: Whether its receive buffers are reserved.
    """

    version: int
    number: int
    program: Program
    executor: Executor
    is_reserved: bool = False


class RankPrograms:
    """Lowers plans to executors, and reserves the receive buffers that they take.

    Args:
        compiled: The model's stages.
        stages_of: This rank's stages in training under a program, by replica and number.
        beside: The receive buffers for messages beside a program with routes, per source worker and message.
        handed_over: Per stage the tensors in which its weight gradients are handed over, and the buffers that it changes; none
            of a stage on another rank.
        first: What of this rank depends on the shape of the compilation.
        batch: The tensors of a microbatch's inputs, targets and results in that shape.
        transport: This rank's transport, which joins the ranks of its pipeline.
        job: The transport of all workers of the job, of which that is a part; the same without replicas.
        initial: The plan of the first step.
        pacing: Lengthens ops on emulated devices and slowed stages.
        monitor: Records ops and messages.
        clock: Marks the start and end of ops on this rank's device.
        timeout: Seconds an op waits for a message.
        always: Receive buffers of the messages that are not in a program, per source rank and message.

    Attributes:
        plan: The plan of the last step, or of the first one.
    """

    def __init__(
        self,
        compiled: CompiledStages,
        stages_of: Callable[[Program], Mapping[tuple[int, int], Stage]],
        beside: Callable[[Executor], Counter[tuple[int, MessageSpec]]],
        handed_over: Sequence[tuple[MessageSpec, MessageSpec]],
        first: RankShape,
        batch: BatchShapes,
        transport: Transport,
        job: Transport,
        initial: Plan,
        pacing: Pacing,
        monitor: Monitor,
        clock: OpClock,
        timeout: float,
        always: Mapping[tuple[int, MessageSpec], int],
    ) -> None:
        self.plan = self._initial = initial
        self._compiled = compiled
        self._shapes = {FIRST: first}
        self._stages_of = stages_of
        self._beside = beside
        self._handed_over = handed_over
        self._batch = batch
        self._transport = transport
        self._job = job
        self._pacing = pacing
        self._monitor = monitor
        self._clock = clock
        self._timeout = timeout
        self._always = self._by_worker(always)
        self._by_shape: dict[int, Counter[tuple[int, MessageSpec]]] = {}
        self._cost = initial.case.cost
        self._running: _Runnable | None = None
        self.reserve({})  # after a change of roles, gradients may be read before the first step
        made = self._made_for(initial, FIRST)
        verify(made.executor.program, changing=self._changing)
        self._prepared = {(initial.version, FIRST): made}

    def prepare(self, plan: Plan) -> None:
        """Check and lower a proposed plan before the step that switches to it; runs beside training.

        The controller has verified the plan, and passes keep a valid program valid. Verifying it again would double the
        interpreter time of a switch.

        Raises:
            PlanError: The plan holds more activations than this job allows.
        """
        check_memory(f"plan {plan.version}", plan.program, self._cost)
        for number, of in list(self._shapes.items()):
            if of.shape.trains:
                self._prepared[plan.version, number] = self._made_for(plan, number)
        kept = sorted({version for version, _ in list(self._prepared)})[-MOST_PREPARED:]
        self._forget(lambda version, _: version not in kept)

    def add_shape(self, shape: RankShape) -> None:
        """Add a shape of batch. Its program under the running plan is lowered and checked now, unless it only evaluates."""
        number = shape.shape.number
        self._shapes[number] = shape
        if not shape.shape.trains:
            return
        made = self._made_for(self.plan, number)
        verify(made.executor.program, changing=self._changing)
        self._prepared[self.plan.version, number] = made

    def drop_shape(self, number: int) -> None:
        """Remove a shape with its programs and receive buffers."""
        self._shapes.pop(number)
        self._by_shape.pop(number, None)
        self._forget(lambda _, of: of == number)
        if self._running is not None and self._running.number == number:
            self._running = None
        self._job.reserve(self._always + self._by_program)

    def _forget(self, is_over: Callable[[int, int], bool]) -> None:
        for key in list(self._prepared):
            if is_over(*key):
                self._prepared.pop(key, None)

    def switch_to(self, plan: Plan, step: int, number: int = FIRST, *, at_home: bool = False) -> Executor:
        """Return the executor of the plan that runs ``step``, for a batch of this shape.

        If the plan is a new one, lanes and buffers are switched as well.

        Args:
            plan: The plan.
            step: The step's number.
            number: The number of the batch's shape.
            at_home: Whether the replicas have agreed that each of them computes its own microbatches in this step.
        """
        running, number = self._running, _HOME if at_home and number == FIRST else number
        if running is not None and (running.version, running.number) == (plan.version, number):
            return running.executor
        made = self._prepared.get((plan.version, number)) or self._made_for(plan, number)
        leaves = running is not None and running.program.is_one_pipeline != made.program.is_one_pipeline
        if running is None or leaves or plan.version != self.plan.version:
            self._transport.use_lanes(step, made.executor.program)
        self._prepared[plan.version, number] = self._running = made
        if not made.is_reserved:
            self._reserve(made.executor, number)
            made.is_reserved = True
        self.plan = plan
        self._forget(lambda version, _: version < plan.version)
        return made.executor

    @property
    def program(self) -> Program:
        """The program of the last step, without messages; that of the plan if none has run."""
        return self.plan.program if self._running is None else self._running.program

    def first(self) -> Program:
        """Return the lowered program of the first plan, before any other has run."""
        return self._prepared[self.plan.version, FIRST].executor.program

    def evaluation(self, stages: Mapping[int, ForwardStage], of: RankShape) -> Executor:
        """Return an executor that runs the forwards of stages in evaluation mode."""
        shape = of.shape
        forwards = forward_only(self.plan.case.placement, shape.microbatches)
        program = InsertComm.for_contract(self._transport.contract).apply(forwards, self.plan.case.cost)
        verify(program)
        shapes = shape.messages(lambda compiled: [MessageShapes(stage.outputs, ()) for stage in compiled.eval])
        executor = self._executor(program, {(0, stage): one for stage, one in stages.items()}, shapes, shape.code)
        self._reserve(executor, shape.number)
        return executor

    def executor(self, lowered: Program, stages: Mapping[tuple[int, int], Stage]) -> Executor:
        """Return an executor of a lowered program for the shape of the compilation, with the messages of the current plan.

        Args:
            lowered: The program, with SEND and RECV.
            stages: This rank's stages by replica and number.
        """
        return self._executor(lowered, stages, self._messages(self.plan, self._shapes[FIRST].shape), FIRST)

    def _executor(
        self,
        lowered: Program,
        stages: Mapping[tuple[int, int], ForwardStage],
        shapes: Sequence[MessageShapes],
        code: int,
    ) -> Executor:
        carrier = self._transport if lowered.is_one_pipeline else self._job
        return Executor(
            lowered,
            carrier.rank,
            stages,
            shapes,
            self._batch,
            carrier,
            self._pacing,
            self._monitor,
            self._clock.mark,
            self._timeout,
            code,
        )

    def reserve(self, counts: Mapping[tuple[int, MessageSpec], int]) -> None:
        """Grow the pool of receive buffers to the needs of programs, in addition to messages that are not in a program.

        Args:
            counts: Numbers of buffers per source rank of this pipeline and message.
        """
        self._grow(self._by_worker(counts))

    def reserve_once(self, counts: Mapping[tuple[int, MessageSpec], int]) -> None:
        """Add these receive buffers to the pool until the next :meth:`reserve`.

        Args:
            counts: Numbers of buffers per source worker of the job and message.
        """
        self._job.reserve(self._always + self._by_program + Counter(counts))

    def _reserve(self, executor: Executor, number: int) -> None:
        if not executor.program.is_one_pipeline:
            self._grow(Counter(executor.receive_counts) + self._beside(executor))
            return
        counts = Counter(executor.receive_counts)
        if number not in (FIRST, _HOME):  # the losses of the first shape are always reserved
            counts += self._shapes[number].losses.receive_counts()
        self._grow(self._by_worker(counts), number)

    def _grow(self, counts: Counter[tuple[int, MessageSpec]], number: int = FIRST) -> None:
        self._by_shape[number] = self._by_shape.get(number, Counter()) | counts
        self._job.reserve(self._always + self._by_program)

    @property
    def _by_program(self) -> Counter[tuple[int, MessageSpec]]:
        """The receive buffers of programs: the most that one of them needs, since one runs at a time."""
        return reduce(or_, self._by_shape.values(), Counter[tuple[int, MessageSpec]]())

    def _by_worker(self, counts: Mapping[tuple[int, MessageSpec], int]) -> Counter[tuple[int, MessageSpec]]:
        return Counter({(self._transport.worker_of(rank), specs): count for (rank, specs), count in counts.items()})

    @cached_property
    def _at_home(self) -> Program:
        """The program of the first shape that no other replica has a part in. The same search finds it on all ranks."""
        if self._initial.program.is_one_pipeline:
            return self._initial.program
        case = self._initial.case
        try:
            return search(case)
        except PlanError:
            return plan_least_memory(replace(case, cost=replace(case.cost, memory_limit=None)))

    @property
    def _changing(self) -> frozenset[int]:
        """The stages whose forwards change buffers."""
        return frozenset(one.index for one in self._compiled.train if self._compiled.changing_in(one.index))

    def _made_for(self, plan: Plan, number: int) -> _Runnable:
        of = self._shapes[FIRST if number == _HOME else number]
        program = self._at_home if number == _HOME else of.shape.program_for(plan)
        stages: Mapping[tuple[int, int], Stage] = self._stages_of(program)
        if number not in (FIRST, _HOME):
            stages = {(0, stage): one for stage, one in of.stages.items()}
        messages = self._messages(plan, of.shape)
        executor = self._executor(self._lower(plan, program), stages, messages, of.shape.code)
        return _Runnable(plan.version, number, program, executor)

    def _messages(self, plan: Plan, shape: StepShape) -> list[MessageShapes]:
        def of(compiled: CompiledStages) -> list[MessageShapes]:
            return [
                MessageShapes(graphs.outputs, graphs.grad_inputs, weights, buffers)
                for graphs, (weights, buffers) in zip(round_edges(compiled.train, plan.rounded), self._handed_over, strict=True)
            ]

        return shape.messages(of)

    def _lower(self, plan: Plan, program: Program) -> Program:
        """Insert SEND and RECV for this transport, put those of delegated edges on their lane, and add what crosses replicas.

        Without a loss there is no measurement and no new plan, so receives are posted early enough for any delay.
        """
        ahead = None if self._compiled.with_loss else program.microbatches
        lowered = InsertComm.for_contract(self._transport.contract, ahead).apply(program, plan.case.cost)
        slow = plan.delegated if lowered.is_one_pipeline else _links_over(lowered, plan.delegated)
        crossing = InsertCrossing.for_contract(self._transport.contract, self._changing)
        return crossing.apply(LowerComm(slow=slow).apply(lowered, plan.case.cost), plan.case.cost)


def _links_over(lowered: Program, edges: Edges) -> Edges:
    """Return the links of workers that carry a program's messages over these directed edges of stages."""
    sends = [op for order in lowered.orders for op in order if op.kind in (Kind.SEND_F, Kind.SEND_B)]
    crossing = [(op, other_end(op)) for op in sends if (op.stage, peer_stage(op)) in edges]
    found = {tuple(lowered.holder(end.replica, end.stage, end.microbatch) for end in ends) for ends in crossing}
    return tuple(sorted((source, destination) for source, destination in found))


def check_memory(what: str, program: Program, cost: CostModel) -> None:
    """Refuse a program that keeps more activations than the job allows, counting those that W still needs.

    Args:
        what: The program's name in the error.
        program: Without or with messages.
        cost: Gives the memory of microbatches and its limits, in microbatches or bytes.

    Raises:
        PlanError: Names the rank, the memory that it would need and its limit.
    """
    found = simulate(program, cost)
    if not program.is_one_pipeline:
        _check_memory_of_workers(what, found)
        return
    for rank in found.over_memory:
        assert cost.memory_limit is not None, "only a limit can be exceeded"
        raise PlanError(
            f"{what}: rank {rank} holds {found.peak_memory[rank]:g} of activations: expected at most "
            f"{cost.memory_limit[rank]:g}, in the unit of memory= (microbatches, or bytes)"
        )


def _check_memory_of_workers(what: str, found: Simulation) -> None:
    for worker in found.over_memory:
        case = found.case
        assert case.memory is not None, "only a limit can be exceeded"
        most = case.memory[worker % case.ranks]
        raise PlanError(
            f"{what}: worker {case.place_of(worker)} holds {found.held[worker]} microbatches, with those of other replicas: "
            f"expected at most {most}, as memory= allows"
        )
