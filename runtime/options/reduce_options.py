"""The user's options of sums over replicas: none of them changes which terms are added, or in which order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

import torch

from adaptra.checks import is_whole, require_word
from adaptra.collectives.rounds import ALGORITHMS
from adaptra.errors import OptionError
from adaptra.known_keywords import known_keywords

_AUTO: Final = "auto"


@known_keywords
@dataclass(frozen=True, kw_only=True)
class Reduce:
    """How gradients and losses are added over replicas, see :mod:`adaptra.runtime.data_parallel.collectives.fold`.

    Attributes:
        dtype: ``torch.float32``: values of bfloat16 and float16 are added in float32 and rounded once, also after the division.
            None: every addition rounds to the values' own dtype, as in torch. Means of float16 are always made in float32, as
            their sums may overflow; sums of float16 are not.
        algorithm: The way of the terms. ``"direct"``: each part has an owner, which adds the terms of all. ``"chain"``: a sum
            passes from replica to replica and its result passes back. ``"auto"``: direct, but while some of three or more
            replicas come late to the sums of a job, they own nothing where that takes less. All give the same bits.
        bucket: The most bytes of gradients that travel as one tensor. A bucket leaves as soon as its gradients are complete,
            while the last W computes others. None: the size that suits the measured links between replicas, from 256 KiB up.
        memory: With ``"auto"`` the most bytes of terms that a rank holds until a late replica comes; where that is too few, the
            sum stays direct. None: as many as its gradients have, which is always enough.

    Raises:
        OptionError: An option is invalid; names it, the given value and the expected one.
    """

    dtype: torch.dtype | None = None
    algorithm: Literal["direct", "chain", "auto"] = "direct"
    bucket: int | None = None
    memory: int | None = None

    def __post_init__(self) -> None:
        if self.dtype not in (None, torch.float32):
            raise OptionError(f"Reduce: dtype={self.dtype!r}: expected torch.float32, or None for that of the gradients")
        require_word("Reduce: algorithm", self.algorithm, [*ALGORITHMS, _AUTO])
        given: Any
        for name, given in (("bucket", self.bucket), ("memory", self.memory)):
            if given is not None and (not is_whole(given) or given < 1):
                raise OptionError(f"Reduce: {name}={given!r}: expected bytes, a whole number above 0, or None")
        if self.memory is not None and not self.is_auto:
            raise OptionError(f"Reduce: memory={self.memory}: expected it with algorithm='auto' alone, which holds terms back")

    @property
    def is_auto(self) -> bool:
        """Whether a job chooses the way of gradients step by step."""
        return self.algorithm == _AUTO

    @property
    def of_losses(self) -> str:
        """The way that never changes: of losses, and of gradients as long as no replica is late."""
        return "direct" if self.is_auto else self.algorithm
