"""The losses of all microbatches, over all replicas, and what replicas compare with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor

from adaptra.errors import BatchError
from adaptra.runtime.data_parallel.equal_numbers import BITS, are_equal, bits_of, mean_number
from adaptra.runtime.data_parallel.gradient_averaging import Replicas
from adaptra.runtime.data_parallel.told_norms import BesideLosses
from adaptra.runtime.worker.stages.gradient_hooks import GradientHooks
from adaptra.runtime.worker.stages.loss_reduction import Reduction


@dataclass(frozen=True, slots=True)
class ReplicaLosses:
    """Combines the losses of replicas.

    Attributes:
        replicas: The ranks that have copies of these stages.
        reduction: The reduction of the losses of microbatches and replicas to that of the batch.
        microbatches: The most microbatches of a replica.
    """

    replicas: Replicas
    reduction: Reduction
    microbatches: int

    def combine(
        self,
        replica: int,
        rows: tuple[int, ...],
        losses: Tensor,
        hooks: GradientHooks | None = None,
        tells: Sequence[BesideLosses] = (),
    ) -> tuple[Tensor, int]:
        """Return the losses of all microbatches, over all replicas, and the rows of all replicas.

        Replicas may have different numbers of microbatches, with zeros for those that one lacks.

        Args:
            replica: This replica.
            rows: The rows of its microbatches.
            losses: The losses of its microbatches.
            hooks: Those that all replicas must have in this step. None in an evaluation, which is aside from steps.
            tells: What replicas tell each other beside their losses.

        Raises:
            BatchError: Replicas have batches of different numbers of rows, and the mean of their losses is wanted.
            OptionError: Not the same parameters have hooks in all replicas.
            ControlError: They would make the next sum in different ways.
        """
        if self.replicas.count == 1:
            return losses, sum(rows)
        mean, own = self.reduction is Reduction.MEAN, len(losses)
        if own < self.microbatches:
            losses = torch.cat([losses, losses.new_zeros(self.microbatches - own, *losses.shape[1:])])
        compared = (sum(rows), *(() if hooks is None else hooks.marks()))
        marks = torch.tensor(bits_of(compared), dtype=torch.float32)  # on the host, where they are read
        told = [one.told() for one in tells]
        combined = self.replicas.combine_losses(losses, mean=mean, aside=hooks is None, beside=[marks, *told])
        for one, all_told in zip(tells, told, strict=True):
            one.meet(all_told, mean=mean)
        means = (marks if mean else marks / self.replicas.count).tolist()
        if mean and not are_equal(means[:BITS]):
            raise BatchError(
                f"replica {replica} has a batch of {sum(rows)} rows, and others have other numbers, "
                f"{mean_number(means[:BITS]):g} on average: expected the same number on all replicas, as reduction='mean' "
                "gives each replica the same weight; reduction='sum' and 'weighted' take any numbers"
            )
        if hooks is not None:
            hooks.check_marks(means[BITS:], replica)
        total = sum(rows) * self.replicas.count if mean else round(mean_number(marks[:BITS].tolist()))
        return combined[:own] if mean else combined, total

    def of_batch(self, losses: Tensor, shares: Sequence[float]) -> float | None:
        """Return the loss of the batch of all replicas, from their combined losses; None if it is not finite.

        Args:
            losses: The combined losses of microbatches.
            shares: As of :meth:`.loss_reduction.Reduction.of_batch`.
        """
        loss = self.reduction.of_batch(losses.double(), shares).item()
        return loss if isfinite(loss) else None
