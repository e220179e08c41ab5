"""The replicas of a stage tell each other the norms of their gradients beside their losses, so that all know those of all."""

from __future__ import annotations

import math
import struct
from typing import Final, Protocol

import torch
from torch import Tensor

from adaptra.planning.synchrony.noise_scale import TermNorms

_WORDS: Final = 4
"""A float64 travels as so many numbers of 16 bits, which float32 holds exactly, and the mean of replicas gives back."""


class BesideLosses(Protocol):
    """What each replica tells the others beside its losses, without a message of its own."""

    def told(self) -> Tensor:
        """Return what this replica tells, for a sum over all: a column of small numbers for each, zeros but for its own."""
        ...

    def meet(self, told: Tensor, *, mean: bool) -> None:
        """Take the sum over all replicas, or their mean."""
        ...


class ToldNorms:
    """One replica's squared norms of a step, and what the replicas have told.

    The gradient of a replica may be a sum over its samples. All norms become those of means, by the samples that each tells.

    Args:
        replica: This replica.
        replicas: The number of replicas.
        of_sums: Whether gradients are sums over samples, of each replica and of all. Else they are means.

    Attributes:
        norms: The norms of the last step. None where a replica had none, or no samples, or one that is not finite.
        samples: The samples of each replica then.
    """

    def __init__(self, replica: int, replicas: int, *, of_sums: bool) -> None:
        self._replica, self._replicas = replica, replicas
        self._of_sums = of_sums
        self._own, self._scale = (math.nan,) * 3, 1.0
        self.norms: TermNorms | None = None
        self.samples: tuple[float, ...] = ()

    def take(self, own: tuple[float, float] | None, samples: float, scale: float) -> None:
        """Take what this replica is to tell.

        Args:
            own: The squared norms of its term, and of its part of the results; None for not measured.
            samples: The samples in its term.
            scale: The factor of the loss in all gradients, the same on all replicas.
        """
        self._own, self._scale = (*(own or (math.nan, math.nan)), samples), scale

    def told(self) -> Tensor:
        """Return what this replica tells, see :class:`BesideLosses`."""
        column = torch.zeros(3 * _WORDS, self._replicas)
        words = struct.unpack(f"<{3 * _WORDS}H", struct.pack("<3d", *self._own))
        column[:, self._replica] = torch.tensor(words, dtype=torch.float32)
        return column

    def meet(self, told: Tensor, *, mean: bool) -> None:
        """Take what all have told, see :class:`BesideLosses`."""
        factor = self._replicas if mean else 1
        columns = [[round(factor * word) for word in column] for column in told.T.tolist()]
        all_told = [struct.unpack("<3d", struct.pack(f"<{3 * _WORDS}H", *column)) for column in columns]
        terms, parts, self.samples = zip(*all_told, strict=True)
        self.norms = self._of_means(terms, sum(parts))

    def _of_means(self, terms: tuple[float, ...], whole: float) -> TermNorms | None:
        if not (all(map(math.isfinite, (*terms, whole, *self.samples))) and min(self.samples) > 0 and self._scale):
            return None
        counts, count = (self.samples, sum(self.samples)) if self._of_sums else ((1.0,) * self._replicas, 1.0)
        squares = [(self._scale * one) ** 2 for one in (*counts, count)]
        *of_terms, of_mean = (norm / square for norm, square in zip((*terms, whole), squares, strict=True))
        return TermNorms(tuple(of_terms), of_mean)
