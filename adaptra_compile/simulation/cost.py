"""The cost model: durations of ops, latency and occupancy of edges, and memory per microbatch.

Only the cost model changes at run time, and every new plan is computed from it. A :class:`Case` is a cost model with a number
of microbatches and a placement. ``adaptra plan`` and ``adaptra simulate`` read it from a file. ``docs/formats.md`` documents
its JSON form. Times may be in any unit as long as all share it; the runtime uses seconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from adaptra.errors import CaseError
from adaptra.json_files import read_json
from adaptra.program import Kind, refuse_size
from adaptra.program.placement import stages_of
from adaptra.simulation.case_fields import CaseFields, check_numbers

FORMAT_VERSION: Final = 1

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

    A message whose producer ends at ``e`` departs at ``d = max(e, edge free)``. It occupies the edge until ``d + occupancy``
    and arrives at ``d + occupancy + latency``. So messages queue for each other's occupancy, never for their latency.

    Attributes:
        forward, input_grad, weight_grad: Durations of F, I and W, one per stage. B takes ``input_grad + weight_grad``.
        latency_forward, latency_backward: Latency of a message from stage i to i+1, and from i+1 to i; one per edge.
        occupancy_forward, occupancy_backward: Time that one message occupies the edge (size / bandwidth); one per edge.
        half_duplex: Whether the two directions of an edge share it, first come first served.
        blocking: The stages that communication blocks, if any.
        memory_forward: Memory of one microbatch on a stage from the start of F, one per stage.
        memory_input_grad: The part of it that is freed when I ends; W frees the rest when it ends.
        memory_limit: The memory limit of each rank, or None.
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
    memory_limit: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        stages = len(self.forward)
        if stages == 0:
            raise CaseError("forward: expected one duration per stage, got none")
        if not self.memory_forward:
            object.__setattr__(self, "memory_forward", (1.0,) * stages)
        if not self.memory_input_grad:
            object.__setattr__(self, "memory_input_grad", tuple(0.5 * held for held in self.memory_forward))
        for name in ("forward", "input_grad", "weight_grad", "memory_forward", "memory_input_grad"):
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


@dataclass(frozen=True)
class Case:
    """One planning problem: a cost model, the number of microbatches of a step, and the placement.

    ``name`` is for people; ``placement[stage]`` is the stage's rank. Within a rank messages take no time, whatever is given for
    them: see :meth:`CostModel.placed`. ``barrier`` is whether ranks meet between steps, so that
    all begin a step together. Then a step costs its makespan, otherwise the period of steps in a row.
    """

    cost: CostModel
    microbatches: int
    placement: tuple[int, ...]
    name: str = "case"
    barrier: bool = False

    def __post_init__(self) -> None:
        if self.microbatches < 1:
            raise CaseError(f"M={self.microbatches}: expected at least one microbatch")
        if refused := refuse_size(self.cost.stages, self.microbatches):
            raise CaseError(f"S, M: {refused}")
        for names, one in (
            ("t_f, t_b, t_w, c_f, c_b, o_f, o_b", self.cost.once_through),
            ("mem_f", sum(self.cost.memory_forward)),
        ):
            if not math.isfinite(self.microbatches * one):
                raise CaseError(
                    f"{names}: {self.microbatches} microbatches add up to more than 1.8e308: expected a larger unit"
                )
        ranks = set(self.placement)
        if len(self.placement) != self.cost.stages or ranks != set(range(len(ranks))):
            raise CaseError(f"placement {list(self.placement)}: expected {self.cost.stages} stages on ranks 0..R-1")
        object.__setattr__(self, "cost", self.cost.placed(self.placement))
        limit = self.cost.memory_limit
        if limit is not None and len(limit) != len(ranks):
            raise CaseError(f"mem_cap: expected {len(ranks)} numbers, one per rank, got {len(limit)}")

    @staticmethod
    def load(path: str | Path) -> Case:
        """Read a case file.

        Raises:
            CaseError: The file is invalid. The text names the file, the field, its value and what was expected.
        """
        data = read_json(path, CaseError)
        try:
            return Case.from_json(data, name=Path(path).stem)
        except CaseError as error:
            raise CaseError(f"{path}: {error}") from None

    @staticmethod
    def from_json(data: Any, name: str = "case") -> Case:
        """Read a case from its JSON object, which may also be wrapped as ``{"name": …, "case": {…}}``."""
        outer = CaseFields(data)
        fields = CaseFields(outer.objects("case") if outer.has("case") else data)
        fields.only(_FIELDS)
        if fields.given("version", FORMAT_VERSION) != FORMAT_VERSION:
            raise CaseError(f"case version {fields.given('version')!r}: this adaptra reads version {FORMAT_VERSION}")
        stages, microbatches = fields.count("S"), fields.count("M")
        placement = fields.placement(stages)
        ranks, edges = max(placement) + 1, stages - 1
        cost = CostModel(
            forward=fields.numbers("t_f", stages),
            input_grad=fields.numbers("t_b", stages),
            weight_grad=fields.numbers("t_w", stages),
            latency_forward=fields.numbers("c_f", edges, 0),
            latency_backward=fields.numbers("c_b", edges, fields.given("c_f", 0)),
            occupancy_forward=fields.numbers("o_f", edges, 0, null=0),
            occupancy_backward=fields.numbers("o_b", edges, fields.given("o_f", 0), null=0),
            half_duplex=fields.one_of("duplex", ("full", "half")) == "half",
            blocking=_blocking(fields.given("blocking_comm", False)),
            memory_forward=fields.numbers("mem_f", stages, 1),
            memory_input_grad=fields.numbers("mem_b", stages, 0.5),
            memory_limit=None if fields.given("mem_cap", None) is None else fields.numbers("mem_cap", ranks),
        )
        return Case(cost, microbatches, placement, str(outer.given("name", name)), fields.flag("barrier"))

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object from which :meth:`from_json` reads an equal case."""
        cost = self.cost
        fields: dict[str, Any] = {
            "version": FORMAT_VERSION,
            "S": cost.stages,
            "M": self.microbatches,
            "t_f": list(cost.forward),
            "t_b": list(cost.input_grad),
            "t_w": list(cost.weight_grad),
            "c_f": list(cost.latency_forward),
            "c_b": list(cost.latency_backward),
            "o_f": list(cost.occupancy_forward),
            "o_b": list(cost.occupancy_backward),
            "duplex": "half" if cost.half_duplex else "full",
            "blocking_comm": {Blocking.NONE: False, Blocking.SEND: "send", Blocking.BOTH: "both"}[cost.blocking],
            "mem_f": list(cost.memory_forward),
            "mem_b": list(cost.memory_input_grad),
            "mem_cap": None if cost.memory_limit is None else list(cost.memory_limit),
            "placement": placement_lists(self.placement),
            "barrier": self.barrier,
        }
        return {"name": self.name, "case": fields}


_FIELDS: Final = frozenset(
    "version S M t_f t_b t_w c_f c_b o_f o_b duplex blocking_comm mem_cap mem_f mem_b placement barrier".split()
)


def _blocking(value: Any) -> Blocking:
    match value:
        case False | None:
            return Blocking.NONE
        case "send":
            return Blocking.SEND
        case True | "both":
            return Blocking.BOTH
        case _:
            raise CaseError(f"blocking_comm: expected false, true, 'send' or 'both', got {value!r}")


def placement_lists(placement: tuple[int, ...]) -> list[list[int]]:
    """Return the JSON form of a placement: one list of stages per rank."""
    return [list(stages_of(rank, placement)) for rank in range(max(placement) + 1)]
