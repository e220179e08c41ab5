"""Checks that the ranks of a replica are given the same rows: one of them compares checksums of every rank's batch.

Only the first stage's rank reads inputs, and only the last stage's rank reads targets. Ranks that shuffle for themselves, as
under data parallelism, would silently train inputs on the targets of other rows.
Ranks that each load a checkpoint of their own may load those of different steps, whose stages don't belong together. So the
number of the step is compared as well.

In the first calls, and then in every hundredth, each rank mails one checksum per tensor to the control thread of rank 0. No
rank waits for this mail, and rank 0 waits for none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from adaptra.errors import BatchError
from adaptra.graph.capture.containers import path_text
from adaptra.runtime.control.mail.mail import BatchChecksums
from adaptra.runtime.data_parallel.checksum import checksums

FIRST_CALLS: Final = 10
EVERY: Final = 100
"""The first calls are compared, and then every hundredth: shuffles that diverge in a later epoch are soon found, too."""

MOST_PENDING: Final = 64
"""The number of calls whose checksums are kept until all ranks have sent theirs."""


def is_due(call: int) -> bool:
    """Return True if the rows of a call are compared; calls count from 0."""
    return call < FIRST_CALLS or call % EVERY == 0


def numbers_of(arguments: Mapping[str, Any]) -> dict[str, int]:
    """Return a checksum for each tensor that a rank was given, by argument name and path. Other values have none."""
    tensors = {
        name + path_text(path): leaf
        for name, nest in arguments.items()
        for path, leaf in pytree.tree_flatten_with_path(nest)[0]
        if isinstance(leaf, Tensor) and leaf.layout is torch.strided and not leaf.is_quantized
    }
    return dict(zip(tensors, checksums(list(tensors.values())), strict=True))


class SameRows:
    """Compares the checksums of the ranks of one pipeline.

    Args:
        ranks: Their numbers in the job, by rank of the pipeline.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks = ranks
        self._pending: dict[tuple[str, int], dict[int, BatchChecksums]] = {}

    def add(self, sent: BatchChecksums) -> None:
        """Take a rank's checksums, and compare once all ranks have sent theirs.

        Raises:
            BatchError: Several ranks were given different tensors, or go on at different steps of the training. The text names
                the call, the ranks, and the arguments or steps.
        """
        key = (sent.call, sent.number)
        received = self._pending.setdefault(key, {})
        received[sent.rank] = sent
        if len(received) == len(self._ranks):
            del self._pending[key]
            self._compare(sent, [received[rank] for rank in sorted(received)])
        elif len(self._pending) > MOST_PENDING:
            del self._pending[next(iter(self._pending))]

    def _compare(self, call: BatchChecksums, received: Sequence[BatchChecksums]) -> None:
        lowest, *others = received
        other = next((rank for rank in others if rank.step != lowest.step), None)
        if other is not None:
            raise BatchError(
                f"{call.call} {call.number}: rank {self._ranks[lowest.rank]} is at step {lowest.step} of the training, rank "
                f"{self._ranks[other.rank]} at step {other.step}: expected one checkpoint for all ranks, in which each finds "
                "its own stages as of the same step"
            )
        first: dict[str, BatchChecksums] = {}
        differing: dict[tuple[int, int], list[str]] = {}
        for sent in received:
            for name, number in sent.numbers.items():
                before = first.setdefault(name, sent)
                if before.numbers[name] != number:
                    differing.setdefault((before.rank, sent.rank), []).append(name)
        if differing:
            parts = [
                f"rank {self._ranks[rank]} was given other {' and '.join(names)} than rank {self._ranks[before]}"
                for (before, rank), names in differing.items()
            ]
            raise BatchError(
                f"{call.call} {call.number}: {', '.join(parts)}: expected the same rows on all ranks of a replica; give a "
                "DistributedSampler num_replicas=pipe.replicas and rank=pipe.replica, and whatever shuffles the same seed"
            )
