"""Lower bounds of the makespan or the period of a program, and what causes them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import Any


class BoundKind(Enum):
    """The reason why no order of ops is shorter, or repeats faster.

    The formulas of makespans are in ``csrc/schedule/bounds/bounds.cc``. Those of periods are described in
    :mod:`adaptra.planning.routes.period_bound`. Of equal periods the first kind is named.
    """

    LOAD = "load"
    """A rank runs all its ops one after the other."""
    DRAIN = "drain"
    """After a stage's forwards and input gradients, its last gradient travels to stage 0, and a W ends last."""
    CHAIN = "chain"
    """A first microbatch goes to the last stage and back, then a stage runs the rest of its input gradients."""
    IDLE = "idle"
    """A stage's load, plus its idle time before the first input gradients and after the last forwards for lack of memory."""
    ONE_MACHINE = "one machine"
    """The best preemptive schedule of one rank's ops, each with the least time that must pass before and after it."""
    LINK_FORWARD = "link forward"
    """All forward messages of an edge occupy it one after the other, and with them all others that share its link."""
    LINK_BACKWARD = "link backward"
    """The same of its backward messages; half duplex edges are shared by both directions."""
    WORK = "work"
    """Of a period: a worker runs all its ops one after the other."""
    BARRIER = "barrier"
    """Of a period: behind it a worker idles until the first F of its stage arrives."""
    FILL = "fill"
    """Of a period: a worker idles before its first I, as few microbatches have room."""
    PATH = "path"
    """Of a period: all F and I of a worker lie within the step of an earlier stage."""
    MEMORY = "memory"
    """A stage with room for A microbatches needs one round trip for every A of them."""
    LINK = "link"
    """Of a period: all messages over a link occupy it one after the other."""
    PORT = "port"
    """Of a period: all messages through a worker's port occupy it one after the other."""


@dataclass(frozen=True, slots=True)
class Bound:
    """A lower bound of the makespan or the period, and its cause: a rank or worker, an edge or link, or a stage.

    It is a sum of rounded numbers, so compare with a relative tolerance of 1e-9.
    """

    value: float
    kind: BoundKind
    where: str

    @property
    def cause(self) -> str:
        """A description of the cause, for people."""
        match self.kind:
            case BoundKind.MEMORY if math.isinf(self.value):
                return f"the memory of {self.where}"
            case BoundKind.LOAD | BoundKind.ONE_MACHINE | BoundKind.WORK | BoundKind.BARRIER:
                return f"the load of {self.where}"
            case BoundKind.DRAIN | BoundKind.CHAIN:
                return f"the critical path through {self.where}"
            case BoundKind.MEMORY | BoundKind.IDLE | BoundKind.FILL:
                return f"the memory of {self.where} and the way to the last stage and back"
            case BoundKind.PATH:
                return f"the way to {self.where} and back within a step"
            case BoundKind.LINK_FORWARD | BoundKind.LINK_BACKWARD | BoundKind.LINK | BoundKind.PORT:
                return f"the bandwidth of {self.where}"

    def to_json(self) -> dict[str, Any]:
        """Return the bound as JSON values."""
        return {"bound": self.value, "bound_kind": self.kind.value, "bound_where": self.where}

    def __str__(self) -> str:
        return f"{self.value:g} ({self.kind.value}, {self.where})"
