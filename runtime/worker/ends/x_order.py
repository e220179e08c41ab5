"""X-order (STAR): an update happens when some replicas have reported, and gradients of the others are in later ones.

A replica reports at the end of its step. The first rank of its pipeline votes for the next update. It tells the others who is
in it, so that is the same on all stages. What the replicas in it have computed is added in their order. Each of them then
steps its optimizer, and goes on with the parameters after this update::

    replica 0   step ─┬─ update 2 ── step ─┬─ update 3 ──
    replica 1   step ─┘                    │
    replica 2   step, a slow one ──────────┘  takes the state after update 2, and is in update 3 with a gradient of age 1

One that was not in the update before takes the parameters and the optimizer state after it from a replica that has them. So
all replicas in an update make it of the same state, and have the same bits after it. At the first update all take the state of
replica 0.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed import Store

from adaptra.collectives.late_ranks import SumChoice
from adaptra.collectives.rounds import ALGORITHMS
from adaptra.errors import StateError
from adaptra.planning.synchrony.modes import XOrder
from adaptra.planning.synchrony.noise_scale import TermNorms
from adaptra.runtime.control_store.signed_store import under
from adaptra.runtime.data_parallel.accumulators import Accumulators
from adaptra.runtime.data_parallel.equal_numbers import bits_of
from adaptra.runtime.data_parallel.shards import Shards
from adaptra.runtime.data_parallel.sites import Sites
from adaptra.runtime.exchange.state_transfer import Handover
from adaptra.runtime.options.reduce_options import Reduce
from adaptra.runtime.synchrony.update_reports import Update, UpdateReports
from adaptra.runtime.synchrony.updated_state import UpdatedState
from adaptra.runtime.worker.ends.replica_losses import ReplicaLosses
from adaptra.runtime.worker.ends.step_end import Certificate, Contribution
from adaptra.runtime.worker.stages.gradient_hooks import GradientHooks
from adaptra.runtime.worker.stages.loss_reduction import Reduction, total_weight


class XOrderSteps:
    """One rank's end of steps whose updates have the gradients of some replicas. Used by the thread that runs the steps.

    Args:
        order: How many replicas an update has, and how old gradients may be.
        parameters: The trainable parameters of this rank's stages by name.
        copied: The names of those that stages of several ranks use, each with a copy of its own.
        losses: How losses of replicas are reduced, and the most microbatches of a replica.
        reduce: How gradients are added up.
        sites: The ranks with the same stages in other replicas.
        store: The keys of updates, shared by all replicas.
        rank: This rank in its pipeline, whose first one votes.

    Attributes:
        sums: The gradients of the step that is under way.
        log: This replica's updates in order: who was in each, and whose state it took.
        updates: The number of the last update that this rank has, or of the one that its optimizer is to make. Exchanges of
            all have numbers, too.
        last: That update; None before the first one.
    """

    def __init__(
        self,
        order: XOrder,
        parameters: Mapping[str, Tensor],
        copied: Collection[str],
        losses: ReplicaLosses,
        reduce: Reduce,
        sites: Sites,
        store: Store,
        rank: int,
    ) -> None:
        self.sums: Final = Accumulators(parameters)
        self.log: list[dict[str, Any]] = []
        self.updates = 0
        self.last: Update | None = None
        self._exchanges = 0
        self._order = order
        self._hooks = GradientHooks(parameters, copied)
        self._losses = losses
        self._reduce = reduce
        self._sites = sites
        self._reports = UpdateReports(order, sites, store, rank)
        self._optimizer = UpdatedState(parameters, sites, under(f"rank {rank}", store))
        self._next: tuple[Update, Handover | None] | None = None  # and the state that it begins with, where not this rank's
        self._began: float | None = None  # when the last update was decided; None before the first step, and after a pause

    def __str__(self) -> str:
        """How updates are made, and how far this replica is."""
        return f"updates in {self._order} of {self._sites.count} replicas: this one has {len(self.log)} of {self.updates}"

    @property
    def complete(self) -> Callable[[str], None] | None:
        """As of :class:`.step_end.StepEnd`."""
        return None

    @property
    def choice(self) -> SumChoice | None:
        """As of :class:`.step_end.StepEnd`."""
        return None

    @property
    def norms(self) -> tuple[TermNorms, tuple[float, ...]] | None:
        """As of :class:`.step_end.StepEnd`."""
        return None

    @property
    def why(self) -> str | None:
        """As of :class:`.step_end.StepEnd`."""
        return None

    @property
    def _reduction(self) -> Reduction:
        return self._losses.reduction

    @property
    def made(self) -> int:
        """The number of :attr:`updates` without exchanges of all, which change no parameter."""
        return self.updates - self._exchanges

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the state of this optimizer to replicas that lack an update, and look at its steps."""
        self._optimizer.attach(optimizer)

    def hand_over(self) -> None:
        """Give the state after the last update to replicas that lack it, in a call in which all replicas meet."""
        self._optimizer.hand_over()

    def begin(self) -> None:
        """Begin a step.

        Raises:
            PipelineError: No optimizer is attached, or it has not made the update of the step before.
            OptionError: A parameter with copies on several ranks has a hook; names it.
        """
        self._optimizer.require_step(f"pipe.step() under Options(synchrony={self._order!r})")
        self._hooks.begin_step()
        self.sums.begin_step(self.sums.parameters)
        if self._began is None:
            self._began = time.monotonic()

    def adding(self) -> AbstractContextManager[None]:
        """As of :class:`.step_end.StepEnd`."""
        return nullcontext()

    def reduce(self) -> None:
        """As of :class:`.step_end.StepEnd`. Nothing is added before it is known what is in the update."""

    def shard(self, shards: Shards) -> None:
        """As of :class:`.step_end.StepEnd`."""
        raise NotImplementedError(f"{shards}: replicas that update apart have no shards")

    def certify(self, contribution: Contribution) -> Certificate:
        """Report what this replica has computed, and add up what the replicas in its update have.

        Raises:
            StateError: A log is replayed that has no such update here.
            OptionError: Not the same parameters have hooks in the replicas of the update.
            PipelineError: A replica has left that alone had the last update.
            PeerLostError: A replica is lost.
        """
        assert contribution.loss_scale == 1.0, (
            "a gradient scaler is refused, as terms of an update would be of different scales"
        )
        losses, is_weighted = contribution.losses, self._reduction is Reduction.WEIGHTED
        weight = total_weight(losses) if is_weighted else float(sum(contribution.rows))
        assert self._began is not None, "a step has begun"
        update = self._reports.report(weight, self.updates, time.monotonic() - self._began)
        self.log.append(update.to_json())
        taken = None if update.source is None else self._optimizer.take(update.source, update.number - 1)
        weights = [vote.weight for vote in update.ballot.votes]
        losses = self._add(update, contribution)
        self._next, self._began = (update, taken), time.monotonic()
        share = len(weights) / self._sites.count if self._order.divide == "all" else 1.0
        divisor = sum(weights) if is_weighted else None
        if share < 1 and self._reduction is not Reduction.SUM:
            divisor = (1.0 if divisor is None else divisor) / share
        return Certificate(losses, divisor)

    def commit(self, certificate: Certificate) -> None:
        """Take the state that the update begins with, divide the sums, put them into ``grad``, and run hooks."""
        assert self._next is not None, "a step has run"
        update, taken = self._next
        self._next, self.updates, self.last = None, update.number, update
        self._optimizer.expect(update, taken)
        self._reports.have(update.number)
        if not certificate.has_gradients:  # of no replica: the step is refused, and its update changes nothing
            self._optimizer.keep()
            self.sums.discard()
            return
        if certificate.divisor is not None:
            self.sums.divide(certificate.divisor)
        for name in self._hooks.names:
            self.sums.parameters[name].grad = None
        self.sums.fill(self._hooks.names, replaces=True)

    def exchange_all(self) -> Update:
        """Wait for all replicas that are left, and take the state after the last update where this one lacks it.

        All ranks of the job call it, between two steps. Replicas that still make steps go on with updates until they come here.

        Raises:
            PipelineError: No optimizer is attached, or it has not made the update of the last step.
            PeerLostError: A replica is lost.
        """
        self._optimizer.require_step("pipe.exchange()")
        update = self._reports.meet(self.updates)
        self.log.append(update.to_json())
        taken = None if update.source is None else self._optimizer.take(update.source, update.number - 1)
        # Whoever has the state keeps it until all have it.
        self._combine(update, [torch.zeros(1)])
        self.updates, self.last, self._began = update.number, update, None
        self._exchanges += 1
        self._optimizer.expect(update, taken)
        self._optimizer.keep()
        self._reports.have(update.number)
        return update

    def require_equal(self, call: str) -> None:
        """Refuse a call unless all replicas have the same state.

        Raises:
            StateError: This one has made updates since the last exchange of all.
        """
        if self.last is not None and not all(vote.is_last for vote in self.last.ballot.votes):
            raise StateError(f"{call}: replicas may be at different updates: expected pipe.exchange() on all ranks before")

    def check_exchange(self) -> None:
        """Refuse an exchange of all at a point where the log that is replayed has none.

        Raises:
            StateError: It has none.
        """
        self._reports.check_next(is_last=True)

    def replay(self, log: Sequence[Any]) -> None:
        """Make the updates of a run whose :attr:`log` this is, from the next step on. All ranks give their own.

        Raises:
            StateError: It is no such log. Nothing changes then.
        """
        self._reports.replay(log, self.updates)

    def restart(self, check: Callable[[], None]) -> None:
        """Begin again at update 1, in which all replicas are. All ranks of the job call it, between two steps.

        Args:
            check: Raises the error that has ended this rank's waits, if there is one.
        """
        self.updates, self._exchanges, self.last, self._began = 0, 0, None, None
        self._reports.restart(check)
        self._optimizer.restart(check)

    def close(self) -> None:
        """Tell others that this replica has left, and hand over before what they lack."""
        self._reports.close()
        self._optimizer.close()

    def _add(self, update: Update, contribution: Contribution) -> Tensor:
        """Add up what the replicas in an update have computed, and compare which parameters have hooks.

        A mean is that over all rows. Replicas are at different steps, so their batches may have different numbers of these.

        Returns:
            The losses of the update, from those of this replica's microbatches.

        Raises:
            OptionError: Not the same ones have, so the replicas would make another update each.
        """
        losses, count = contribution.losses, len(update.ballot.votes)
        if count == 1:
            return losses
        is_mean, weights = self._reduction is Reduction.MEAN, {vote.site: vote.weight for vote in update.ballot.votes}
        is_uneven = is_mean and len({*weights.values()}) > 1
        names = [*self.sums.parameters]
        sums = [self.sums.total(name).to("cpu") for name in names]
        marks = torch.tensor(bits_of(self._hooks.marks()))
        combined = torch.zeros(max(len(losses), self._losses.microbatches), *losses.shape[1:], dtype=losses.dtype)
        combined[: len(losses)] = losses  # a copy, as these may still be under way to other ranks
        if is_uneven:
            share = weights[self._sites.index] * count / sum(weights.values())
            for one in sums:
                one.mul_(share)
            rows = torch.tensor(contribution.rows)
            combined[:] = (combined[: len(rows)].double() * rows).sum() / rows.sum() * share
        self._combine(update, [*sums, marks, combined])
        means = marks if is_mean else marks / count
        self._hooks.check_marks(means.tolist(), self._sites.index)
        for name, total in zip(names, sums, strict=True):
            if (own := self.sums.total(name)) is not total:  # of a GPU
                own.copy_(total)
        return (combined[: len(losses)] if is_mean else combined).to(losses.device)

    def _combine(self, update: Update, tensors: Sequence[Tensor]) -> None:
        self._sites.everyone.combine_among(
            update.ballot.sites,
            tensors,
            mean=self._reduction is Reduction.MEAN,
            algorithm=ALGORITHMS[self._reduce.of_losses],
            limit=self._reduce.bucket,
            dtype=self._reduce.dtype,
        )
