"""The pass ``adapt-order``: the order of compute ops that suits links and stages as they are now."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

from adaptra import _C
from adaptra.cost import CostModel
from adaptra.dependencies import RULE
from adaptra.errors import PassError, PlanError
from adaptra.passes.base import Count, CountPerStage, Pass, option
from adaptra.program import Kind, Op, Program
from adaptra.simulate import Simulation, simulate
from adaptra.warm_up import SlackRule, in_flight_limits, warm_up

log = logging.getLogger(__name__)

LEAST_EFFORT: Final = 400_000
"""Ops to dispatch and simulate at least: some 15 ms."""

LEAST_ROUNDS: Final = 40
"""How often to go over the whole program at least, for large programs."""


MEMORY_TOLERANCE: Final = 1e-9
"""How far rounding may take a sum of memory above its limit."""


@dataclass(frozen=True)
class AdaptOrder(Pass):
    """Reorder the compute ops of every rank so that the simulated step is as short as the search can make it.

    The bubble equations give warm-up counts; from there a search over list-scheduling policies (``csrc/schedule``) finds
    orders, and the exact simulation judges each.

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
        effort: About how many ops the search dispatches and simulates; by default enough for a few hundred tries on small
            programs and 20 on large ones. No time is measured, so results do not depend on the machine's speed.
    """

    name: ClassVar[str] = "adapt-order"
    memory: int | tuple[int, ...] | None = option(None, CountPerStage())
    effort: int | None = option(None, Count(1))

    def apply(self, program: Program, cost: CostModel) -> Program:
        """The adapted program, named ``adapted``, or ``program`` itself where that is as good."""
        if program.is_lowered:
            raise PassError(f"{self}: {program.name} holds SEND and RECV ops: run {self.name} before insert-comm")
        if program.stages != cost.stages:
            raise PassError(
                f"{self}: {program.name} has {program.stages} stages, the cost model {cost.stages}: expected as many"
            )
        if program.is_forward_only:
            return program
        limits = in_flight_limits(self.memory, program.stages, program.microbatches)
        _refuse_impossible_limit(program, cost)
        best = simulate(program, cost)
        if not _fits(best, limits):
            best = simulate(one_at_a_time(program.placement, program.microbatches), cost)
        found = self._search(program, cost, limits)
        if found is not None:
            adapted = simulate(found, cost)
            if _fits(adapted, limits) and adapted.makespan < best.makespan:
                best = adapted
        log.info("%s becomes %s: makespan %g", program.name, best.program.name, best.makespan)
        return best.program

    def _search(self, program: Program, cost: CostModel, limits: tuple[int, ...]) -> Program | None:
        one_stage_per_rank = program.ranks == program.stages
        found = _C.search_orders(
            program,
            cost,
            limits,
            _starts(program, cost, limits),
            _known_alternations(program.stages, program.microbatches) if one_stage_per_rank else [],
            self.effort or max(LEAST_EFFORT, LEAST_ROUNDS * 3 * program.stages * program.microbatches),
            RULE,
        )
        if found is None:
            return None
        orders = tuple(tuple(Op(*op) for op in order) for order in found)
        return Program(ADAPTED, program.placement, program.microbatches, orders)


ADAPTED: Final = "adapted"
"""The name of programs whose orders this pass found."""


def _refuse_impossible_limit(program: Program, cost: CostModel) -> None:
    """A microbatch holds its memory on all stages of a rank between its last F and its first I, whatever the order."""
    for rank, limit in enumerate(cost.memory_limit or ()):
        held = sum(cost.memory_forward[stage] for stage in range(program.stages) if program.placement[stage] == rank)
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


def _starts(program: Program, cost: CostModel, limits: Sequence[int]) -> list[tuple[int, ...]]:
    """Warm-up counts to start from: what each slackness rule asks for, 1F1B's, and all that fits."""
    shares = [min(limit, share) for limit, share in zip(limits, _memory_shares(program, cost), strict=True)]
    asked = [warm_up(cost, program.microbatches, rule=rule).x for rule in SlackRule]
    asked += [tuple(range(program.stages, 0, -1)), tuple(shares)]
    cut = [tuple(min(count, share) for count, share in zip(start, shares, strict=True)) for start in asked]
    return list(dict.fromkeys([*cut, warm_up(cost, program.microbatches, shares).x]))


def _memory_shares(program: Program, cost: CostModel) -> list[int]:
    """Per stage, how many microbatches it may keep if all stages of its rank keep as many."""
    if cost.memory_limit is None:
        return [program.microbatches] * program.stages
    held = [0.0] * program.ranks
    for stage, rank in enumerate(program.placement):
        held[rank] += cost.memory_forward[stage]
    shares: list[int] = []
    for rank in program.placement:
        room = math.inf if held[rank] == 0.0 else (cost.memory_limit[rank] + MEMORY_TOLERANCE) / held[rank]
        shares.append(max(1, math.floor(min(room, program.microbatches))))
    return shares


def _known_alternations(stages: int, microbatches: int) -> list[tuple[list[int], list[int]]]:
    """gpipe, 1f1b, zb_h1 and zb_h2 of :mod:`adaptra.schedules`: warm-up and by how many microbatches W is late, per stage."""
    ahead = [stages - stage for stage in range(stages)]
    late, at_once = list(range(stages)), [0] * stages
    h2 = [2 * count - 1 for count in ahead], [2 * stage for stage in late]
    return [([microbatches] * stages, at_once), (ahead, at_once), (ahead, late), h2]
