"""Remedies for an edge whose bandwidth limits the step. No order of ops hides such an edge.

An edge limits every plan if a message occupies it for longer than the busiest rank computes for a microbatch. There are three
remedies: spread the messages over more connections, send fewer bytes per number, or cut the model where less is sent. We plan
again with each remedy. The simulated makespans show which remedy helps most and which bound remains.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Final

from adaptra.planning.layouts.choose_roles import LEAST_GAIN
from adaptra.planning.layouts.layout_change import SplitChange
from adaptra.planning.limitation import EFFORT
from adaptra.planning.routes.steady_steps import timing_of
from adaptra.planning.timing import MAKESPAN, StepTiming
from adaptra.program import Program
from adaptra.program.placement import Edge
from adaptra.simulation.bound import Bound
from adaptra.simulation.case import Case
from adaptra.simulation.cost import CostModel
from adaptra.simulation.cut_points import CutPoint, CutPoints, MovedCut
from adaptra.simulation.simulate import lower_bound

MOST_CUTS: Final = 4
"""The most moved cut points to plan for: those with the lowest makespan bounds."""

MOST_CONNECTIONS: Final = 16
"""The most connections over which the delegate spreads the messages of one path."""

BFLOAT16_SHARE: Final = 0.5
"""Size of a bfloat16 message as a fraction of the float32 message."""


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
    """Remedies available to a pipeline against an edge whose bandwidth limits the step.

    Attributes:
        spreads: Whether an edge that becomes slow gets more connections.
        rounds: Whether the user allows messages on limiting edges to be rounded to bfloat16.
        cut_points: The other possible cut points of the model, or None if they are not known.
    """

    spreads: bool = False
    rounds: bool = False
    cut_points: CutPoints | None = None


@dataclass(frozen=True)
class RemedyPlan:
    """One remedy and the plan made with it.

    Attributes:
        remedy: The kind of remedy.
        change: A description of the change, for people.
        program: The plan with the remedy.
        cost: The cost model with the remedy.
        makespan: The simulated makespan of the plan, or its period.
        bound: The bound of that with this remedy.
        wanted: The action that the user must take to get it, or None if a plan can include it already.
        cut: The cut point that moves, or None.
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
    """The edges whose bandwidth limits a plan, and the remedies for them. :func:`str` gives a text.

    Attributes:
        edges: The directed edges, in ascending order.
        occupancy: The longest time that a message occupies one of them.
        load: The longest time that a rank computes for a microbatch. An edge limits the step if its occupancy is longer.
        makespan: The simulated makespan without a remedy, or the period.
        bound: The bound of that without a remedy.
        choices: All remedies, the shortest time first.
    """

    edges: tuple[Edge, ...]
    occupancy: float
    load: float
    makespan: float
    bound: Bound
    choices: tuple[RemedyPlan, ...]

    def best(self, remedy: Remedy) -> RemedyPlan | None:
        """Return the best remedy of this kind that shortens the step and needs no action of the user, or None."""
        fitting = (one for one in self.choices if one.remedy is remedy and one.wanted is None)
        return next((one for one in fitting if one.makespan < self.makespan), None)

    def to_json(self) -> dict[str, Any]:
        """Return the remedies as JSON values."""
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
                    "then": choice.bound.cause,
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
            yield f"  {choice.change}: {gain}; then limited by {choice.bound.cause}{how}"
        if not self.choices:
            yield "  nothing known would help: a faster link, or a model that sends less between these stages"


def find_remedies(
    case: Case,
    program: Program,
    spread: Sequence[Edge] = (),
    rounded: Sequence[Edge] = (),
    *,
    bandwidth: BandwidthOptions,
    timing: StepTiming = MAKESPAN,
) -> Remedies | None:
    """Find the remedies for the edges whose bandwidth limits a case.

    Args:
        case: The planning problem without a further remedy.
        program: The plan for it, compute ops only.
        spread: The edges whose messages are spread over several connections already.
        rounded: The edges whose messages are rounded already.
        bandwidth: The available remedies.
        timing: The time that counts: the makespan, or :data:`adaptra.planning.routes.steady_steps.PERIOD`.

    Returns:
        The remedies, or None if no edge's bandwidth limits the case or if no plan fits it.
    """
    edges, load = bound_edges(case)
    bound = timing.binds(case)
    if not edges or math.isinf(bound.value):
        return None
    candidates = _candidates(case, edges, bandwidth, spread, rounded)
    choices = [_choice(timing, case, program, *candidate) for candidate in candidates]
    choices.sort(key=lambda choice: choice.makespan)
    occupancy = max(case.cost.occupancy(*edge) for edge in edges)
    return Remedies(edges, occupancy, load, timing.of(program, case.cost), bound, tuple(choices))


def choose_split(
    case: Case,
    program: Program,
    spread: Sequence[Edge],
    rounded: Sequence[Edge],
    bandwidth: BandwidthOptions,
    horizon: int,
    moving: Callable[[Sequence[CutPoint]], tuple[float, float] | None],
    routed: float | None = None,
) -> tuple[SplitChange, tuple[CutPoint, ...]] | None:
    """Choose the moved cut point with the shortest simulated step, if it saves more than the move costs.

    Args:
        case, program, spread, rounded, bandwidth: As in :func:`find_remedies`. The program is first adapted to the case. One
            with routes is of several replicas, so it says nothing of a pipeline's order.
        horizon: The number of steps over which the change must pay for itself.
        moving: Returns the seconds and bytes that a move to these cut points takes, or None if it is not possible.
        routed: The seconds of a step under the program's routes, if it has any. A move has to be better than these.

    Returns:
        The change and the cut points at which stages 1, 2, … then begin; None if no move pays.
    """
    timing = timing_of(barrier=case.barrier)
    adapted = timing.plan(case, incumbent=program if program.is_one_pipeline else None, effort=EFFORT).compute_only()
    remedies = find_remedies(case, adapted, spread, rounded, bandwidth=bandwidth, timing=timing)
    if remedies is None:
        return None
    seconds_before = remedies.makespan if routed is None else min(remedies.makespan, routed)
    for choice in remedies.choices:
        cut = choice.cut
        if cut is None or choice.makespan >= (1 - LEAST_GAIN) * seconds_before:
            continue
        if any(place.position is None for place in cut.places) or (needed := moving(cut.places)) is None:
            continue
        seconds, state_bytes = needed
        lower, upper = cut.stage - 1, cut.stage
        # The time per byte follows from the occupancy and the size of a message there.
        occupancy = max(case.cost.occupancy(lower, upper), case.cost.occupancy(upper, lower))
        seconds += state_bytes * occupancy / cut.was.bytes
        before = (*cut.split[: cut.stage - 1], cut.was.module, *cut.split[cut.stage :])
        change = SplitChange(before, cut.split, seconds_before, choice.makespan, seconds)
        if change.saved(horizon) > 0:
            return change, cut.places
    return None


def bound_edges(case: Case) -> tuple[tuple[Edge, ...], float]:
    """Find the directed edges that a message occupies for longer than any rank computes for a microbatch.

    With one microbatch there is none, since a message can only delay later messages.

    Returns:
        The edges, and the longest time that a rank computes for a microbatch.
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
    """Return the rounded edges whose bandwidth would limit the case without rounding."""
    exact = replace(case, cost=case.cost.with_occupancies(rounded, 1 / BFLOAT16_SHARE))
    return tuple(edge for edge in bound_edges(exact)[0] if edge in rounded)


def _occupied(cost: CostModel, edge: Edge) -> float:
    """Return the time that a microbatch occupies an edge. If the edge's directions share it, both messages count."""
    return cost.occupancy(*edge) + (cost.occupancy(edge[1], edge[0]) if cost.half_duplex else 0.0)


def _candidates(
    case: Case, edges: Sequence[Edge], bandwidth: BandwidthOptions, spread: Sequence[Edge], rounded: Sequence[Edge]
) -> Iterator[tuple[Remedy, str, CostModel, str | None, MovedCut | None]]:
    """Yield candidates as (kind, description, cost model, action that the user must take, moved cut point)."""
    cost = case.cost
    single = [edge for edge in edges if edge not in spread]
    if single:
        # An upper bound: throughput scales with the connections if a window limits each; a saturated link gains nothing.
        change = f"at best, up to {MOST_CONNECTIONS} connections"
        wanted = None if bandwidth.spreads else "Options(delegate=True) tries them"
        yield Remedy.PATHS, change, cost.with_occupancies(single, 1 / MOST_CONNECTIONS), wanted, None
    exact = [edge for edge in edges if edge not in rounded]
    if exact:
        wanted = None if bandwidth.rounds else "Options(lossy_bf16='slow') allows it"
        yield Remedy.ROUNDING, "rounding to bfloat16", cost.with_occupancies(exact, BFLOAT16_SHARE), wanted, None
    if bandwidth.cut_points is not None:
        cut_points = bandwidth.cut_points
        moved = [move for stage in sorted({max(edge) for edge in edges}) for move in cut_points.moves(cost, stage)]
        moved.sort(key=lambda move: lower_bound(replace(case, cost=move.cost)).value)
        for move in moved[:MOST_CUTS]:
            yield Remedy.CUT, _describe(move), move.cost, f"pipe.take_split({_split(move)}, optimizer) moves it", move


def _describe(move: MovedCut) -> str:
    return f"stage {move.stage} beginning at {move.to.module!r}, {move.to.bytes} bytes a message instead of {move.was.bytes}"


def _split(move: MovedCut) -> str:
    """Return the list of cut points as text, with an ellipsis where a stage begins at no module."""
    return f"[{', '.join('…' if name is None else repr(name) for name in move.split)}]"


def _choice(
    timing: StepTiming,
    case: Case,
    program: Program,
    remedy: Remedy,
    change: str,
    cost: CostModel,
    wanted: str | None,
    cut: MovedCut | None,
) -> RemedyPlan:
    changed = replace(case, cost=cost)
    found = timing.plan(changed, incumbent=program, effort=EFFORT).compute_only()
    return RemedyPlan(remedy, change, found, cost, timing.of(found, cost), timing.binds(changed), wanted, cut)
