"""The limit of a plan's makespan or period, and the changes that would help. Both are found by planning again."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

from adaptra.planning.timing import MAKESPAN, StepTiming
from adaptra.program import Program
from adaptra.simulation.case import Case
from adaptra.simulation.cost import CostModel
from adaptra.simulation.simulate import Simulation
from adaptra.simulation.timeline import MessageInterval

EFFORT: Final = 200_000
"""Least effort of each re-plan, about 5 ms."""

ROUNDS: Final = 10
"""Least number of passes over the whole program in each re-plan, for large programs."""

T = TypeVar("T")

NOTHING: Final = 5e-4
"""Fraction of a step below which a saving is ignored, since a search of this effort varies by that much."""


@dataclass(frozen=True, slots=True)
class WhatIf:
    """One change of the problem and the time that re-planning saves with it.

    Attributes:
        change: A description of the change, for people.
        saves: Saving as a fraction of the re-planned step without the change; never negative.
    """

    change: str
    saves: float

    def __str__(self) -> str:
        return f"{self.change} would save {f'{100 * self.saves:.1f} %' if self.saves >= NOTHING else 'nothing'}"


@dataclass(frozen=True, slots=True)
class Limitation:
    """The limit of a plan's makespan or period. :func:`str` gives it as one sentence.

    Attributes:
        cause: The cause of the bound.
        above: Excess over the bound, as a fraction of the bound.
        improvable: Saving of a short new search without any change of the problem, as a fraction of the time.
        reliefs: Changes of the problem and their savings, largest first.
    """

    cause: str
    above: float
    improvable: float
    reliefs: tuple[WhatIf, ...]

    def __str__(self) -> str:
        distance = (
            "and nothing is shorter" if self.above < NOTHING else f"which alone would allow {100 * self.above:.1f} % less"
        )
        again = f"; planning again saves {100 * self.improvable:.1f} %" if self.improvable >= NOTHING else ""
        if not self.reliefs:
            return f"limited by {self.cause}"
        return f"limited by {self.cause}, {distance}{again}; {', '.join(map(str, self.reliefs))}"

    def to_json(self) -> dict[str, Any]:
        """Return the limitation as JSON values."""
        return {
            "cause": self.cause,
            "above": self.above,
            "improvable": self.improvable,
            "reliefs": [{"change": relief.change, "saves": relief.saves} for relief in self.reliefs],
        }


def what_limits(simulation: Simulation, timing: StepTiming = MAKESPAN) -> Limitation:
    """Find the limit of a compute-only plan, and the savings by more memory, a faster edge or a faster stage.

    Each change is planned for, from the best plan without it. The savings are those of the plans found, so a longer search may
    find more. At most three changes are planned for:

    - if memory is at its limit, room for one more microbatch on the ranks whose limit is reached;
    - the directed edge on which the critical path spends most, with half its latency and occupancy;
    - the stage on which the critical path spends most, with all ops a tenth shorter.

    If not even one microbatch fits, nothing is planned. The same plan gives the same answer on every machine.

    Args:
        simulation: The simulated plan.
        timing: The time that counts: the makespan, or :data:`adaptra.planning.routes.steady_steps.PERIOD`.
    """
    program, cost = simulation.program, simulation.cost
    case = Case(cost, program.microbatches, program.placement, program.name)
    bound = timing.binds(case)
    if math.isinf(bound.value):
        return Limitation(f"{bound.cause}, where not one microbatch fits", 0.0, 0.0, ())
    effort = max(EFFORT, ROUNDS * 3 * program.stages * program.microbatches)
    again = _again(timing, program, case, effort)
    base, own = timing.of(again, cost), timing.of(program, cost)
    reliefs: list[WhatIf] = []
    for change, changed in _changes(simulation):
        found = timing.of(_again(timing, again, replace(case, cost=changed), effort), changed)
        reliefs.append(WhatIf(change, max(1.0 - found / base, 0.0) if base > 0 else 0.0))
    reliefs.sort(key=lambda relief: -relief.saves)
    return Limitation(
        bound.cause,
        own / bound.value - 1.0 if bound.value > 0 else 0.0,
        1.0 - base / own if own > 0 else 0.0,
        tuple(reliefs),
    )


def _again(timing: StepTiming, program: Program, case: Case, effort: int) -> Program:
    """Return a plan that is no longer than ``program``, if ``program`` is within the memory limits."""
    fused = any(op.kind.value == "B" for order in program.orders for op in order)
    return timing.search(case, None, incumbent=None if fused else program, effort=effort)


def _changes(simulation: Simulation) -> Iterator[tuple[str, CostModel]]:
    cost, placement = simulation.cost, simulation.program.placement
    limit = cost.memory_limit
    if limit is not None:
        most = [
            max(held for held, at in zip(cost.memory_forward, placement, strict=True) if at == r) for r in range(len(limit))
        ]
        full = [rank for rank, peak in enumerate(simulation.peak_memory) if peak + most[rank] > limit[rank]]
        if full:
            more = (room + most[rank] if rank in full else room for rank, room in enumerate(limit))
            where = f"rank {full[0]}" if len(full) == 1 else f"the {len(full)} ranks that are full"
            yield f"one more microbatch in flight on {where}", cost.limited(more)
    on_edge: dict[tuple[int, int], float] = defaultdict(float)
    on_stage: dict[int, float] = defaultdict(float)
    for step in simulation.critical_path:
        if isinstance(step, MessageInterval):
            on_edge[step.source, step.destination] += step.arrived - step.posted
        else:
            on_stage[step.op.stage] += step.end - step.start
    for source, destination in _longest(on_edge):
        edge = min(source, destination)
        latency, occupancy = (
            (cost.latency_forward, cost.occupancy_forward)
            if destination > source
            else (cost.latency_backward, cost.occupancy_backward)
        )
        faster = cost.with_latency(source, destination, latency[edge] / 2)
        yield f"an edge {source}→{destination} twice as fast", faster.with_occupancy(source, destination, occupancy[edge] / 2)
    for stage in _longest(on_stage):
        durations = {
            name: tuple(0.9 * time if at == stage else time for at, time in enumerate(getattr(cost, name)))
            for name in ("forward", "input_grad", "weight_grad")
        }
        yield f"a stage {stage} faster by a tenth", replace(cost, **durations)


def _longest(spent: Mapping[T, float]) -> list[T]:
    """Return the stage or edge where most time is spent, the first of several; nothing if no time is spent."""
    return [place for place, time in spent.items() if time > 0 and time == max(spent.values())][:1]
