"""Plans of one pipeline whose steps follow each other without a barrier: the period counts, not the makespan of one step."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from adaptra import _C
from adaptra.equations.warm_up import in_flight_limits
from adaptra.passes.adapt_order import ADAPTED, LEAST_EFFORT, LEAST_ROUNDS, UNLIMITED, search
from adaptra.planning.planner import plan, with_split_backwards
from adaptra.planning.routes.period_bound import period_bound
from adaptra.planning.timing import MAKESPAN, InFlight, StepTiming
from adaptra.program import Op, Program
from adaptra.program.placement import has_several, stages_of
from adaptra.program.routing import Routing
from adaptra.program.schedules import GENERATORS, generate
from adaptra.simulation.bound import Bound, BoundKind
from adaptra.simulation.case import Case
from adaptra.simulation.cost import MEMORY_TOLERANCE, Blocking, CostModel
from adaptra.simulation.job import pipeline_of
from adaptra.simulation.simulate import STEPS, simulate

_FOR_MAKESPAN: Final = 0.3
"""The part of a budget for the search by makespan, whose best program the search by period starts from."""

_SMALL: Final = 512
"""Stages times microbatches of the largest pipelines for which published schedules are tried."""

_DIVISOR: Final = 8
"""Divisor of the effort for one of many searches, each for a program that is short enough."""

_EQUAL: Final = 1e-9
"""Relative tolerance between a period and its bound, which are sums in another order."""


class SteadySteps:
    """The period: the steady time of a step among others, as each rank begins the next one without waiting for the others."""

    @property
    def name(self) -> str:
        """Its name, for people."""
        return "period"

    def of(self, program: Program, cost: CostModel) -> float:
        """Return the period of a program."""
        return simulate(program, cost).period

    def bound(self, case: Case) -> float:
        """Return a period that no program of a case is below."""
        return pipeline_bound(case).value

    def binds(self, case: Case) -> Bound:
        """Return the same with its cause."""
        return pipeline_bound(case)

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
        """Find the program of the shortest period; of several the one with the shortest makespan.

        Its period is not longer than that of the plan by makespan, the incumbent, or a published schedule, of those within
        the limits. With a budget the plan by makespan has a part of it.
        """
        ends = None if budget is None else time.perf_counter() + budget
        first = plan(
            case,
            in_flight=in_flight,
            incumbent=incumbent,
            effort=effort,
            budget=None if budget is None else _FOR_MAKESPAN * budget,
            seed=seed,
        )
        if ends is not None and incumbent is None and time.perf_counter() >= ends:
            return first
        contest = _Contest(case, in_flight)
        contest.enter(first)
        if incumbent is not None:
            contest.enter(with_split_backwards(incumbent, case.cost))
        if not contest.is_won() and (ends is None or time.perf_counter() < ends):
            seconds = None if ends is None else ends - time.perf_counter()
            contest.enter(_searched(case, effort, contest.bound, contest.best or first, seed, seconds))
        if ends is None and not contest.is_won():
            for program in _published(case):
                contest.enter(program)
        return contest.best or first

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
        """Search programs of a short period; those of a short makespan too, where none is short enough.

        Both searches have a part of the effort only, since they find hardly more with all of it.
        """
        short = (_effort(case) if effort is None else effort) // _DIVISOR
        contest = _Contest(case, in_flight)
        for program in (start, incumbent):
            contest.enter(program)
        if not contest.is_won(enough):
            contest.enter(_searched(case, short, max(enough, contest.bound), start or incumbent, 0, None))
        if contest.best is not None and contest.is_won(enough):
            return contest.best
        other = search(case, in_flight, effort=short, enough=enough, start=start, incumbent=incumbent)
        contest.enter(other)
        return contest.best or other

    def spared(self, case: Case, program: Program, at_most: float, effort: int) -> tuple[tuple[Op, ...], ...]:
        """Return orders within the period ``at_most`` that hold less memory."""
        return _C.spare_memory(pipeline_of(case, case.cost), _C.to_orders(program.orders), at_most, effort, STEPS).computed()

    def needed_memory(self, case: Case, at_most: float) -> tuple[float, ...] | None:
        """Return, per rank, the memory below which no program repeats so fast; None if a rank has several stages."""
        if has_several(case.placement):
            return None
        cost, needed = case.cost, [0.0] * case.cost.stages
        for stage, trip in enumerate(_trips(cost)):
            forward, back, weight = cost.forward[stage], cost.input_grad[stage], cost.weight_grad[stage]
            held, freed = cost.memory_forward[stage], cost.memory_input_grad[stage]
            within = at_most - cost.update[stage]
            idle = max(within - case.microbatches * (forward + back + weight), 0.0)
            room = max((forward + trip - idle) / forward, 1.0) if forward > 0.0 else 1.0
            taken = held * (forward + trip + back) + (held - freed) * weight
            turns = case.microbatches * taken / within if within > 0.0 else 0.0
            most = min(math.ceil(room - _EQUAL), case.microbatches) * held
            needed[case.placement[stage]] = max(most, turns * (1 - _EQUAL))
        return tuple(needed)


PERIOD: Final = SteadySteps()
"""The period, for steps in a row without a barrier."""


def timing_of(*, barrier: bool) -> StepTiming:
    """Return what plans make short: the makespan if every step is behind a barrier, otherwise the period."""
    return MAKESPAN if barrier else PERIOD


def pipeline_bound(case: Case) -> Bound:
    """Return the greatest lower bound of the period of one pipeline that is known, and its cause.

    The bounds are those of :mod:`adaptra.planning.routes.period_bound`, with ranks for workers. Memory is counted as the cost
    model does, in which I frees a part. So a rank is given room for as many microbatches as it may hold, if all but the last
    one wait for W only. Exact are these two, where R is the time from the end of F to the start of I, by ops and messages:

    - fill: before its first I a rank runs nothing but the F that fit its memory, and idles for the rest of F + R;
    - memory: a microbatch takes its memory for F + R + I, and what is left of it for W. All of them in a step take it in turn.
    """
    case.require_one_pipeline("the bound of a pipeline's period")
    ranks = sorted(set(case.placement))
    if full := [rank for rank in ranks if _held(case, rank) > _limit(case, rank)]:
        return Bound(math.inf, BoundKind.MEMORY, f"rank {full[0]}")
    free = replace(case.cost, memory_limit=None, half_duplex=False, blocking=Blocking.NONE)
    job = replace(replace(case, cost=free, barrier=False).of_replicas(1), memory=tuple(_most(case, rank) for rank in ranks))
    found = period_bound(job, Routing.at_home(case.placement, 1, case.microbatches))
    of_ranks = Bound(found.value, found.kind, found.where.replace("worker", "rank").replace("link", "link of ranks"))
    return max((of_ranks, *_of_memory(case), *_of_shared_edges(case)), key=lambda one: one.value)


def _held(case: Case, rank: int) -> float:
    """Return the memory of one microbatch on all stages of a rank, which every order needs."""
    return sum(case.cost.memory_forward[stage] for stage in stages_of(rank, case.placement))


def _limit(case: Case, rank: int) -> float:
    return math.inf if case.cost.memory_limit is None else case.cost.memory_limit[rank] + MEMORY_TOLERANCE


def _most(case: Case, rank: int) -> int:
    """Return the most microbatches, of all stages, that a rank may hold from F to W, each but the last one after its I."""
    cost, stages = case.cost, stages_of(rank, case.placement)
    everything = case.microbatches * len(stages)
    whole = min(cost.memory_forward[stage] for stage in stages)
    rest = min(cost.memory_forward[stage] - cost.memory_input_grad[stage] for stage in stages)
    if math.isinf(_limit(case, rank)) or rest <= 0.0:
        return everything
    return max(len(stages), min(everything, 1 + math.floor((_limit(case, rank) - whole) / rest + _EQUAL)))


def _of_memory(case: Case) -> Iterator[Bound]:
    """Yield the two bounds of memory that count it as the cost model does; of ranks with one stage only."""
    cost = case.cost
    if cost.memory_limit is None or has_several(case.placement):
        return
    for stage, trip in enumerate(_trips(cost)):
        rank, held, freed = case.placement[stage], cost.memory_forward[stage], cost.memory_input_grad[stage]
        forward, back, weight = cost.forward[stage], cost.input_grad[stage], cost.weight_grad[stage]
        limit = _limit(case, rank)
        if held == 0.0:
            continue
        update = cost.update[stage]  # meanwhile a rank holds nothing
        work = update + case.microbatches * (forward + back + weight)
        room = min(case.microbatches, math.floor(limit / held + _EQUAL))
        yield Bound(work + max(forward + trip - room * forward, 0.0), BoundKind.FILL, f"rank {rank}")
        taken = held * (forward + trip + back) + (held - freed) * weight
        yield Bound(update + case.microbatches * taken / limit, BoundKind.MEMORY, f"rank {rank}")


def _trips(cost: CostModel) -> list[float]:
    """Return, per stage, the time from the end of its F to the start of its I, by ops and messages."""
    trips = [0.0]
    for stage in reversed(range(cost.stages - 1)):
        there = cost.latency_forward[stage] + cost.occupancy_forward[stage]
        back = cost.latency_backward[stage] + cost.occupancy_backward[stage]
        trips.append(trips[-1] + there + cost.forward[stage + 1] + cost.input_grad[stage + 1] + back)
    return trips[::-1]


def _of_shared_edges(case: Case) -> Iterator[Bound]:
    """Yield the bounds of edges whose directions share them: all messages of a step occupy one after the other."""
    cost = case.cost
    if cost.half_duplex:
        for edge in range(cost.stages - 1):
            busy = case.microbatches * (cost.occupancy_forward[edge] + cost.occupancy_backward[edge])
            yield Bound(busy, BoundKind.LINK, f"edge {edge}-{edge + 1}")


def _effort(case: Case) -> int:
    return max(LEAST_EFFORT, LEAST_ROUNDS * 3 * case.cost.stages * case.microbatches)


def _has_search(case: Case) -> bool:
    """Return whether the search by period knows the case's communication."""
    return not case.cost.half_duplex and case.cost.blocking is Blocking.NONE


def _searched(
    case: Case, effort: int | None, enough: float, start: Program | None, seed: int, seconds: float | None
) -> Program | None:
    """Return the program that the search by period finds; None if it finds none, or does not know the communication."""
    if not _has_search(case):
        return None
    if effort is None:
        effort = UNLIMITED if seconds is not None else _effort(case)
    orders = None if start is None else _C.to_orders(start.orders)
    found = _C.search_period(pipeline_of(case, case.cost), None, effort, seed, seconds, enough, orders)
    return None if found is None else Program.of_pipeline(ADAPTED, case.placement, case.microbatches, found[1].computed())


class _Contest:
    """The shortest period within the limits, of the programs so far; of equal ones the shortest makespan, or the first.

    Attributes:
        bound: The bound of the period.
        best: The program, or None.
    """

    def __init__(self, case: Case, in_flight: InFlight) -> None:
        self.bound = pipeline_bound(case).value
        self.best: Program | None = None
        self._case = case
        self._limits = in_flight_limits(in_flight, case.cost.stages, case.microbatches)
        self._times = math.inf, math.inf

    def enter(self, program: Program | None) -> None:
        """Take a program with I and W, if there is one."""
        if program is None or program is self.best:
            return
        simulation = simulate(program, self._case.cost)
        if simulation.over_memory or any(map(int.__gt__, simulation.peak_in_flight, self._limits)):
            return
        times = simulation.period, simulation.makespan
        if times < self._times:
            self.best, self._times = program, times

    def is_won(self, enough: float = 0.0) -> bool:
        """Return whether the best period is short enough, or at the bound."""
        return self._times[0] <= max(enough, self.bound * (1 + _EQUAL))


def _published(case: Case) -> Iterator[Program]:
    stages = case.cost.stages
    if case.placement == tuple(range(stages)) and stages * case.microbatches <= _SMALL:
        for name in GENERATORS:
            yield with_split_backwards(generate(name, stages, case.microbatches), case.cost)
