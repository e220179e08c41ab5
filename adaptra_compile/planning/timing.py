"""What a plan of one pipeline makes short, and how to search for it.

Steps in a row overlap: a rank begins its next step as soon as it has ended the one before. Then a step costs the period, see
:mod:`adaptra.planning.routes.steady_steps`. Behind a barrier all ranks begin a step together, and it costs the makespan.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

from adaptra import _C
from adaptra.passes.adapt_order import search
from adaptra.planning.planner import plan
from adaptra.program import Op, Program
from adaptra.simulation.bound import Bound
from adaptra.simulation.case import Case
from adaptra.simulation.cost import CostModel
from adaptra.simulation.job import pipeline_of
from adaptra.simulation.simulate import lower_bound, simulate

InFlight = int | Sequence[int] | None
"""The most microbatches in flight, as for :func:`adaptra.planning.planner.plan`."""


class StepTiming(Protocol):
    """A time of a program that plans make short."""

    @property
    def name(self) -> str:
        """Its name, for people."""
        ...

    def of(self, program: Program, cost: CostModel) -> float:
        """Return the time of a program, in the cost model's unit."""
        ...

    def bound(self, case: Case) -> float:
        """Return a time that no program of a case is below; infinite if not one microbatch fits the memory."""
        ...

    def binds(self, case: Case) -> Bound:
        """Return the same with its cause."""
        ...

    def plan(
        self,
        case: Case,
        *,
        in_flight: InFlight = None,
        incumbent: Program | None = None,
        effort: int | None = None,
        budget: float | None = None,
        seed: int = 0,
    ) -> Program:
        """Find the program of the shortest time. Arguments and errors are those of :func:`adaptra.planning.planner.plan`."""
        ...

    def search(
        self,
        case: Case,
        in_flight: int | tuple[int, ...] | None,
        *,
        effort: int | None = None,
        enough: float = 0.0,
        start: Program | None = None,
        incumbent: Program | None = None,
    ) -> Program:
        """Search programs of a case. Arguments and errors are those of :func:`adaptra.passes.adapt_order.search`."""
        ...

    def spared(self, case: Case, program: Program, at_most: float, effort: int) -> tuple[tuple[Op, ...], ...]:
        """Return orders within the time ``at_most`` that hold less memory, as far as ``effort`` ops to simulate find any."""
        ...

    def needed_memory(self, case: Case, at_most: float) -> tuple[float, ...] | None:
        """Return, per rank, the memory below which no program takes at most this time; None if none is known."""
        ...


class Makespan:
    """The time of one step from its first op to its last one: that of steps behind a barrier."""

    @property
    def name(self) -> str:
        """Its name, for people."""
        return "makespan"

    def of(self, program: Program, cost: CostModel) -> float:
        """Return the makespan of a program."""
        return simulate(program, cost).makespan

    def bound(self, case: Case) -> float:
        """Return a makespan that no program of a case is below."""
        return lower_bound(case).value

    def binds(self, case: Case) -> Bound:
        """Return the same with its cause."""
        return lower_bound(case)

    def plan(
        self,
        case: Case,
        *,
        in_flight: InFlight = None,
        incumbent: Program | None = None,
        effort: int | None = None,
        budget: float | None = None,
        seed: int = 0,
    ) -> Program:
        """Find the program of the shortest makespan."""
        return plan(case, in_flight=in_flight, incumbent=incumbent, effort=effort, budget=budget, seed=seed)

    def search(
        self,
        case: Case,
        in_flight: int | tuple[int, ...] | None,
        *,
        effort: int | None = None,
        enough: float = 0.0,
        start: Program | None = None,
        incumbent: Program | None = None,
    ) -> Program:
        """Search programs of a short makespan."""
        return search(case, in_flight, effort=effort, enough=enough, start=start, incumbent=incumbent)

    def spared(self, case: Case, program: Program, at_most: float, effort: int) -> tuple[tuple[Op, ...], ...]:
        """Return orders within the makespan ``at_most`` that hold less memory."""
        return _C.spare_memory(pipeline_of(case, case.cost), _C.to_orders(program.orders), at_most, effort).computed()

    def needed_memory(self, case: Case, at_most: float) -> None:
        """Return None: what one rank needs depends on what the others do."""


MAKESPAN: Final = Makespan()
"""The makespan, for steps behind a barrier."""
