"""The cost model: durations of ops, latency and occupancy of edges, and memory per microbatch.

Only the cost model changes at run time, and every new plan is computed from it. Times may be in any unit as long as all share
it; the runtime uses seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import pairwise
from typing import Final

from adaptra.errors import CaseError
from adaptra.program import Kind
from adaptra.simulation.case_fields import check_numbers
from adaptra.sizes import MemoryLimit

MEMORY_TOLERANCE: Final = 1e-9
"""Tolerated excess of a sum of memory over its limit, for rounding."""


class Blocking(Enum):
    """Which stages communication blocks, as GPU-side communication kernels do."""

    NONE = "none"
    SEND = "send"
    """The sender starts no op until its message has arrived."""
    BOTH = "both"
    """As SEND, and the receiver starts no op while a message to it is in transit."""


@dataclass(frozen=True)
class CostModel:
    """Costs per stage and per directed edge. Edge ``i`` joins stages ``i`` and ``i + 1``.

    A message whose producer ends at ``e`` departs at ``d = max(e, link free)``. It occupies the link until ``d + occupancy``
    and arrives at ``d + occupancy + latency``. So messages queue for each other's occupancy, never for their latency. All
    messages from one rank to another take the same link, whatever their edges.

    Attributes:
        forward, input_grad, weight_grad: Durations of F, I and W, one per stage. B takes ``input_grad + weight_grad``.
        latency_forward, latency_backward: Latency of a message from stage i to i+1, and from i+1 to i; one per edge.
        occupancy_forward, occupancy_backward: Time that one message occupies the edge (size / bandwidth); one per edge.
        half_duplex: Whether the two directions between two ranks share one link, first come first served.
        blocking: The stages that communication blocks, if any.
        memory_forward: Memory of one microbatch on a stage from the start of F, one per stage.
        memory_input_grad: The part of it that is freed when I ends; W frees the rest when it ends.
        memory_limit: The memory limit of each rank, in the unit of ``memory_forward``, or None.
        update: Time from a rank's last op of a step until it is ready for the next one, one per stage. In it are the sum of
            gradients over replicas, the optimizer and the next batch. A rank takes that of all its stages.
    """

    forward: tuple[float, ...]
    input_grad: tuple[float, ...]
    weight_grad: tuple[float, ...]
    latency_forward: tuple[float, ...]
    latency_backward: tuple[float, ...]
    occupancy_forward: tuple[float, ...]
    occupancy_backward: tuple[float, ...]
    half_duplex: bool = False
    blocking: Blocking = Blocking.NONE
    memory_forward: tuple[float, ...] = ()
    memory_input_grad: tuple[float, ...] = ()
    memory_limit: MemoryLimit | None = None
    update: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        stages = len(self.forward)
        if stages == 0:
            raise CaseError("forward: expected one duration per stage, got none")
        if not self.memory_forward:
            object.__setattr__(self, "memory_forward", (1.0,) * stages)
        if not self.memory_input_grad:
            object.__setattr__(self, "memory_input_grad", tuple(0.5 * held for held in self.memory_forward))
        if not self.update:
            object.__setattr__(self, "update", (0.0,) * stages)
        for name in ("forward", "input_grad", "weight_grad", "memory_forward", "memory_input_grad", "update"):
            check_numbers(name, getattr(self, name), stages)
        for name in ("latency_forward", "latency_backward", "occupancy_forward", "occupancy_backward"):
            check_numbers(name, getattr(self, name), stages - 1)
        if self.memory_limit is not None:
            check_numbers("memory_limit", self.memory_limit, len(self.memory_limit))
        for stage, (held, freed) in enumerate(zip(self.memory_forward, self.memory_input_grad, strict=True)):
            if freed > held:
                raise CaseError(f"memory_input_grad of stage {stage} is {freed}: expected at most memory_forward, {held}")

    @staticmethod
    def uniform(
        stages: int, forward: float, input_grad: float, weight_grad: float, latency: float = 0.0, occupancy: float = 0.0
    ) -> CostModel:
        """Return a cost model with equal stages and equal edges."""
        edges = stages - 1
        return CostModel(
            (float(forward),) * stages,
            (float(input_grad),) * stages,
            (float(weight_grad),) * stages,
            (float(latency),) * edges,
            (float(latency),) * edges,
            (float(occupancy),) * edges,
            (float(occupancy),) * edges,
        )

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.forward)

    @property
    def once_through(self) -> float:
        """The time of one microbatch alone: all forwards, all input gradients, then W."""
        ops = (*self.forward, *self.input_grad, *self.weight_grad)
        messages = (*self.latency_forward, *self.latency_backward, *self.occupancy_forward, *self.occupancy_backward)
        return sum(ops) + sum(messages)

    def duration(self, stage: int, kind: Kind) -> float:
        """Return the duration of a compute op. Other ops take no time of the stage."""
        match kind:
            case Kind.F:
                return self.forward[stage]
            case Kind.I:
                return self.input_grad[stage]
            case Kind.W:
                return self.weight_grad[stage]
            case Kind.B:
                return self.input_grad[stage] + self.weight_grad[stage]
            case _:
                return 0.0

    def with_latency(self, source: int, destination: int, latency: float) -> CostModel:
        """Return the model with another latency on the directed edge between two neighbouring stages."""
        return self._with_edge("latency", source, destination, latency)

    def with_occupancy(self, source: int, destination: int, occupancy: float) -> CostModel:
        """Return the model with another occupancy per message on the directed edge between two neighbouring stages."""
        return self._with_edge("occupancy", source, destination, occupancy)

    def with_stage(
        self, stage: int, forward: float | None = None, input_grad: float | None = None, weight_grad: float | None = None
    ) -> CostModel:
        """Return the model with other durations of a stage's ops. None keeps a duration."""
        given = {"forward": forward, "input_grad": input_grad, "weight_grad": weight_grad}
        changed: dict[str, tuple[float, ...]] = {}
        for name, value in given.items():
            if value is not None:
                values = list(getattr(self, name))
                values[stage] = float(value)
                changed[name] = tuple(values)
        return replace(self, **changed)

    def limited(self, by_rank: Iterable[float]) -> CostModel:
        """Return the model with other memory limits, in the same unit."""
        of = MemoryLimit if self.memory_limit is None else self.memory_limit.of
        return replace(self, memory_limit=of(tuple(by_rank)))

    def with_occupancies(self, edges: Iterable[tuple[int, int]], factor: float) -> CostModel:
        """Return the model with the occupancy of these directed edges multiplied by ``factor``."""
        cost = self
        for edge in edges:
            cost = cost.with_occupancy(*edge, factor * cost.occupancy(*edge))
        return cost

    def latency(self, source: int, destination: int) -> float:
        """Return the latency of the directed edge between two neighbouring stages."""
        values: tuple[float, ...] = getattr(self, self._name("latency", source, destination))
        return values[min(source, destination)]

    def occupancy(self, source: int, destination: int) -> float:
        """Return the time that a message occupies the directed edge between two neighbouring stages."""
        values: tuple[float, ...] = getattr(self, self._name("occupancy", source, destination))
        return values[min(source, destination)]

    def placed(self, placement: Sequence[int]) -> CostModel:
        """Return the model in which messages between stages of one rank take no time, as none is sent there."""
        cost = self
        for stage, (rank, following) in enumerate(pairwise(placement)):
            if rank == following:
                for edge in ((stage, stage + 1), (stage + 1, stage)):
                    cost = cost.with_latency(*edge, 0.0).with_occupancy(*edge, 0.0)
        return cost

    def _with_edge(self, what: str, source: int, destination: int, value: float) -> CostModel:
        name = self._name(what, source, destination)
        values = list(getattr(self, name))
        values[min(source, destination)] = float(value)
        return replace(self, **{name: tuple(values)})

    def _name(self, what: str, source: int, destination: int) -> str:
        """Return the name of the attribute for this property of a directed edge."""
        if abs(source - destination) != 1 or not 0 <= min(source, destination) < self.stages - 1:
            raise CaseError(f"edge {source}→{destination}: expected two neighbouring stages of 0..{self.stages - 1}")
        return f"{what}_forward" if destination > source else f"{what}_backward"
