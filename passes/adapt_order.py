"""The pass ``adapt-order``: the best order of compute ops for the current cost model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

from adaptra import _C
from adaptra.equations.warm_up import SlackRule, in_flight_limits, warm_up
from adaptra.errors import PassError, PlanError
from adaptra.passes.base import Count, CountPerStage, Pass, option
from adaptra.program import Kind, Op, Program
from adaptra.simulation.case import Case
from adaptra.simulation.cost import MEMORY_TOLERANCE, CostModel
from adaptra.simulation.job import pipeline_of
from adaptra.simulation.simulate import Simulation, simulate

LEAST_EFFORT: Final = 1_500_000
"""Least number of ops to dispatch and simulate, about 40 ms."""

LEAST_ROUNDS: Final = 40
"""Least number of passes over the whole program, for large programs."""

UNLIMITED: Final = 2**62
"""Effort without a limit in practice."""


@dataclass(frozen=True)
class AdaptOrder(Pass):
    """Reorder the compute ops of every rank so that the simulated step is as short as the search can make it.

    The bubble equations give warm-up counts. From there a search over list-scheduling policies finds orders, in which a local
    search then moves ops (``csrc/schedule``, ``docs/planner.md``). Each order is simulated exactly.

    Guarantees, for any number of stages and microbatches, any placement and mode of communication:

    - never more microbatches in flight on a stage than ``in_flight``, never more memory on a rank than the cost model's limit;
    - if the incoming program is within these limits, the result's simulated makespan is not longer;
    - if no better program is found, the incoming program is the result;
    - with one stage per rank, not longer than gpipe, 1f1b, zb_h1 or zb_h2, of those that fit;
    - F, I and W each in microbatch order on every stage; the same result for the same input on every machine.

    If the incoming program is not within the limits and the search finds nothing, the result runs one microbatch at a time.
    Only ranks with several stages that compete for memory can cause this.

    A forward-only program is returned unchanged, since no other order of it is better.

    Refuses: a program with communication ops (their positions would be wrong afterwards), and a cost model with another number
    of stages. If no order fits the limits, PlanError names the smallest limit that works.

    Attributes:
        in_flight: The most microbatches in flight (F started, I not ended), for every stage or one number per stage.
        effort: The approximate number of ops that the search dispatches and simulates. The default is enough for thousands of
            tries on small programs and 20 on large ones. Results do not depend on the machine's speed, since no time is
            measured.
        seed: Seed of all random choices.
    """

    name: ClassVar[str] = "adapt-order"
    in_flight: int | tuple[int, ...] | None = option(None, CountPerStage())
    effort: int | None = option(None, Count(1))
    seed: int = option(0, Count(0))

    def apply(self, program: Program, cost: CostModel) -> Program:
        """Return the adapted program, named ``adapted``, or ``program`` itself if it is equally good."""
        program.require_one_pipeline(self.name)
        if program.stages != cost.stages:
            raise PassError(
                f"{self}: {program.name} has {program.stages} stages, the cost model {cost.stages}: expected as many"
            )
        case = Case(cost, program.microbatches, program.placement, program.name)
        return search(case, self.in_flight, incumbent=program, effort=self.effort, seed=self.seed)


def search(
    case: Case,
    in_flight: int | tuple[int, ...] | None,
    *,
    incumbent: Program | None = None,
    effort: int | None = None,
    seed: int = 0,
    budget: float | None = None,
    enough: float = 0.0,
    start: Program | None = None,
) -> Program:
    """Search like :class:`AdaptOrder`, for callers that need a time limit or have no program to start from.

    Args:
        case: Costs, microbatches and placement.
        in_flight: See :class:`AdaptOrder`.
        incumbent: A valid compute-only program of the same placement and microbatches, with I and W.
        effort: See :class:`AdaptOrder`. With a ``budget``, by default unlimited.
        seed: Seed of all random choices.
        budget: Seconds after which the search ends. With a budget, equal inputs may give different programs.
        enough: Makespan at which the search ends; 0 to find the shortest.
        start: A program like ``incumbent`` that may exceed the limits. It is made to fit and is one more starting point.

    Raises:
        PlanError: No order fits the limits. The text names the smallest limit that works.
        PassError: The incumbent has communication ops.
    """
    if incumbent is not None and incumbent.is_lowered:
        raise PassError(f"{AdaptOrder.name}: {incumbent.name} holds SEND and RECV ops: run it before insert-comm")
    if incumbent is not None and incumbent.is_forward_only:
        return incumbent
    cost, stages, microbatches = case.cost, case.cost.stages, case.microbatches
    limits = in_flight_limits(in_flight, stages, microbatches)
    _refuse_impossible_limit(case)
    if effort is None:
        effort = UNLIMITED if budget is not None else max(LEAST_EFFORT, LEAST_ROUNDS * 3 * stages * microbatches)
    shortest = _C.search_orders(
        pipeline_of(case, case.cost),
        limits,
        _starts(case, limits),
        _known_alternations(stages, microbatches) if len(set(case.placement)) == stages else [],
        effort,
        seed,
        budget,
        enough,
        None if start is None else _C.to_orders(start.orders),
    )
    best = None if incumbent is None else simulate(incumbent, cost)
    if best is not None and not _fits(best, limits):
        best = None
    if shortest is None:
        return one_at_a_time(case.placement, microbatches) if best is None else best.program
    makespan, orders = shortest
    if best is not None and best.makespan <= makespan:
        return best.program
    return Program.of_pipeline(ADAPTED, case.placement, microbatches, orders.computed())


ADAPTED: Final = "adapted"
"""Name of the programs found by this pass."""


def _refuse_impossible_limit(case: Case) -> None:
    """Refuse a limit below one microbatch's memory on a rank.

    In every order, a microbatch needs its memory on all stages of a rank between its last F and its first I.
    """
    if (limits := case.cost.memory_limit) is None:
        return
    for rank, limit in enumerate(limits):
        held = sum(held for held, at in zip(case.cost.memory_forward, case.placement, strict=True) if at == rank)
        if held > limit + MEMORY_TOLERANCE:
            raise PlanError(
                f"memory limit of rank {rank} is {limits.text(limit)}: one microbatch holds {limits.text(held)}, the smallest "
                "that works"
            )


def _fits(simulation: Simulation, limits: Sequence[int]) -> bool:
    in_flight = zip(simulation.peak_in_flight, limits, strict=True)
    return not simulation.over_memory and all(peak <= limit for peak, limit in in_flight)


def one_at_a_time(placement: tuple[int, ...], microbatches: int) -> Program:
    """Return the program that finishes each microbatch before the next starts. It is slow but fits every possible limit."""
    orders: list[list[Op]] = [[] for _ in range(max(placement) + 1)]
    for microbatch in range(microbatches):
        for stage, rank in enumerate(placement):
            orders[rank].append(Op(stage, Kind.F, microbatch))
        for stage, rank in reversed(list(enumerate(placement))):
            orders[rank] += [Op(stage, Kind.I, microbatch), Op(stage, Kind.W, microbatch)]
    return Program.of_pipeline("one_at_a_time", placement, microbatches, tuple(map(tuple, orders)))


def _starts(case: Case, limits: Sequence[int]) -> list[tuple[int, ...]]:
    """Return warm-up counts to start from: those of each slackness rule, those of 1F1B, and the most that fit."""
    shares = [min(limit, share) for limit, share in zip(limits, _memory_shares(case), strict=True)]
    asked = [warm_up(case.cost, case.microbatches, rule=rule).x for rule in SlackRule]
    asked += [tuple(range(case.cost.stages, 0, -1)), tuple(shares)]
    cut = [tuple(min(count, share) for count, share in zip(start, shares, strict=True)) for start in asked]
    return list(dict.fromkeys([*cut, warm_up(case.cost, case.microbatches, shares).x]))


def _memory_shares(case: Case) -> list[int]:
    """Return, per stage, the number of microbatches that fit if all stages of its rank keep the same number."""
    cost = case.cost
    if cost.memory_limit is None:
        return [case.microbatches] * cost.stages
    held = [0.0] * len(cost.memory_limit)
    for stage, rank in enumerate(case.placement):
        held[rank] += cost.memory_forward[stage]
    shares: list[int] = []
    for rank in case.placement:
        room = math.inf if held[rank] == 0.0 else (cost.memory_limit[rank] + MEMORY_TOLERANCE) / held[rank]
        shares.append(max(1, math.floor(min(room, case.microbatches))))
    return shares


def _known_alternations(stages: int, microbatches: int) -> list[tuple[list[int], list[int]]]:
    """Return zb_h2, zb_h1, 1f1b and gpipe of :mod:`adaptra.program.schedules` in the form that the search takes.

    Each has, per stage, the warm-up count and the number of microbatches by which W is deferred. They are mostly sorted from
    short to long, since the search spends little on a schedule that is no better than the best so far.
    """
    ahead = [stages - stage for stage in range(stages)]
    late, at_once = list(range(stages)), [0] * stages
    h2 = [2 * count - 1 for count in ahead], [2 * stage for stage in late]
    return [h2, (ahead, late), (ahead, at_once), ([microbatches] * stages, at_once)]
