"""A running pipeline: its parts in this process, each with one subject."""

from __future__ import annotations

from collections.abc import Sequence

from adaptra.errors import OptionError
from adaptra.frontend.followed.following import Following
from adaptra.frontend.losses.batch_look import BatchLook
from adaptra.frontend.planned.stage_planning import PipelineSpec
from adaptra.frontend.running.batches import Batches
from adaptra.frontend.running.held_state import HeldState
from adaptra.frontend.running.hosted_batches import HostedBatches
from adaptra.frontend.running.local_workers import LocalWorkers
from adaptra.frontend.running.mode_trial import ModeTrial
from adaptra.frontend.running.next_epoch import NextEpoch
from adaptra.frontend.running.next_workers import NextWorkers
from adaptra.frontend.running.reconfiguration import Reconfiguration
from adaptra.frontend.running.redone_calls import RedoneCalls
from adaptra.frontend.running.synchrony_changes import SynchronyChanges
from adaptra.frontend.saved.model_names import ModelNames
from adaptra.frontend.shapes.recompile import Recompile
from adaptra.graph import CompiledStages
from adaptra.planning.remedies.bandwidth_remedies import BandwidthOptions
from adaptra.planning.synchrony.modes import BesideExact
from adaptra.runtime.launch.job import Launch
from adaptra.runtime.worker.worker import Worker


class Session:
    """A compiled pipeline that runs in this process.

    Args:
        spec: Plans a pipeline after a change of cut points.
        local: The workers of this process.
        names: What the model's state_dict has beside its tensors.
        recompile: Compiles the model for batches of other shapes; None if it can't be.
        look: Looks at each batch of a step; None if no mean of microbatches is taken.
        following: Notices changes of the model; None if the caller does.

    Attributes:
        local: As given: calls of all workers, and the end after a failure.
        batches: The batches of this process's home replica, in microbatches.
        hosted_batches: Those of all replicas whose workers it hosts.
        held: The state of this process's stages.
        changes: Changes of roles, of cut points and of the model.
        synchrony: Changes of what an update waits for.
        look: As given.
        reduction: How the losses of microbatches are reduced to that of the batch.
        microbatches: Microbatches per step.
    """

    def __init__(
        self,
        spec: PipelineSpec,
        local: LocalWorkers,
        names: ModelNames,
        recompile: Recompile | None = None,
        look: BatchLook | None = None,
        following: Following | None = None,
    ) -> None:
        self._spec = spec
        self.local = local
        self.look = look
        self.reduction = spec.reduction
        self.microbatches = spec.microbatches
        self.batches = home = Batches(spec, local, None, recompile)
        self.hosted_batches = HostedBatches(local, home, lambda replica: Batches(spec, local, replica, home.recompile))
        self.held = HeldState(local, names, spec.options.timeout)
        next_workers = NextWorkers(spec.options, local, self.hosted_batches)
        self.synchrony = SynchronyChanges(spec, local, next_workers)
        self.changes = Reconfiguration(spec, local, self.hosted_batches, next_workers, self.held, following)
        if (keeper := local.launched.job.keeper) is not None:
            local.redone = RedoneCalls(local, keeper, NextEpoch(spec, local, next_workers).enter)

    @property
    def workers(self) -> tuple[Worker, ...]:
        """One worker per rank of this process, in order of ranks."""
        return self.local.workers

    @property
    def launched(self) -> Launch:
        """The ranks of this process."""
        return self.local.launched

    @property
    def is_launched(self) -> bool:
        """Whether the ranks are processes, each with a part of what a step returns."""
        return not self.launched.in_threads

    @property
    def compiled(self) -> CompiledStages:
        """The stages."""
        return self.local.compiled

    def require_outputs_at_home(self, outputs: bool | str) -> None:
        """Refuse outputs that no process would return, since the last stage of its replica is a guest elsewhere.

        Raises:
            OptionError: The call would return outputs of the last stage's rank alone, and a replica has none; names it.
        """
        world = self.launched.world
        if not outputs or outputs == "all" or self.launched.in_threads:
            return
        for replica in range(world.replicas):
            worker = world.pipeline(replica)[self._spec.placement[-1]]
            if world.is_guest(worker):
                raise OptionError(
                    f"outputs: the last stage of replica {replica} is a guest of rank {world.hosts[worker]}, which has the "
                    "batch of another replica: expected outputs='all', or none"
                )

    @property
    def is_deterministic(self) -> bool:
        """Whether this process has to run deterministic kernels only."""
        return self._spec.options.deterministic

    @property
    def has_padded_ops(self) -> bool:
        """Whether ops sleep: on emulated devices, or by faults that slow workers."""
        options = self._spec.options
        return options.emulate is not None or any(one.split()[:1] == ["slow"] for one in options.faults)

    @property
    def bandwidth(self) -> BandwidthOptions:
        """The remedies available against edges whose bandwidth limits the step."""
        return self.local.planned.bandwidth

    @property
    def alone(self) -> tuple[str, ...]:
        """Lines that say which microbatches no other replica computes, and why."""
        return self.local.planned.alone

    @property
    def training_step(self) -> int:
        """The number of steps of the training, including those of earlier pipelines that it continues."""
        return self.workers[0].numbers.training_step

    def go_on_at(self, step: int, updates: int | None = None) -> None:
        """Set the number of the next step of the training, on which random numbers depend.

        Args:
            step: That number.
            updates: The number of updates of the parameters before it; None for as many as steps.
        """
        for worker in self.workers:
            worker.go_on_at(step, step if updates is None else updates)

    @property
    def allowed_modes(self) -> Sequence[BesideExact]:
        """The modes that trials may choose by the options; none unless these say so."""
        auto = self._spec.options.auto
        return () if auto is None else auto.allow

    def trial(self, call: str) -> ModeTrial:
        """Return what tries modes of synchronisation for a method of the pipeline."""
        return ModeTrial(self.local, self.synchrony, self.reduction, self._spec.options.timeout, call)

    def close(self) -> None:
        """End all workers. It may be called again."""
        self.local.close()
