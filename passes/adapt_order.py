"""The pass ``adapt-order``: the order of compute ops that suits links and stages as they are now."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

from adaptra import _C
from adaptra.equations.warm_up import SlackRule, in_flight_limits, warm_up
from adaptra.errors import PassError, PlanError
from adaptra.passes.base import Count, CountPerStage, Pass, option
from adaptra.program import Kind, Op, Program
from adaptra.program.dependencies import RULE
from adaptra.simulation.cost import Case, CostModel
from adaptra.simulation.simulate import Simulation, simulate

LEAST_EFFORT: Final = 1_500_000
"""Ops to dispatch and simulate at least: some 40 ms."""

LEAST_ROUNDS: Final = 40
"""How often to go over the whole program at least, for large programs."""

UNLIMITED: Final = 2**62
"""More effort than anybody waits for."""

MEMORY_TOLERANCE: Final = 1e-9
"""How far rounding may take a sum of memory above its limit."""


@dataclass(frozen=True)
class AdaptOrder(Pass):
    """Reorder the compute ops of every rank so that the simulated step is as short as the search can make it.

    The bubble equations give warm-up counts; from there a search over list-scheduling policies finds orders, in which a local
    search then moves ops (``csrc/schedule``, ``docs/planner.md``). Each is timed exactly.

    Guarantees, for any number of stages and microbatches, any placement and mode of communication:

    - never more microbatches in flight on a stage than ``memory``, never more memory on a rank than the cost model's limit;
    - if the incoming program is within these limits, the result's simulated makespan is not longer: if nothing better is found,
      the incoming program is the result;
    - with one stage per rank, not longer than gpipe, 1f1b, zb_h1 or zb_h2, of those that fit;
    - F, I and W each in microbatch order on every stage; the same result for the same input on every machine.

    Where the incoming program is not within the limits and the search finds nothing, which only ranks with several stages
    competing for memory can cause, the result runs one microbatch at a time.

    A forward-only program is returned as it is: its order leaves no choice that matters.

    Refuses: a program with communication ops (they would stand in the wrong place afterwards), and a cost model with another
    number of stages. Where no order could fit the limits, PlanError says the smallest limit that would do.

    Attributes:
        memory: The most microbatches in flight (F started, I not ended), for every stage or one number per stage.
        effort: About how many ops the search dispatches and simulates; by default enough for thousands of tries on small
            programs and 20 on large ones. No time is measured, so results do not depend on the machine's speed.
        seed: Of all random choices.
    """

    name: ClassVar[str] = "adapt-order"
    memory: int | tuple[int, ...] | None = option(None, CountPerStage())
    effort: int | None = option(None, Count(1))
    seed: int = option(0, Count(0))

    def apply(self, program: Program, cost: CostModel) -> Program:
        """The adapted program, named ``adapted``, or ``program`` itself where that is as good."""
        if program.stages != cost.stages:
            raise PassError(
                f"{self}: {program.name} has {program.stages} stages, the cost model {cost.stages}: expected as many"
            )
        case = Case(cost, program.microbatches, program.placement, program.name)
        return search(case, self.memory, incumbent=program, effort=self.effort, seed=self.seed)


def search(
    case: Case,
    memory: int | tuple[int, ...] | None,
    *,
    incumbent: Program | None = None,
    effort: int | None = None,
    seed: int = 0,
    budget: float | None = None,
    enough: float = 0.0,
    start: Program | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> Program:
    """What :class:`AdaptOrder` does, for callers that may also end the search by time, and need no program to start from.

    Args:
        case: Costs, microbatches and placement.
        memory: See :class:`AdaptOrder`.
        incumbent: A valid compute-only program of the same placement and microbatches, with I and W.
        effort: See :class:`AdaptOrder`. With a ``budget``, by default unlimited.
        seed: Of all random choices.
        budget: Seconds after which the search ends, and with it that equal inputs give equal programs.
        enough: The search ends once a program takes no longer; 0 for the shortest.
        start: A program like ``incumbent`` that may hold more than the limits: made to fit, it is one more to start from.
        should_stop: Asked every few milliseconds; once it returns true the search ends with the best found so far.

    Raises:
        PlanError: No order fits the limits; says the smallest that would do.
        PassError: The incumbent holds communication ops.
    """
    if incumbent is not None and incumbent.is_lowered:
        raise PassError(f"{AdaptOrder.name}: {incumbent.name} holds SEND and RECV ops: run it before insert-comm")
    if incumbent is not None and incumbent.is_forward_only:
        return incumbent
    cost, stages, microbatches = case.cost, case.cost.stages, case.microbatches
    limits = in_flight_limits(memory, stages, microbatches)
    _refuse_impossible_limit(case)
    if effort is None:
        effort = UNLIMITED if budget is not None else max(LEAST_EFFORT, LEAST_ROUNDS * 3 * stages * microbatches)
    found = _C.search_orders(
        case,
        limits,
        _starts(case, limits),
        _known_alternations(stages, microbatches) if len(set(case.placement)) == stages else [],
        effort,
        seed,
        budget,
        should_stop,
        RULE,
        enough,
        None if start is None else _C.to_orders(start.orders),
    )
    best = None if incumbent is None else simulate(incumbent, cost)
    if best is not None and not _fits(best, limits):
        best = None
    if found is None:
        return one_at_a_time(case.placement, microbatches) if best is None else best.program
    makespan, orders = found
    if best is not None and best.makespan <= makespan:
        return best.program
    return Program(ADAPTED, case.placement, microbatches, orders)


ADAPTED: Final = "adapted"
"""The name of programs whose orders this pass found."""


def _refuse_impossible_limit(case: Case) -> None:
    """A microbatch holds its memory on all stages of a rank between its last F and its first I, whatever the order."""
    for rank, limit in enumerate(case.cost.memory_limit or ()):
        held = sum(held for held, at in zip(case.cost.memory_forward, case.placement, strict=True) if at == rank)
        if held > limit + MEMORY_TOLERANCE:
            raise PlanError(f"memory limit of rank {rank} is {limit:g}: one microbatch holds {held:g}, the smallest that works")


def _fits(simulation: Simulation, limits: Sequence[int]) -> bool:
    in_flight = zip(simulation.peak_in_flight, limits, strict=True)
    return not simulation.over_memory and all(peak <= limit for peak, limit in in_flight)


def one_at_a_time(placement: tuple[int, ...], microbatches: int) -> Program:
    """Every microbatch goes all the way before the next starts: slow, and within every limit that is not impossible."""
    orders: list[list[Op]] = [[] for _ in range(max(placement) + 1)]
    for microbatch in range(microbatches):
        for stage, rank in enumerate(placement):
            orders[rank].append(Op(stage, Kind.F, microbatch))
        for stage, rank in reversed(list(enumerate(placement))):
            orders[rank] += [Op(stage, Kind.I, microbatch), Op(stage, Kind.W, microbatch)]
    return Program("one_at_a_time", placement, microbatches, tuple(map(tuple, orders)))


def _starts(case: Case, limits: Sequence[int]) -> list[tuple[int, ...]]:
    """Warm-up counts to start from: what each slackness rule asks for, 1F1B's, and all that fits."""
    shares = [min(limit, share) for limit, share in zip(limits, _memory_shares(case), strict=True)]
    asked = [warm_up(case.cost, case.microbatches, rule=rule).x for rule in SlackRule]
    asked += [tuple(range(case.cost.stages, 0, -1)), tuple(shares)]
    cut = [tuple(min(count, share) for count, share in zip(start, shares, strict=True)) for start in asked]
    return list(dict.fromkeys([*cut, warm_up(case.cost, case.microbatches, shares).x]))


def _memory_shares(case: Case) -> list[int]:
    """Per stage, how many microbatches it may keep if all stages of its rank keep as many."""
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
    """zb_h2, zb_h1, 1f1b and gpipe of :mod:`adaptra.program.schedules`: warm-up and by how many microbatches W is late, per
    stage.

    Mostly from short to long: of what is no better than what is known, the search asks nothing but its makespan.
    """
    ahead = [stages - stage for stage in range(stages)]
    late, at_once = list(range(stages)), [0] * stages
    h2 = [2 * count - 1 for count in ahead], [2 * stage for stage in late]
    return [h2, (ahead, late), (ahead, at_once), ([microbatches] * stages, at_once)]
