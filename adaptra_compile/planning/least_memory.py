"""The plan that a pipeline starts with: least memory, and steps hardly longer than those of the best plan.

Plans are compared by the peak memory of their activations, in the cost model's unit. First comes the largest peak of any rank,
since the job needs devices of that size; then the sum over the ranks. Of plans equal in both, the shorter one is taken.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from adaptra.passes.adapt_order import ADAPTED, LEAST_EFFORT, LEAST_ROUNDS
from adaptra.planning.timing import MAKESPAN, StepTiming
from adaptra.program import Program
from adaptra.simulation.case import Case
from adaptra.simulation.cost import MEMORY_TOLERANCE
from adaptra.simulation.simulate import simulate

WITHIN: Final = 0.01
"""Tolerated excess of a step over that of the best plan found, as a fraction of it."""

_PRECISION: Final = 0.004
"""Precision of the search for the lowest memory limit, as a fraction of that limit."""

_SHARE: Final = 3
"""Divisor of the search effort for all limits that are tried but the last."""

_SMALL: Final = 20_000
"""Ops of the largest program that is compared with that of another timing."""

_SHARES: Final = (0.0, 0.25, 0.5, 0.75)
"""Parts of what ranks hold above what they need at least, for which programs are tried that hold no more."""


def plan_least_memory(
    case: Case,
    *,
    in_flight: int | Sequence[int] | None = None,
    incumbent: Program | None = None,
    within: float = WITHIN,
    timing: StepTiming = MAKESPAN,
) -> Program:
    """Find the program of least memory among those hardly longer than the best one found.

    The same arguments give the same program on every machine.

    Args:
        case: Costs, microbatches, placement and memory limits.
        in_flight: As for :func:`adaptra.planning.planner.plan`.
        incumbent: A program to start from, as for :func:`adaptra.planning.planner.plan`.
        within: Tolerated excess of the time over the best program's, as a fraction of it.
        timing: The time that counts: the makespan, or :data:`adaptra.planning.routes.steady_steps.PERIOD`. By the latter, no
            small program is slower than that of the makespan, unless it holds less.

    Raises:
        PlanError: No program fits the limits. The text names the smallest limit that works.
    """
    limits = in_flight if in_flight is None or isinstance(in_flight, int) else tuple(in_flight)
    best = timing.plan(case, in_flight=in_flight, incumbent=incumbent)
    lowest = _Descent(case, limits, timing.of(best, case.cost) * (1.0 + within), timing).descend(best)
    if timing is MAKESPAN or 3 * case.cost.stages * case.microbatches > _SMALL:
        return lowest
    other = plan_least_memory(case, in_flight=in_flight, incumbent=incumbent, within=within)
    held = (max(simulate(program, case.cost).peak_memory) for program in (other, lowest))
    is_better = next(held) <= next(held) and timing.of(other, case.cost) < timing.of(lowest, case.cost)
    return other if is_better else lowest


def spare_memory(case: Case, program: Program, at_most: float, timing: StepTiming = MAKESPAN) -> Program:
    """Save memory by starting forwards later, as far as the time stays within ``at_most``.

    This is much faster than a search. No rank needs more memory than before.

    Args:
        case: Costs, microbatches and placement.
        program: Compute ops with I and W, each kind in microbatch order on every stage.
        at_most: The longest time, in the cost model's unit.
        timing: The time that counts.

    Returns:
        The program with later forwards, or ``program`` itself if nothing can be saved.
    """
    effort = max(LEAST_EFFORT, LEAST_ROUNDS * 3 * case.cost.stages * case.microbatches)
    spared = Program.of_pipeline(ADAPTED, case.placement, case.microbatches, timing.spared(case, program, at_most, effort))
    is_better = spared.orders != program.orders and timing.of(spared, case.cost) <= at_most
    return spared if is_better else program


@dataclass(frozen=True, slots=True)
class _Descent:
    """Search for the lowest memory limit of all ranks that a program of time ``at_most`` fits."""

    case: Case
    in_flight: int | tuple[int, ...] | None
    at_most: float
    timing: StepTiming

    def descend(self, best: Program) -> Program:
        """Return the program of lowest memory that the search finds from the best program."""
        lowest, refused = self._spared(best), 0.0
        effort, limit = self._effort() // _SHARE, max(self._of_one_microbatch())
        while (most := max(self._held(lowest))) - refused > _PRECISION * most:
            other = self._within(limit, effort, lowest)
            if other is None:
                refused = limit
            else:
                lowest = self._spared(other)
            limit = 0.5 * (refused + max(self._held(lowest)))
        while (
            max(self._held(lowest)) > 0.0
            and (other := self._within((1.0 - _PRECISION / 2) * max(self._held(lowest)), self._effort(), lowest)) is not None
        ):
            lowest = self._spared(other)
        lowest = self._trimmed(lowest)
        held = replace(self.case, cost=self.case.cost.limited(self._held(lowest)))
        return self.timing.search(held, self.in_flight, incumbent=lowest)

    def _trimmed(self, program: Program) -> Program:
        """Return a program in which each rank holds less, as near to what it needs at least as the search finds one."""
        needed = self.timing.needed_memory(self.case, self.at_most)
        if needed is None:
            return program
        held = self._held(program)
        for share in _SHARES:
            limits = tuple(min(least + share * (most - least), most) for least, most in zip(needed, held, strict=True))
            other = None if limits == held else self._within_each(limits, self._effort() // _SHARE, program)
            if other is not None:
                return self._spared(other)
        return program

    def _spared(self, program: Program) -> Program:
        return spare_memory(self.case, program, self.at_most, self.timing)

    def _within(self, limit: float, effort: int, start: Program) -> Program | None:
        """Return a program that is short enough and within ``limit`` on every rank, or None if none is found."""
        limits = self.case.cost.memory_limit or (math.inf,) * len(set(self.case.placement))
        if any(limit < least * (1.0 - MEMORY_TOLERANCE) for least in self._of_one_microbatch()):
            return None
        return self._within_each(tuple(min(limit, own) for own in limits), effort, start)

    def _within_each(self, limits: tuple[float, ...], effort: int, start: Program) -> Program | None:
        """Return a program that is short enough and within each rank's limit, or None if none is found."""
        case = replace(self.case, cost=self.case.cost.limited(limits))
        if self.timing.bound(case) > self.at_most:
            return None
        program = self.timing.search(case, self.in_flight, effort=effort, enough=self.at_most, start=start)
        return program if self.timing.of(program, case.cost) <= self.at_most else None

    def _held(self, program: Program) -> tuple[float, ...]:
        return simulate(program, self.case.cost).peak_memory

    def _of_one_microbatch(self) -> tuple[float, ...]:
        """Return the memory per rank of a microbatch between its last F and its first I, which no order avoids."""
        held = [0.0] * len(set(self.case.placement))
        for stage, rank in enumerate(self.case.placement):
            held[rank] += self.case.cost.memory_forward[stage]
        return tuple(held)

    def _effort(self) -> int:
        return max(LEAST_EFFORT, LEAST_ROUNDS * 3 * self.case.cost.stages * self.case.microbatches)
