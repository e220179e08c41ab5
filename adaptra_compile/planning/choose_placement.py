"""Which rank holds which stages: one stage each, several in turn, or there and back, and which of these is best.

Several stages on a rank fill the pipeline sooner, and cross every link more often: where links are slow, fewer chunks win. What
decides is the plan for each placement, simulated.
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
    """What messages between ranks take. Stages of one rank hand over at no cost.

    Attributes:
        latency: Per (sending rank, receiving rank); ``usual_latency`` where not given.
        occupancy: The same for how long one message occupies the link.
        usual_latency, usual_occupancy: Those of all other pairs.
    """

    latency: Mapping[tuple[int, int], float] = field(default_factory=dict[tuple[int, int], float])
    occupancy: Mapping[tuple[int, int], float] = field(default_factory=dict[tuple[int, int], float])
    usual_latency: float = 0.0
    usual_occupancy: float = 0.0

    def between(self, source: int, destination: int) -> tuple[float, float]:
        """Latency and occupancy of a message between stages on these ranks."""
        if source == destination:
            return 0.0, 0.0
        pair = source, destination
        return self.latency.get(pair, self.usual_latency), self.occupancy.get(pair, self.usual_occupancy)


@dataclass(frozen=True, slots=True)
class PlacedPlan:
    """A placement with its plan.

    Attributes:
        name: ``straight``, ``interleaved-2``, ``interleaved-3``, …, or ``v``.
        case: The planning problem that the placement makes of the pieces.
        simulation: The plan's, with step time and memory per rank.
        bound: What no plan for this placement beats.
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
    """The planning problem of pieces merged evenly into the stages of a placement.

    Where several edges between stages cross one link, each has the link to itself in the cost model; the simulated step is then
    too short by what their messages wait for each other.

    Args:
        pieces: Times and memory of consecutive pieces of the model, as of so many stages; memory limits are per rank. Its edges
            are not looked at.
        microbatches: Per step.
        placement: Whose number of stages divides the number of pieces.
        links: What messages between ranks take.
        name: The case's.

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
    """Plans for all placements that fit, the one with the shortest step first, and of equal steps the one with less memory.

    One stage per rank, interleaved with every number of chunks that divides the pieces of a rank, and V-shaped where each rank
    can hold two stages. Each plan is at least as short as the schedule of the literature for its placement, where that fits.

    Args:
        pieces: Times and memory of consecutive pieces of the model; see :func:`placed_case`. Their number is a multiple of
            ``ranks``.
        microbatches: Per step.
        ranks: How many ranks there are.
        links: What messages between ranks take.
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
    """The best of the plans found from every schedule of the literature that is placed so."""
    incumbents = [
        generate_for(schedule, case.placement, case.microbatches) for schedule in _LITERATURE.get(name, ("interleaved",))
    ]
    plans = [plan(case, incumbent=incumbent, effort=effort) for incumbent in incumbents]
    best = min((simulate(program, case.cost) for program in plans), key=lambda simulation: simulation.makespan)
    return PlacedPlan(name, case, best, lower_bound(case))
