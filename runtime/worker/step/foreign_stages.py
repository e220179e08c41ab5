"""Stages of other replicas, some of whose microbatches this rank computes, and those of its own replica that others compute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from adaptra.program import Program
from adaptra.program.routing import Routing
from adaptra.runtime.data_parallel.accumulators import Accumulators
from adaptra.runtime.outputs.step_outputs import StepOutputs
from adaptra.runtime.step_messages.shared_gradients import AwayFromHome, Gradients, SharedParameter
from adaptra.runtime.worker.stages.stage import Stage, TrainingStage
from adaptra.runtime.worker.step.rank_context import RankContext
from adaptra.runtime.worker.step.stage_factory import StageFactory


class _ForeignStage(NamedTuple):
    """One of them, with gradients of its own."""

    stage: TrainingStage
    gradients: Gradients
    sums: Accumulators


class ForeignStages:
    """Those of one rank. They have the same parameters, and sums of weight gradients of their own until these are handed over.

    Args:
        factory: Makes them.
        context: This rank.
        shared: The parameters that several stages use.
    """

    def __init__(self, factory: StageFactory, context: RankContext, shared: Sequence[SharedParameter]) -> None:
        self._factory = factory
        self._context = context
        self._shared = shared
        self._made: dict[tuple[int, int], _ForeignStage] = {}

    def beside(self, home: Mapping[int, Stage], program: Program) -> dict[tuple[int, int], Stage]:
        """Return this rank's stages by replica and number, as the ops of a program name them.

        Args:
            home: Those of this replica by number.
            program: The program.
        """
        if program.is_one_pipeline:
            return {(0, number): stage for number, stage in home.items()}
        stages = {(self._context.replica, number): stage for number, stage in home.items()}
        for op in program.orders[self._context.worker]:
            if op.kind.is_compute and (op.replica, op.stage) not in stages:
                stages[op.replica, op.stage] = self._stage(program.routing, op.replica, op.stage)
        return stages

    def away_from_home(self, program: Program) -> AwayFromHome | None:
        """Return which microbatches of this replica others compute on stages that share parameters; None if there are none."""
        routing, replica = program.routing, self._context.replica
        if program.is_one_pipeline or not self._shared:
            return None
        workers = {
            (stage, microbatch): holder
            for stage in {stage for one in self._shared for stage in one.stages}
            for microbatch in range(program.microbatches)
            if (holder := routing.holder(replica, stage, microbatch)) != routing.workers[replica][stage]
        }
        return AwayFromHome(replica, workers, self._context.job) if workers else None

    def begin_step(self, step: int, program: Program, home: Accumulators, loss_scale: float, steps_before: int) -> None:
        """Start a step.

        Args:
            step: The step's number.
            program: The step's program.
            home: This replica's sums. Earlier gradients are the same in all replicas, since their mean or sum was taken.
            loss_scale, steps_before: As of :meth:`adaptra.runtime.worker.stages.stage.TrainingStage.begin_step`.
        """
        for (replica, number), foreign in self._made.items():
            begins = not program.is_one_pipeline and program.holder(replica, number, 0) == self._context.worker
            foreign.stage.begin_step(loss_scale, steps_before)
            foreign.sums.begin_as(home if begins else None)
            foreign.gradients.begin_step(step)

    def keep_outputs(self, replica: int, outputs: StepOutputs) -> None:
        """Have ``outputs`` take the model's outputs of another replica from now on in this step."""
        self._made[replica, self._factory.last].stage.keep_outputs(outputs)

    def _stage(self, routing: Routing, replica: int, number: int) -> TrainingStage:
        if (replica, number) not in self._made:
            context, factory = self._context, self._factory
            sums = Accumulators({name: factory.state[name] for name in factory.compiled.train[number].trainable})
            homes = [-1 if worker is None else worker for worker in routing.workers[replica]]
            timeout = context.options.timeout
            gradients = Gradients(context.job.rank, sums, self._shared, homes, context.job, timeout, foreign=(replica, number))
            self._made[replica, number] = _ForeignStage(factory.foreign(replica, number, gradients), gradients, sums)
        return self._made[replica, number].stage
