"""The end of a training step: all between the last W and the optimizer.

What replicas have computed goes in. It is decided what the step's gradients are made of and by what they are divided. Then
``grad`` is filled, and hooks run. Hooks are user code, and can't be undone. So nothing that a user sees has changed before
:meth:`StepEnd.commit`. A step that fails earlier leaves every ``grad`` as it was, and could run again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Final, Protocol

from torch import Tensor

from adaptra.collectives.late_ranks import LateRanks, SumChoice
from adaptra.collectives.rounds import ALGORITHMS
from adaptra.planning.synchrony.noise_scale import TermNorms
from adaptra.runtime.data_parallel.accumulators import Accumulators
from adaptra.runtime.data_parallel.arrivals import Arrivals
from adaptra.runtime.data_parallel.gradient_averaging import MEASURED_BYTES
from adaptra.runtime.data_parallel.gradient_sum import GradientSum
from adaptra.runtime.data_parallel.shards import Shards
from adaptra.runtime.data_parallel.sum_norms import SumNorms
from adaptra.runtime.data_parallel.told_norms import ToldNorms
from adaptra.runtime.devices.device_clock import Mark
from adaptra.runtime.measuring.monitor import Monitor
from adaptra.runtime.options.reduce_options import Reduce
from adaptra.runtime.synchrony.deferral import Deferral
from adaptra.runtime.worker.ends.replica_losses import ReplicaLosses
from adaptra.runtime.worker.stages.gradient_hooks import GradientHooks
from adaptra.runtime.worker.stages.loss_reduction import Reduction, total_weight


@dataclass(frozen=True, slots=True)
class Contribution:
    """What one replica has computed in a step. Its sums of gradients are in :attr:`StepEnd.sums`.

    Attributes:
        replica: The replica.
        rows: The rows of each microbatch that is in the sums.
        losses: The losses of these microbatches.
        loss_scale: The factor of the loss in the gradients.
    """

    replica: int
    rows: tuple[int, ...]
    losses: Tensor
    loss_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Certificate:
    """What the ranks of a job have agreed on for a step: it is the same on all of them.

    Attributes:
        losses: The losses of the microbatches that are in the gradients.
        divisor: What the sums of gradients are divided by, or None for nothing. If it is not a finite number above zero, the
            step has no gradients.
        rows: The rows of all replicas that add up their gradients in each step; 0 where nobody asks.
    """

    losses: Tensor
    divisor: float | None
    rows: int = 0

    @property
    def has_gradients(self) -> bool:
        """Whether the step changes ``grad``."""
        return self.divisor is None or 0 < self.divisor < float("inf")


class StepEnd(Protocol):
    """One rank's part in the end of each step."""

    @property
    def sums(self) -> Accumulators:
        """The gradients of the step that is under way."""
        ...

    @property
    def complete(self) -> Callable[[str], None] | None:
        """Called with the name of a parameter whose gradient is complete; None if nobody needs it before the last W ends."""
        ...

    @property
    def choice(self) -> SumChoice | None:
        """How the gradients of the next step are added; None where only one way is possible."""
        ...

    @property
    def why(self) -> str | None:
        """Why they are added so, in words; None where that was not to be chosen."""
        ...

    @property
    def norms(self) -> tuple[TermNorms, tuple[float, ...]] | None:
        """The squared norms of the last step's gradients, and the samples of each replica's; None where not measured."""
        ...

    def begin(self) -> None:
        """Begin a step."""
        ...

    def shard(self, shards: Shards) -> None:
        """Bring sums to the owners of their parameters, from the next step on."""
        ...

    def adding(self) -> AbstractContextManager[None]:
        """Enclose the step's program, whose last W may begin the sum over replicas."""
        ...

    def reduce(self) -> None:
        """Wait for the sum over replicas."""
        ...

    def certify(self, contribution: Contribution) -> Certificate:
        """Agree on what is in the step's gradients, and by what they are divided."""
        ...

    def commit(self, certificate: Certificate) -> None:
        """Fill ``grad``, and run hooks."""
        ...

    def close(self) -> None:
        """End the sum over replicas. There is no later step."""
        ...


class AllAtOnce:
    """The end of steps whose gradients consist of all microbatches of all replicas.

    Args:
        parameters: The trainable parameters of this rank's stages by name.
        copied: The names of those that stages of several ranks use, each with a copy of its own.
        late: The names of those to which several stages add.
        losses: Combines losses over the replicas.
        reduce: How gradients are added up over them.
        monitor: Records how long that took.
        mark: The present time on this rank's device, as :meth:`adaptra.runtime.devices.device_clock.OpClock.mark`.
        fills: Whether this worker fills ``grad``. One of the workers does that have the same parameters.
        measured: The names of the parameters whose norms are measured for the gradient noise scale; None for no measurement.

    Attributes:
        sums: The gradients of the step that is under way.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        copied: Collection[str],
        late: Collection[str],
        losses: ReplicaLosses,
        reduce: Reduce,
        monitor: Monitor,
        mark: Callable[[], Mark],
        *,
        fills: bool = True,
        measured: Collection[str] | None = None,
    ) -> None:
        self.sums: Final = Accumulators(parameters)
        self._hooks = GradientHooks(parameters, copied)
        self._losses = losses
        self._monitor = monitor
        self._fills = fills
        self._is_auto = reduce.is_auto
        self._sum: GradientSum | None = None
        self._shards: Shards | None = None
        self._arrivals: Arrivals | None = None
        self._norms: SumNorms | None = None
        self._told: ToldNorms | None = None
        self._deferral: Deferral | None = None
        if (replicas := losses.replicas).count > 1:
            nbytes = sum(one.nbytes for one in parameters.values())
            if reduce.bucket is None or reduce.is_auto:
                replicas.measure()
            bucket = reduce.bucket or replicas.best_bucket(nbytes)
            replicas.add_by(ALGORITHMS[reduce.of_losses], limit=bucket, dtype=reduce.dtype)
            # On a GPU the host does not know when gradients are there.
            is_seen = all(one.is_cpu for one in parameters.values())
            if reduce.is_auto and replicas.ports is not None and is_seen and replicas.count > 2 and nbytes:
                memory = nbytes if reduce.memory is None else reduce.memory
                late_ranks = LateRanks(nbytes, replicas.ports, memory, reduce.bucket, MEASURED_BYTES)
                self._arrivals = Arrivals(replicas, late_ranks)
            is_mean = losses.reduction is Reduction.MEAN
            if measured is not None:
                self._norms = SumNorms(measured, self.sums, replicas.index, replicas.count)
                self._told = ToldNorms(replicas.index, replicas.count, of_sums=not is_mean)
            self._sum = GradientSum(replicas, self.sums, late, bucket, is_mean, mark, self._norms)

    @property
    def complete(self) -> Callable[[str], None] | None:
        """As of :class:`StepEnd`."""
        return self._sum.complete if self._sum is not None and self._sum.overlaps else None

    @property
    def choice(self) -> SumChoice | None:
        """As of :class:`StepEnd`."""
        return None if self._arrivals is None else self._arrivals.choice

    @property
    def why(self) -> str | None:
        """As of :class:`StepEnd`."""
        if self._shards is not None:
            return str(self._shards)
        if not self._is_auto:
            return None
        if self._arrivals is None:
            return "direct, as late replicas change nothing where there are two, and are seen only where gradients are on CPUs"
        return str(self._arrivals)

    @property
    def norms(self) -> tuple[TermNorms, tuple[float, ...]] | None:
        """As of :class:`StepEnd`."""
        return None if self._told is None or self._told.norms is None else (self._told.norms, self._told.samples)

    def begin(self) -> None:
        """Begin a step.

        Autograd adds microbatches to earlier gradients one by one. What is divided, or given to a hook, is the step's alone.

        Raises:
            OptionError: A parameter with copies on several ranks has a hook, or is in no sharded optimizer where others are;
                names it.
            PeerLostError: Another replica has failed.
        """
        self._hooks.begin_step()
        defers = self._deferral is not None and self._deferral.deadline.quorum < 1
        is_divided = defers or self._losses.reduction is not Reduction.MEAN
        aside = self.sums.parameters if is_divided else self._hooks.names
        if self._shards is None:
            self.sums.begin_step(aside)
        else:
            self._shards.require_all()
            self.sums.begin_step(earlier=self._shards.begin_step(aside))
        if self._sum is not None:
            self._sum.begin_step()

    def shard(self, shards: Shards) -> None:
        """Bring sums to the owners of their parameters, from the next step on, and leave ``grad`` of others without one."""
        self._shards = shards
        if self._arrivals is not None:  # who owns what is settled, so nothing is to be chosen
            self._arrivals = None
            self._losses.replicas.add_gradients_as_losses()
        for name in self.sums.parameters.keys() & {*shards.elsewhere}:
            self.sums.parameters[name].grad = None
        if self._sum is not None and shards.owners.keys() >= self.sums.parameters.keys():
            self._sum.bring_to(shards.owners)

    def defer(self, deferral: Deferral) -> None:
        """Divide sums by the microbatches that are in them, before the first step, as others are deferred to the next one."""
        self._deferral = deferral

    @contextmanager
    def adding(self) -> Generator[None]:
        """Enclose the step's program. If it fails, a sum that has begun does not wait for the rest."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def reduce(self) -> None:
        """Wait for the sum over replicas. Stages that end later may still compute.

        Raises:
            PeerLostError: Another replica has failed.
        """
        if self._sum is not None:
            began, ended, nbytes = self._sum.end_step()
            self._monitor.reduce(began, ended, nbytes)
            if self._arrivals is not None:
                self._arrivals.take(began, ended)

    def certify(self, contribution: Contribution) -> Certificate:
        """Combine the losses of all replicas, which have all contributed.

        Raises:
            BatchError: Replicas have batches of different numbers of rows, and the mean of their losses is wanted.
            OptionError: Not the same parameters have hooks in all replicas.
            ControlError: Replicas would add the next step's gradients in different ways.
        """
        own, is_weighted = contribution.losses, self._losses.reduction is Reduction.WEIGHTED
        if self._told is not None and self._norms is not None:
            samples = total_weight(own) if is_weighted else sum(contribution.rows)
            self._told.take(self._norms.read(), samples, contribution.loss_scale)
        tells = [one for one in (self._arrivals, self._told, self._deferral) if one is not None]
        losses, rows = self._losses.combine(contribution.replica, contribution.rows, own, self._hooks, tells)
        if self._arrivals is not None and self._arrivals.last is not None:
            self._monitor.chose(self._arrivals.last)
        divisor = total_weight(losses) if is_weighted else None
        if self._deferral is not None:
            losses = losses[: max(self._deferral.counts)]
            if self._losses.reduction is Reduction.MEAN:
                # Each microbatch has the weight of one in a whole step. The losses' mean is to be that of what is in the step.
                share = self._deferral.share
                divisor = None if share == 1.0 else share
                losses = losses * (len(losses) / self._deferral.mean_count)
        return Certificate(losses, divisor, rows)

    def commit(self, certificate: Certificate) -> None:
        """Divide the sums, fill ``grad``, and run hooks."""
        if not (certificate.has_gradients and self._fills):
            self.sums.discard()
        elif certificate.divisor is not None:
            self.sums.divide(certificate.divisor)
        if self._shards is not None:
            self.sums.drop(self._shards.elsewhere)
        self.sums.fill(self._hooks.names)

    def close(self) -> None:
        """End the thread that adds up gradients, if there is one."""
        if self._sum is not None:
            self._sum.close()
