"""The replicas of a stage tell each other when they came to a sum, beside their losses, and decide alike how to make the next.

No message is added. The times need no common clock. All replicas have the combined losses of a step within a message of each
other. Each counts from then until it begins its next sum. Between are its forwards and backwards, and what its user does.

With its time each replica tells how long its sum took, and the digest of what it decides from. So all replicas know before they
use a decision that it is the same on all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from adaptra.collectives.algorithms import algorithm_of
from adaptra.collectives.choice import SumWay
from adaptra.collectives.late_ranks import LateRanks, SumChoice
from adaptra.errors import ControlError
from adaptra.runtime.data_parallel.gradient_averaging import Replicas

_HALF: Final = 16
"""The bits of a digest that travel as one number, which float32 holds exactly."""


class Arrivals:
    """One replica's part in the choice of how gradients are added.

    Args:
        replicas: The ranks that have copies of these stages, at least three.
        late: Decides; one of the same arguments on all of them.
        now: The time, in seconds of the clock that marks the begin of a sum.

    Attributes:
        choice: How the next sum is made.
        last: How that of the last step was made, and when the replicas came to it; None before that is known.
    """

    def __init__(self, replicas: Replicas, late: LateRanks, now: Callable[[], float] = time.monotonic) -> None:
        self._replicas = replicas
        self._late = late
        self._now = now
        self._met: float | None = None
        self._began: float | None = None
        self._took = 0.0
        self.last: SumChoice | None = None
        self._set(late.choice.way)

    def __str__(self) -> str:
        """What the choice is, and what it depends on."""
        return str(self._late)

    @property
    def choice(self) -> SumChoice:
        """As described by the class."""
        return self._late.choice

    def take(self, began: float, ended: float) -> None:
        """Take the times at which this replica began and ended the sum of a step."""
        self._began, self._took = began, ended - began

    def told(self) -> Tensor:
        """Return what this replica tells the others, for a sum over all: (4, replicas), zeros but for its own column.

        It has the seconds from the last meeting to the begin of the sum, those of the sum, and the halves of the digest.
        """
        own = torch.zeros(4, self._replicas.count)
        since = 0.0 if self._met is None or self._began is None else self._began - self._met
        digest = self._late.digest
        column = [since, self._took, float(digest >> _HALF), float(digest % (1 << _HALF))]
        own[:, self._replicas.index] = torch.tensor(column)
        return own

    def meet(self, told: Tensor, *, mean: bool) -> None:
        """Take what all replicas have told, and set how the next sum is made. At times they measure their links for it.

        Args:
            told: The sum of :meth:`told` over them.
            mean: Whether it is their mean instead.

        Raises:
            ControlError: A replica decides from something else; names it.
            PeerLostError: Another replica has failed.
        """
        is_first, self._met = self._met is None, self._now()
        scale = self._replicas.count if mean else 1
        arrivals, seconds, *halves = ([scale * one for one in row] for row in told.tolist())
        digests = [(round(high) << _HALF) + round(low) for high, low in zip(*halves, strict=True)]
        self._require_one(digests)
        if is_first:
            return
        before = self._late.choice
        self._late.observe(arrivals, min(seconds))
        if self._late.asks:
            self._replicas.measure()
            assert self._replicas.ports is not None, "they were measured before"
            self._late.measured(self._replicas.ports)
            self._met = self._now()
        self.last = replace(self.choice, way=before.way, wrong_guess=before.wrong_guess)
        if self.choice.way != before.way:
            self._set(self.choice.way)

    def _set(self, way: SumWay) -> None:
        if not way.late:
            self._replicas.add_gradients_as_losses()
            return
        algorithm = algorithm_of(way.algorithm, way.late, way.narrow)
        self._replicas.add_gradients_by(algorithm, self._late.bucket_of(way))

    def _require_one(self, digests: list[int]) -> None:
        own, index = digests[self._replicas.index], self._replicas.index
        for other, digest in enumerate(digests):
            if digest != own:
                raise ControlError(
                    f"replicas {index} and {other} would add gradients in different ways: replica {index} by "
                    f"{self.choice.way} (digest {own:08x}), replica {other} by digest {digest:08x}: expected the same "
                    "parameters, links, options and steps on all replicas of a stage"
                )
