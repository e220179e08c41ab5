"""Programs of one rank, lowered for its transport: the running one, and those that may run next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

from adaptra.errors import PlanError
from adaptra.graph import CompiledStages
from adaptra.graph.round_messages import round_edges
from adaptra.planning.check_memory import check_memory
from adaptra.planning.least_memory import plan_least_memory
from adaptra.planning.planner import plan as search
from adaptra.program import Program
from adaptra.program.open_tail import open_tail
from adaptra.program.schedules import forward_only
from adaptra.program.verify_messages import verify_messages
from adaptra.runtime.control.plans.plan import Plan
from adaptra.runtime.step_messages.stride_numbers import StrideNumbers
from adaptra.runtime.transports.base import Transport
from adaptra.runtime.worker.stages.stage import ForwardStage, Stage
from adaptra.runtime.worker.step.executor import Executor
from adaptra.runtime.worker.step.lowering import Lowering
from adaptra.runtime.worker.step.open_executor import OpenExecutor, OpenTail
from adaptra.runtime.worker.step.program_messages import BatchShapes, MessageShapes, ProgramMessages
from adaptra.runtime.worker.step.rank_context import RankContext
from adaptra.runtime.worker.step.receive_pool import ReceivePool, by_worker
from adaptra.runtime.worker.step.shapes import FIRST, RankShape, StepShape
from adaptra.runtime.worker.step.step_parts import StepParts
from adaptra.simulation.simulate import verify_whole

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
    """Lowers plans to executors, and has receive buffers reserved for them.

    Args:
        compiled: The model's stages.
        parts: This rank's stages, and the messages beside programs.
        context: This rank.
        initial: The plan of the first step.

    Attributes:
        plan: The plan of the last step, or of the first one.
        buffers: This rank's receive buffers.
    """

    def __init__(self, compiled: CompiledStages, parts: StepParts, context: RankContext, initial: Plan) -> None:
        self.plan = self._initial = initial
        self.buffers: Final = ReceivePool(context.transport, context.job, parts.receive_counts())
        self._compiled = compiled
        self._parts = parts
        self._context = context
        self._handed_over = [parts.handed_over_of(one.index) for one in compiled.train]
        self._changing = frozenset(one.index for one in compiled.train if compiled.changing_in(one.index))
        self._lowering = Lowering(context.transport.contract, self._changing, compiled.with_loss)
        self._shapes = {FIRST: parts.first}
        self._running: _Runnable | None = None
        self.buffers.grow({})  # after a change of roles, gradients may be read before the first step
        self._prepared = {(initial.version, FIRST): self._verified(initial, FIRST)}

    def prepare(self, plan: Plan) -> None:
        """Check and lower a proposed plan before the step that switches to it; runs beside training.

        The control plane has verified the plan's program on this rank, and passes keep a valid program valid.

        Raises:
            PlanError: The plan holds more activations than this job allows.
            InvalidProgramError: Others' microbatches can't follow those of its program.
        """
        ordered = self._ordered(plan.program, FIRST)
        if ordered is not plan.program:
            verify_whole(ordered)
        check_memory(f"plan {plan.version}", ordered, self._initial.case.cost)
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
        self._prepared[self.plan.version, number] = self._verified(self.plan, number)

    def drop_shape(self, number: int) -> None:
        """Remove a shape with its programs and receive buffers."""
        self._shapes.pop(number)
        self._forget(lambda _, of: of == number)
        if self._running is not None and self._running.number == number:
            self._running = None
        self.buffers.shrink(number)

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
        runnable = self._prepared.get((plan.version, number)) or self._made_for(plan, number)
        leaves = running is not None and running.program.is_one_pipeline != runnable.program.is_one_pipeline
        if running is None or leaves or plan.version != self.plan.version:
            self._context.transport.use_lanes(step, runnable.executor.program)
        self._prepared[plan.version, number] = self._running = runnable
        if not runnable.is_reserved:
            self._reserve(runnable.executor, number)
            runnable.is_reserved = True
        self.plan = plan
        self._forget(lambda version, _: version < plan.version)
        return runnable.executor

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
        rank = self._context.transport.rank
        program = self._lowering.of_forwards(forwards, self.plan.case.cost, rank)
        _verify(program, rank)
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
        *,
        is_open: bool = False,
    ) -> Executor:
        context = self._context
        carrier = self._carrier_of(lowered)
        first, last = self._compiled.train[0], self._compiled.train[-1]
        batch = BatchShapes(StrideNumbers(first.inputs), StrideNumbers(last.targets), last.outputs)
        timeout = context.options.timeout
        mark, told = context.clock.mark, context.monitor
        messages = ProgramMessages(lowered, shapes, batch, carrier, told, timeout, mark, code, ends_early=is_open)
        beside = context.pacing, told, mark, context.turns, context.failures
        tail, mode = self._parts.tail, context.options.within_step
        if not is_open or tail is None or mode is None:
            return Executor(lowered, carrier.rank, stages, messages, *beside)
        executor = OpenExecutor(lowered, carrier.rank, stages, messages, *beside)
        microbatches = self._initial.program.microbatches
        executor.follow(OpenTail(tail, 0 if mode.more_of_own(microbatches) else microbatches))
        return executor

    def _reserve(self, executor: Executor, number: int) -> None:
        if not executor.program.is_one_pipeline:
            self.buffers.grow(Counter(executor.receive_counts) + self._parts.receive_counts_of(executor))
            return
        counts = Counter(executor.receive_counts)
        if number not in (FIRST, _HOME):  # the losses of the first shape are always reserved
            counts += self._shapes[number].losses.receive_counts()
        others = Counter() if self._parts.tail is None else self._parts.tail.receive_counts()
        self.buffers.grow(by_worker(self._context.transport, counts) + others, number)

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

    def _verified(self, plan: Plan, number: int) -> _Runnable:
        runnable = self._made_for(plan, number)
        program = runnable.executor.program
        _verify(program, self._carrier_of(program).rank, self._changing)
        return runnable

    def _carrier_of(self, program: Program) -> Transport:
        """Return what carries a program's messages, and numbers its ranks."""
        return self._context.transport if program.is_one_pipeline else self._context.job

    def _made_for(self, plan: Plan, number: int) -> _Runnable:
        of = self._shapes[FIRST if number == _HOME else number]
        program = self._at_home if number == _HOME else of.shape.program_for(plan)
        stages: Mapping[tuple[int, int], Stage] = self._parts.stages_of(program)
        if number not in (FIRST, _HOME):
            stages = {(0, stage): one for stage, one in of.stages.items()}
        messages = self._messages(plan, of.shape)
        lowered = self._lowering.of_plan(plan, self._ordered(program, number), self._carrier_of(program).rank)
        executor = self._executor(lowered, stages, messages, of.shape.code, is_open=number == FIRST)
        if self._context.device.type == "cuda":
            executor.make_ready()
        return _Runnable(plan.version, number, program, executor)

    def _ordered(self, program: Program, number: int) -> Program:
        """Return the program that runs for a program of a shape: with an open tail where other microbatches may follow."""
        mode = self._context.options.within_step
        if mode is None or self._parts.tail is None or number != FIRST:
            return program
        return open_tail(program, mode.extra_slots(program.microbatches))

    def _messages(self, plan: Plan, shape: StepShape) -> list[MessageShapes]:
        def of(compiled: CompiledStages) -> list[MessageShapes]:
            return [
                MessageShapes(graphs.outputs, graphs.grad_inputs, *handed_over)
                for graphs, handed_over in zip(round_edges(compiled.train, plan.rounded), self._handed_over, strict=True)
            ]

        return shape.messages(of)


def _verify(lowered: Program, rank: int, changing: Collection[int] = ()) -> None:
    """Verify a program and the messages that a rank has inserted; each rank does its own."""
    verify_whole(lowered, changing=changing)
    verify_messages(lowered, rank, changing=changing)
