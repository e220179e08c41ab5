"""Whether the ranks of a replica are given the same rows: numbers of what each was given, compared on one of them.

Only the first stage's rank reads inputs and only the last one's reads targets. So ranks that shuffle for themselves, as each
does under data parallelism, would train inputs on the targets of other rows without a word. In the first calls and then now and
then each rank mails one number per tensor to the control thread of rank 0, which waits for nobody and which nobody waits for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from adaptra.errors import BatchError
from adaptra.runtime.control.mail import Given
from adaptra.runtime.state.checksum import checksums

FIRST_CALLS: Final = 10
EVERY: Final = 100
"""The first calls are compared, and then each hundredth: a shuffle that goes apart in a later epoch is found soon, too."""

MOST_PENDING: Final = 64
"""Of so many calls numbers are kept until all ranks have told theirs."""


def is_due(call: int) -> bool:
    """Whether the rows of a call are compared; calls count from 0."""
    return call < FIRST_CALLS or call % EVERY == 0


def numbers_of(given: Mapping[str, Any]) -> dict[str, int]:
    """One number for each tensor that a rank was given, by its place; what is None, or no tensor, has none."""
    tensors = {
        name + pytree.keystr(path): leaf
        for name, nest in given.items()
        for path, leaf in pytree.tree_flatten_with_path(nest)[0]
        if isinstance(leaf, Tensor) and leaf.layout is torch.strided and not leaf.is_quantized
    }
    return dict(zip(tensors, checksums(list(tensors.values())), strict=True))


class SameRows:
    """Compares what the ranks of one pipeline tell.

    Args:
        ranks: Their numbers in the job, by rank of the pipeline.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks = ranks
        self._pending: dict[tuple[str, int], dict[int, Given]] = {}

    def add(self, given: Given) -> None:
        """Take what a rank was given, and compare once all have told.

        Raises:
            BatchError: Tensors that several ranks were given differ; names the call, the arguments and the ranks.
        """
        key = (given.call, given.number)
        told = self._pending.setdefault(key, {})
        told[given.rank] = given
        if len(told) == len(self._ranks):
            del self._pending[key]
            self._compare(given, [told[rank] for rank in sorted(told)])
        elif len(self._pending) > MOST_PENDING:
            del self._pending[next(iter(self._pending))]

    def _compare(self, call: Given, told: Sequence[Given]) -> None:
        first: dict[str, Given] = {}
        differing: dict[tuple[int, int], list[str]] = {}
        for given in told:
            for name, number in given.numbers.items():
                before = first.setdefault(name, given)
                if before.numbers[name] != number:
                    differing.setdefault((before.rank, given.rank), []).append(name)
        if differing:
            parts = [
                f"rank {self._ranks[rank]} was given other {' and '.join(names)} than rank {self._ranks[before]}"
                for (before, rank), names in differing.items()
            ]
            raise BatchError(
                f"{call.call} {call.number}: {', '.join(parts)}: expected the same rows on all ranks of a replica; give a "
                "DistributedSampler num_replicas=pipe.replicas and rank=pipe.replica, and whatever shuffles the same seed"
            )
