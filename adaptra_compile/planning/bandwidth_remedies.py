"""What helps an edge whose bandwidth binds, which no order of ops hides: each remedy is judged by planning with it.

Where a message occupies a directed edge for longer than the busiest rank computes for a microbatch, every plan waits for that
edge. Then something else than the order must change: the messages get more paths, each number gets fewer bytes, or the model is
cut where less is sent. Each of these is planned for, and the simulated steps say which helps most and what bound then remains.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Final

from adaptra.planning.choose_roles import LEAST_GAIN
from adaptra.planning.layout_change import SplitChange
from adaptra.planning.limitation import EFFORT, cause_of
from adaptra.planning.planner import plan
from adaptra.program import Program
from adaptra.program.placement import Edge
from adaptra.simulation.cost import Case, CostModel
from adaptra.simulation.cut_points import CutPoint, CutPoints, MovedCut
from adaptra.simulation.simulate import Bound, lower_bound, simulate

MOST_CUTS: Final = 4
"""How many moved cuts are planned for at most, the ones whose bounds promise most."""

MOST_CONNECTIONS: Final = 16
"""Over how many connections the delegate spreads the messages of one path at most."""

BFLOAT16_SHARE: Final = 0.5
"""The part of a float32 message that is left of it as bfloat16."""


class Remedy(Enum):
    """A way to relieve an edge whose bandwidth binds."""

    PATHS = "paths"
    """Its messages share more connections."""
    ROUNDING = "rounding"
    """Its messages travel as bfloat16."""
    CUT = "cut"
    """The model is cut where less is sent."""


@dataclass(frozen=True, slots=True)
class BandwidthOptions:
    """What a pipeline has against an edge whose bandwidth binds.

    Attributes:
        spreads: Whether an edge that turns slow gets more connections.
        rounds: Whether the user has opted in to rounding what binds.
        places: Where else the model could be cut, or None if that is not known.
    """

    spreads: bool = False
    rounds: bool = False
    places: CutPoints | None = None


@dataclass(frozen=True)
class RemedyPlan:
    """One remedy, planned for.

    Attributes:
        remedy: Which.
        change: What would change, for people.
        program: The plan for it.
        cost: The costs with it.
        makespan: The simulated step.
        bound: What no plan with this remedy beats.
        wanted: What the user would have to do to get it, or None if it can be part of a plan as things are.
        cut: The cut that moves, if one does.
    """

    remedy: Remedy
    change: str
    program: Program
    cost: CostModel
    makespan: float
    bound: Bound
    wanted: str | None
    cut: MovedCut | None = None


@dataclass(frozen=True)
class Remedies:
    """The edges whose bandwidth binds a plan, and what would help; text with :func:`str`.

    Attributes:
        edges: The directed edges, in ascending order.
        occupancy: The longest time that a message occupies one of them.
        load: The longest time that a rank computes for a microbatch; an edge occupied no longer binds nothing.
        makespan: The simulated step without a remedy.
        bound: What no plan without a remedy beats.
        choices: All remedies, the one with the shortest step first.
    """

    edges: tuple[Edge, ...]
    occupancy: float
    load: float
    makespan: float
    bound: Bound
    choices: tuple[RemedyPlan, ...]

    def best(self, remedy: Remedy) -> RemedyPlan | None:
        """The best choice of this kind that can be part of a plan as things are and shortens the step."""
        fitting = (one for one in self.choices if one.remedy is remedy and one.wanted is None)
        return next((one for one in fitting if one.makespan < self.makespan), None)

    def to_json(self) -> dict[str, Any]:
        """The remedies as JSON values."""
        return {
            "edges": [list(edge) for edge in self.edges],
            "occupancy": self.occupancy,
            "load": self.load,
            "bound": self.bound.value,
            "choices": [
                {
                    "remedy": choice.remedy.value,
                    "change": choice.change,
                    "makespan": choice.makespan,
                    "bound": choice.bound.value,
                    "then": cause_of(choice.bound),
                    "wanted": choice.wanted,
                }
                for choice in self.choices
            ],
        }

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        names = ", ".join(f"{source}→{destination}" for source, destination in self.edges)
        edges = f"edge {names}" if len(self.edges) == 1 else f"edges {names}"
        yield (
            f"bandwidth of {edges}: a message occupies it for {self.occupancy:g}, a rank computes at most {self.load:g} per "
            f"microbatch, so no order is shorter than {self.bound}; the plan takes {self.makespan:g}"
        )
        for choice in self.choices:
            saved = 1 - choice.makespan / self.makespan if self.makespan > 0 else 0.0
            gain = (
                f"{choice.makespan:g}, {100 * saved:.1f} % less" if saved > 0 else f"{choice.makespan:g}, which saves nothing"
            )
            how = f"; {choice.wanted}" if choice.wanted else ""
            yield f"  {choice.change}: {gain}; then limited by {cause_of(choice.bound)}{how}"
        if not self.choices:
            yield "  nothing known would help: a faster link, or a model that sends less between these stages"


def find_remedies(
    case: Case, program: Program, spread: Sequence[Edge] = (), rounded: Sequence[Edge] = (), *, means: BandwidthOptions
) -> Remedies | None:
    """What would relieve the edges whose bandwidth binds in a case.

    Args:
        case: The costs as they are.
        program: The plan for it, compute ops only.
        spread: The edges whose messages are spread over connections already.
        rounded: The edges whose messages are rounded already.
        means: What there is.

    Returns:
        None if no edge's bandwidth binds, or if there is no plan at all.
    """
    edges, load = bound_edges(case)
    bound = lower_bound(case)
    if not edges or math.isinf(bound.value):
        return None
    choices = [_choice(case, program, *candidate) for candidate in _candidates(case, edges, means, spread, rounded)]
    choices.sort(key=lambda choice: choice.makespan)
    occupancy = max(case.cost.occupancy(*edge) for edge in edges)
    return Remedies(edges, occupancy, load, simulate(program, case.cost).makespan, bound, tuple(choices))


def choose_split(
    case: Case,
    program: Program,
    spread: Sequence[Edge],
    rounded: Sequence[Edge],
    means: BandwidthOptions,
    horizon: int,
    moving: Callable[[Sequence[CutPoint]], tuple[float, float] | None],
) -> tuple[SplitChange, tuple[CutPoint, ...]] | None:
    """The moved cut with the shortest simulated step that saves more over ``horizon`` steps than moving costs, if there is one.

    Args:
        case, program, spread, rounded, means: As of :func:`find_remedies`; the program is first adapted to the case.
        horizon: A number of steps.
        moving: The seconds and the bytes that it takes to begin the stages at these places, or None if they can't.

    Returns:
        The change, and where stages 1, 2, … then begin.
    """
    adapted = plan(case, incumbent=program, effort=EFFORT).compute_only()
    found = find_remedies(case, adapted, spread, rounded, means=means)
    for choice in () if found is None else found.choices:
        cut = choice.cut
        if found is None or cut is None or choice.makespan >= (1 - LEAST_GAIN) * found.makespan:
            continue
        if any(place.position is None for place in cut.places) or (needed := moving(cut.places)) is None:
            continue
        seconds, state_bytes = needed
        lower, upper = cut.stage - 1, cut.stage
        # What a message takes there says what a byte does.
        occupancy = max(case.cost.occupancy(lower, upper), case.cost.occupancy(upper, lower))
        seconds += state_bytes * occupancy / cut.was.bytes
        before = (*cut.split[: cut.stage - 1], cut.was.module, *cut.split[cut.stage :])
        change = SplitChange(before, cut.split, found.makespan, choice.makespan, seconds)
        if change.saved(horizon) > 0:
            return change, cut.places
    return None


def bound_edges(case: Case) -> tuple[tuple[Edge, ...], float]:
    """The directed edges that a message occupies for longer than any rank computes for a microbatch, and that time.

    With one microbatch nothing follows a message that it could hold up.
    """
    cost = case.cost
    loads = [0.0] * (max(case.placement) + 1)
    for stage, rank in enumerate(case.placement):
        loads[rank] += cost.forward[stage] + cost.input_grad[stage] + cost.weight_grad[stage]
    load = max(loads)
    if case.microbatches == 1:
        return (), load
    directed = [edge for lower in range(cost.stages - 1) for edge in ((lower, lower + 1), (lower + 1, lower))]
    return tuple(edge for edge in directed if _occupied(cost, edge) > load), load


def needed_rounding(case: Case, rounded: Sequence[Edge]) -> tuple[Edge, ...]:
    """Those of the edges that round which would bind as they are."""
    exact = replace(case, cost=case.cost.with_occupancies(rounded, 1 / BFLOAT16_SHARE))
    return tuple(edge for edge in bound_edges(exact)[0] if edge in rounded)


def _occupied(cost: CostModel, edge: Edge) -> float:
    """For how long a microbatch keeps an edge from others: both of its messages if its directions share it."""
    return cost.occupancy(*edge) + (cost.occupancy(edge[1], edge[0]) if cost.half_duplex else 0.0)


def _candidates(
    case: Case, edges: Sequence[Edge], means: BandwidthOptions, spread: Sequence[Edge], rounded: Sequence[Edge]
) -> Iterator[tuple[Remedy, str, CostModel, str | None, MovedCut | None]]:
    """Kind, what changes, the costs with it, what the user would have to do for it, and the cut that moves, if one does."""
    cost = case.cost
    single = [edge for edge in edges if edge not in spread]
    if single:
        # What they bring is known once they carry messages: their number if a window limits each, nothing if the line is full.
        change = f"at best, up to {MOST_CONNECTIONS} connections"
        wanted = None if means.spreads else "Options(delegate=True) tries them"
        yield Remedy.PATHS, change, cost.with_occupancies(single, 1 / MOST_CONNECTIONS), wanted, None
    exact = [edge for edge in edges if edge not in rounded]
    if exact:
        wanted = None if means.rounds else "Options(lossy_bf16='slow') allows it"
        yield Remedy.ROUNDING, "rounding to bfloat16", cost.with_occupancies(exact, BFLOAT16_SHARE), wanted, None
    if means.places is not None:
        places = means.places
        moved = [move for stage in sorted({max(edge) for edge in edges}) for move in places.moves(cost, stage)]
        moved.sort(key=lambda move: lower_bound(replace(case, cost=move.cost)).value)
        for move in moved[:MOST_CUTS]:
            yield Remedy.CUT, _describe(move), move.cost, f"pipe.take_split({_split(move)}, optimizer) moves it", move


def _describe(move: MovedCut) -> str:
    return f"stage {move.stage} beginning at {move.to.module!r}, {move.to.bytes} bytes a message instead of {move.was.bytes}"


def _split(move: MovedCut) -> str:
    """The list to cut with; an ellipsis where a stage begins at no module."""
    return f"[{', '.join('…' if name is None else repr(name) for name in move.split)}]"


def _choice(
    case: Case, program: Program, remedy: Remedy, change: str, cost: CostModel, wanted: str | None, cut: MovedCut | None
) -> RemedyPlan:
    changed = replace(case, cost=cost)
    found = plan(changed, incumbent=program, effort=EFFORT).compute_only()
    return RemedyPlan(remedy, change, found, cost, simulate(found, cost).makespan, lower_bound(changed), wanted, cut)
