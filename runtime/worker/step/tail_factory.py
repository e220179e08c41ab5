"""Makes what a rank computes within a step of which it is not known before: other replicas' microbatches, or deferred ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from adaptra.planning.synchrony.modes import Deadline, Stealing
from adaptra.runtime.control_store.signed_store import under
from adaptra.runtime.synchrony.admissions import Admissions
from adaptra.runtime.synchrony.claims import Claims
from adaptra.runtime.synchrony.deferral import Deferral
from adaptra.runtime.synchrony.shared_batch import SharedBatch
from adaptra.runtime.synchrony.slots import AdmittedSlots, ClaimedSlots, ToldSlots
from adaptra.runtime.worker.stages.deferred_microbatches import DeferredMicrobatches
from adaptra.runtime.worker.stages.stage import Stage, TrainingStage
from adaptra.runtime.worker.stages.stolen_microbatches import StolenMicrobatches, StolenParts
from adaptra.runtime.worker.step.rank_context import RankContext
from adaptra.runtime.worker.step.stage_factory import StageFactory
from adaptra.runtime.world.world import WorkerId


class TailFactory:
    """Makes that of one rank, which has one stage.

    Args:
        context: This rank.
        factory: Makes stages of other replicas.
        stages: This rank's stages by number.
        microbatches: Microbatches per step.
    """

    def __init__(self, context: RankContext, factory: StageFactory, stages: Mapping[int, Stage], microbatches: int) -> None:
        self._context = context
        self._factory = factory
        ((self._number, stage),) = stages.items()
        self._stage = cast("TrainingStage", stage)
        self._microbatches = microbatches

    def deferred(self, deadline: Deadline) -> DeferredMicrobatches:
        """Return what computes the microbatches of steps that have a deadline."""
        context, own = self._context, (self._context.replica, self._microbatches)
        deferral = Deferral(deadline, context.replica, context.replicas.count, self._microbatches)
        if self._number:
            slots = self._told()
        else:
            admissions = Admissions(under(f"deadline/{context.world.epoch}", context.job.store), deferral)
            slots = AdmittedSlots(*own, context.placement, context.transport, admissions)
        return DeferredMicrobatches(deferral, self._microbatches, slots, self._stage)

    def stolen(self, stealing: Stealing) -> StolenMicrobatches:
        """Return what computes other replicas' microbatches, and adds what they have computed for this one."""
        context, factory, number = self._context, self._factory, self._number
        world, job, timeout, replica = context.world, context.job, context.options.timeout, context.replica
        stages, microbatches = factory.compiled.train, self._microbatches
        workers = world.column(world.seat(WorkerId(context.worker)).place)
        kept = min(len(stages), microbatches)

        first, last = number == 0, number == factory.last
        taken = stages[0].inputs if first else (), stages[-1].targets if last else ()
        batch = SharedBatch(number, *taken, range(kept, microbatches), workers, job, context.device, timeout)
        if not first:
            slots = self._told()
        else:
            claims = Claims(under(f"claims/{world.epoch}", job.store), replica, context.replicas.count, microbatches)
            own = replica, microbatches, context.placement, context.transport
            slots = ClaimedSlots(*own, stealing.extra_slots(microbatches), claims, batch.has)
        parts = StolenParts(
            self._stage,
            lambda other, gradients: factory.foreign(other, number, gradients),
            {name: factory.state[name] for name in stages[number].trainable},
            stages[number].contributions,
            batch,
            stages[-1].outputs if last else (),
        )
        return StolenMicrobatches(replica, number, kept, workers, slots, parts, job, timeout)

    def _told(self) -> ToldSlots:
        context = self._context
        source, timeout = context.placement[0], context.options.timeout
        return ToldSlots(context.replica, self._microbatches, self._number, source, context.transport, timeout)
