"""The choice of a placement of stages on ranks: straight, interleaved, or V.

With several stages per rank the pipeline fills sooner, but messages cross every link more often. On slow links fewer stages per
rank are better. We plan for each placement and compare the simulated makespans.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Final

from adaptra.errors import CaseError, PlanError
from adaptra.planning.planner import plan
from adaptra.program import Program
from adaptra.program.placement import in_turn, v_shaped
from adaptra.program.schedules import generate_for
from adaptra.simulation.cost import Case, CostModel
from adaptra.simulation.simulate import Bound, Simulation, lower_bound, simulate


@dataclass(frozen=True)
class Links:
    """Latency and occupancy of messages between ranks. Messages between stages of one rank cost nothing.

    Attributes:
        latency: Latency per (sending rank, receiving rank).
        occupancy: Time that a message occupies the link, per (sending rank, receiving rank).
        usual_latency, usual_occupancy: Values for all pairs that the mappings do not have.
    """

    latency: Mapping[tuple[int, int], float] = field(default_factory=dict[tuple[int, int], float])
    occupancy: Mapping[tuple[int, int], float] = field(default_factory=dict[tuple[int, int], float])
    usual_latency: float = 0.0
    usual_occupancy: float = 0.0

    def between(self, source: int, destination: int) -> tuple[float, float]:
        """Return latency and occupancy of a message between stages on these ranks."""
        if source == destination:
            return 0.0, 0.0
        pair = source, destination
        return self.latency.get(pair, self.usual_latency), self.occupancy.get(pair, self.usual_occupancy)


@dataclass(frozen=True, slots=True)
class PlacedPlan:
    """A placement with its plan.

    Attributes:
        name: ``straight``, ``interleaved-2``, ``interleaved-3``, …, or ``v``.
        case: The planning problem: the model's pieces merged into the stages of the placement.
        simulation: The simulation of the plan, with its makespan and the memory per rank.
        bound: The makespan bound for this placement.
    """

    name: str
    case: Case
    simulation: Simulation
    bound: Bound

    @property
    def program(self) -> Program:
        """The plan."""
        return self.simulation.program


def placed_case(pieces: CostModel, microbatches: int, placement: tuple[int, ...], links: Links, name: str) -> Case:
    """Return the planning problem of pieces merged evenly into the stages of a placement.

    In the cost model every edge between stages has its link to itself. If several edges cross one link, the simulated step is
    too short by the time that their messages wait for each other.

    Args:
        pieces: Times and memory of consecutive pieces of the model, one stage per piece. Memory limits are per rank. Its edges
            are not used.
        microbatches: Microbatches per step.
        placement: The rank of each stage. The number of stages must divide the number of pieces.
        links: Latency and occupancy of messages between ranks.
        name: Name of the case.

    Raises:
        CaseError: The pieces can't be merged evenly, or the memory limits are of another number of ranks.
    """
    stages = len(placement)
    if pieces.stages % stages:
        raise CaseError(f"{name}: {pieces.stages} pieces: expected a multiple of {stages} stages")
    size = pieces.stages // stages

    def merged(values: Sequence[float]) -> tuple[float, ...]:
        return tuple(sum(values[start : start + size]) for start in range(0, len(values), size))

    pairs = list(pairwise(placement))
    there = [links.between(source, destination) for source, destination in pairs]
    back = [links.between(destination, source) for source, destination in pairs]
    cost = replace(
        pieces,
        forward=merged(pieces.forward),
        input_grad=merged(pieces.input_grad),
        weight_grad=merged(pieces.weight_grad),
        latency_forward=tuple(latency for latency, _ in there),
        latency_backward=tuple(latency for latency, _ in back),
        occupancy_forward=tuple(occupancy for _, occupancy in there),
        occupancy_backward=tuple(occupancy for _, occupancy in back),
        memory_forward=merged(pieces.memory_forward),
        memory_input_grad=merged(pieces.memory_input_grad),
    )
    return Case(cost, microbatches, placement, name)


def choose_placement(
    pieces: CostModel, microbatches: int, ranks: int, links: Links, *, effort: int | None = None
) -> tuple[PlacedPlan, ...]:
    """Plan for every placement that fits and sort the plans by makespan, then by memory.

    The straight placement has one stage per rank. Interleaved placements have every number of stages per rank that divides the
    pieces per rank. The V placement is included if each rank can have two stages. No plan is longer than the literature's
    schedule for its placement, if that schedule fits.

    Args:
        pieces: Times and memory of consecutive pieces of the model; see :func:`placed_case`. Their number is a multiple of
            ``ranks``.
        microbatches: Microbatches per step.
        ranks: The number of ranks.
        links: Latency and occupancy of messages between ranks.
        effort: As for :func:`adaptra.planning.planner.plan`.

    Raises:
        CaseError: As :func:`placed_case`.
        PlanError: No placement has room for a microbatch.
    """
    if ranks < 1 or pieces.stages % ranks:
        raise CaseError(f"{pieces.stages} pieces on {ranks} ranks: expected as many on each rank")
    most = pieces.stages // ranks
    placements = {"straight": in_turn(ranks)}
    placements |= {f"interleaved-{chunks}": in_turn(ranks, chunks) for chunks in range(2, most + 1) if most % chunks == 0}
    if most % 2 == 0:
        placements["v"] = v_shaped(ranks)
    found: list[PlacedPlan] = []
    refused: list[PlanError] = []
    for name, placement in placements.items():
        case = placed_case(pieces, microbatches, placement, links, name)
        try:
            found.append(_planned(name, case, effort))
        except PlanError as error:
            refused.append(error)
    if not found:
        raise refused[0]
    return tuple(sorted(found, key=lambda placed: (placed.simulation.makespan, max(placed.simulation.peak_memory))))


_LITERATURE: Final = {"straight": ("1f1b", "zb_h2"), "v": ("zbv",)}


def _planned(name: str, case: Case, effort: int | None) -> PlacedPlan:
    """Return the best plan found when the search starts from each schedule of the literature with this placement."""
    incumbents = [
        generate_for(schedule, case.placement, case.microbatches) for schedule in _LITERATURE.get(name, ("interleaved",))
    ]
    plans = [plan(case, incumbent=incumbent, effort=effort) for incumbent in incumbents]
    best = min((simulate(program, case.cost) for program in plans), key=lambda simulation: simulation.makespan)
    return PlacedPlan(name, case, best, lower_bound(case))
