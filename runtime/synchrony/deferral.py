"""Which microbatches are in a step that has a deadline, and which are deferred to the next one, on all ranks alike.

Each replica takes its data in order: what is deferred comes first in the next step. So two numbers say all of a replica: how
many steps it has begun, and how many microbatches it has computed. Replicas tell each other the latter beside their losses.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from adaptra.errors import StateError
from adaptra.json_files import Fields
from adaptra.planning.synchrony.modes import Deadline

Counts = tuple[int, ...]
"""Of each replica, how many microbatches it has in a step."""


class Deferral:
    """One rank's. Used by the thread that runs the steps.

    Args:
        deadline: When no more microbatches begin.
        replica: This replica.
        replicas: The number of replicas.
        microbatches: The number of microbatches of each in a step.

    Attributes:
        deadline, replica: As given.
        log: What has been in each step: of each replica the number of its first microbatch in its data's order, and how many.
        defers_nothing: Whether the next step takes in all that this replica has.
    """

    def __init__(self, deadline: Deadline, replica: int, replicas: int, microbatches: int) -> None:
        self.deadline: Final = deadline
        self.replica: Final = replica
        self.log: list[dict[str, Any]] = []
        self.defers_nothing = False
        self._microbatches = microbatches
        self._steps = 0
        self._done = [0] * replicas
        self._own = 0
        self._replayed: deque[Counts] = deque()

    @property
    def deferred(self) -> Counts:
        """How many microbatches of each replica are deferred to the next step."""
        return tuple(self._steps * self._microbatches - done for done in self._done)

    @property
    def free(self) -> int:
        """How many microbatches of the next step are begun by whoever comes first, see :meth:`.modes.Deadline.free`."""
        return self.deadline.free(self._microbatches, self.deferred)

    @property
    def replayed(self) -> int | None:
        """How many of the next step's own microbatches this replica computes by the log; None if none is replayed."""
        return self._replayed[0][self.replica] - self.deferred[self.replica] if self._replayed else None

    @property
    def to_replay(self) -> int:
        """How many of the steps to come are given by the log that is replayed."""
        return len(self._replayed)

    def take(self, own: int) -> None:
        """Take how many of the step's own microbatches this replica has computed, beside all that were deferred."""
        self._own = own

    def told(self) -> Tensor:
        """Return what this replica tells, see :class:`adaptra.runtime.data_parallel.told_norms.BesideLosses`."""
        column = torch.zeros(1, len(self._done))
        column[0, self.replica] = self._own
        return column

    def meet(self, told: Tensor, *, mean: bool) -> None:
        """Take what all have told: the step ends with it."""
        factor = len(self._done) if mean else 1
        own = [round(factor * count) for count in told[0].tolist()]
        self._end([count + deferred for count, deferred in zip(own, self.deferred, strict=True)])

    @property
    def counts(self) -> Counts:
        """How many microbatches of each replica have been in the last step. All gradients are of that step's parameters."""
        return tuple(part["count"] for part in self.log[-1]["parts"])

    @property
    def mean_count(self) -> float:
        """The mean number of microbatches of a replica in the last step."""
        return sum(self.counts) / len(self._done)

    @property
    def share(self) -> float:
        """The microbatches of the last step, as a share of those of a step without a deadline."""
        return sum(self.counts) / (len(self._done) * self._microbatches)

    def replay(self, log: Sequence[Any]) -> None:
        """Have the same microbatches in each step as a run whose :attr:`log` this is, from the next step on.

        Raises:
            StateError: As :meth:`counts_of`. Nothing changes then.
        """
        self._replayed = deque(self.counts_of(log))

    def counts_of(self, log: Sequence[Any]) -> list[Counts]:
        """Return what a log of another run has in each of the steps to come.

        Raises:
            StateError: It is no such log, or of a run that had other microbatches before.
        """
        done, replayed = list(self._done), list[Counts]()
        for number, entry in enumerate(log, 1):
            fields = Fields(entry, "log of a deadline", StateError)
            fields.whole("number", at_least=1)
            parts = [(part.whole("first"), part.whole("count", at_least=1)) for part in fields.objects("parts")]
            fields.end()
            begun = (self._steps + number) * self._microbatches
            after = [first + count for first, count in parts]
            if [first for first, _ in parts] != done or not all(begun - self._microbatches < one <= begun for one in after):
                raise StateError(
                    f"log of a deadline: entry {number} has the microbatches {parts}, each a first one and a count: expected "
                    f"that replicas go on from {done}, and are at most {self._microbatches - 1} behind {begun}"
                )
            done = after
            replayed.append(tuple(count for _, count in parts))
        return replayed

    def go_on_after(self, before: Deferral) -> None:
        """Go on from those of the workers before, whose steps these workers continue under the same deadline."""
        self.log, self.defers_nothing = before.log, before.defers_nothing
        self._steps, self._done, self._replayed = before._steps, before._done, before._replayed

    def __str__(self) -> str:
        late = sum(count > 0 for count in self.deferred)
        return (
            f"{self.deadline} of a step's microbatches, the others come first in the next one. Deferred to it are "
            f"{sum(self.deferred)}, of {late} of {len(self._done)} replicas"
        )

    def _end(self, counts: Sequence[int]) -> None:
        parts = [{"first": first, "count": count} for first, count in zip(self._done, counts, strict=True)]
        self.log.append({"number": len(self.log) + 1, "parts": parts})
        self._done = [done + count for done, count in zip(self._done, counts, strict=True)]
        self._steps += 1
        self.defers_nothing = False
        if self._replayed:
            self._replayed.popleft()
