"""Remedies for a slow worker or a narrow or late link of a job that runs, compared by predicted seconds.

All but the first are new programs, or other links:

- keep: the running program stays;
- reorder: each replica computes its own microbatches, in another order;
- share: slow workers give microbatches to their stage's others;
- detour: microbatches go round narrow and late links;
- delegate: messages take links that the caller offers.

Once the job is healthy again, reorder gives all routes back.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import groupby, pairwise
from typing import Final

from adaptra.errors import CaseError, PlanError
from adaptra.planning.layouts.choose_roles import LEAST_GAIN
from adaptra.planning.planner import plan
from adaptra.planning.routes.detour import around_links
from adaptra.planning.routes.job_planner import detoured, plan_job, shares
from adaptra.planning.routes.joined_programs import crossed_replicas, join, order_of_replica
from adaptra.planning.routes.measured_jobs import pipeline_case
from adaptra.planning.routes.period_bound import period_bound
from adaptra.planning.routes.route import share_evenly
from adaptra.program import Program
from adaptra.program.routing import Routing
from adaptra.simulation.case import Case
from adaptra.simulation.job import with_updates
from adaptra.simulation.simulate import Simulation, simulate

EFFORT: Final = 2_000_000
"""The effort of all searches together without a budget, in ops scheduled: a tenth of a second to a few tenths."""

ALIKE: Final = 0.01
"""The fraction by which predicted seconds may differ that count as equal."""

HORIZON: Final = 100
"""The steps over which a change must pay for what it costs once."""

_NO_ROOM: Final = "no room in memory"
_LEAST: Final = 1e-4
"""Seconds of a search when a budget is used up."""
_MOST_NAMES: Final = 4
"""The most parts of a text before it ends in an ellipsis."""


class JobRemedy(Enum):
    """A remedy; see :mod:`adaptra.planning.remedies.job_remedies`."""

    KEEP = "keep"
    REORDER = "reorder"
    SHARE = "share"
    DETOUR = "detour"
    DELEGATE = "delegate"


@dataclass(frozen=True, slots=True)
class RemedyCandidate:
    """A remedy with its program.

    Attributes:
        kind: The kind.
        program: The program of all replicas, with REDUCE and STEP.
        period: Its predicted period, seconds.
        bound: The period that no order of ops under its routes beats, seconds.
        cost: Seconds that the change costs once. Of a new program the first step fills the pipeline anew.
        what: What it does, for people.
        hand_overs: How often an accumulator of weight gradients changes workers in a step, the way home included.
        moved: The number of microbatches that another replica's worker computes on a stage, of all stages together.
        over_memory: The workers that hold more microbatches than the case allows. Only the running program may have any.
    """

    kind: JobRemedy
    program: Program
    period: float
    bound: float
    cost: float
    what: str
    hand_overs: int
    moved: int
    over_memory: tuple[int, ...] = ()

    def seconds(self, horizon: int) -> float:
        """Return the predicted seconds of a step, with the step's part of what the change costs over ``horizon`` steps."""
        return self.period + self.cost / horizon


@dataclass(frozen=True)
class RemedyComparison:
    """All remedies for a case, and the choice among them. :func:`str` gives one line for an event.

    Attributes:
        case: The case.
        candidates: The possible remedies, KEEP first.
        refused: Why others are not possible.
        best: The one to take.
    """

    case: Case
    candidates: tuple[RemedyCandidate, ...]
    refused: Mapping[JobRemedy, str]
    best: RemedyCandidate

    def __str__(self) -> str:
        found = {one.kind: f"{one.kind.value} {one.period:.3g} s" for one in self.candidates}
        found |= {kind: f"{kind.value} not possible ({why})" for kind, why in self.refused.items()}
        return ", ".join(found[kind] for kind in JobRemedy if kind in found)


def compare_remedies(
    case: Case,
    current: Program,
    *,
    delegated: Case | None = None,
    gain: float = LEAST_GAIN,
    horizon: int = HORIZON,
    costs: Mapping[JobRemedy, float] | None = None,
    effort: int | None = None,
    budget: float | None = None,
    seed: int = 0,
) -> RemedyComparison:
    """Compare what can be done about a case with the running program, and choose by predicted seconds.

    A new program must save a fraction ``gain`` of the running one's seconds. Those within :data:`ALIKE` of the least seconds
    count as equal. Of these the one with the fewest hand-overs wins, then that which moves the fewest microbatches. A program
    that gives all routes back has to be as good as the running one only.

    Shares in contiguous blocks are preferred in the same way to shares in turns. No new program exceeds the case's memory. If
    the running one does, any other is better.

    Args:
        case: The measured case, in seconds; see :func:`adaptra.planning.routes.measured_jobs.measured_case`.
        current: The running program of all replicas, such as :func:`adaptra.planning.routes.joined_programs.join` returns.
        delegated: The case with the links that the delegate would give; None if there is no delegate.
        gain: The fraction of the running program's seconds that a new one must save.
        horizon: The steps over which a change must pay for what it costs once.
        costs: Seconds that remedies cost once, such as those to open connections, beside the first step.
        effort: About how many ops to schedule in all searches; :data:`EFFORT` by default, and no limit with a budget.
        budget: Seconds for all searches together. With a budget, equal arguments may give different programs.
        seed: Seed of all random choices.

    Raises:
        CaseError: The case has lost workers, or another number of replicas, stages or microbatches than the program.
        PlanError: The budget is not above 0.
        ScheduleError: The running program is not of several replicas, or it waits forever.
    """
    if case.lost:
        lost = ", ".join(map(case.place_of, sorted(case.lost)))
        raise CaseError(f"compare_remedies: worker {lost} is lost: expected workers that live; decide() plans around lost ones")
    if budget is not None and not budget > 0:
        raise PlanError(f"budget of {budget} seconds: expected a positive number")
    return _Comparing(case, current, delegated, costs or {}, _Searches(effort, budget, seed)).compared(gain, horizon)


class _Searches:
    """Shares effort or budget among searches. Each gets a part of what is left."""

    def __init__(self, effort: int | None, budget: float | None, seed: int) -> None:
        self._left = effort or (EFFORT if budget is None else None)
        self._ends = None if budget is None else time.perf_counter() + budget
        self._seed = seed

    def orders(self, case: Case, incumbent: Program | None, part: float) -> Program:
        """Return the order of one pipeline with the shortest step that the search finds."""
        effort, budget = self._take(part)
        return plan(case, incumbent=incumbent, effort=effort, budget=budget, seed=self._seed)

    def routed(self, case: Case, routings: Sequence[Routing], part: float) -> Program:
        """Return the program of the job with the shortest period that the search finds."""
        effort, budget = self._take(part)
        return plan_job(case, routing=routings, effort=effort, budget=budget, seed=self._seed)

    def _take(self, part: float) -> tuple[int | None, float | None]:
        effort = None
        if self._left is not None:
            effort = max(int(part * self._left), 1)
            self._left -= effort
        return effort, None if self._ends is None else max(part * (self._ends - time.perf_counter()), _LEAST)


class _Comparing:
    """The candidates for one case."""

    def __init__(
        self,
        case: Case,
        current: Program,
        delegated: Case | None,
        costs: Mapping[JobRemedy, float],
        searches: _Searches,
    ) -> None:
        self._case = case
        self._current = with_updates(current)
        self._delegated = delegated
        self._costs = costs
        self._searches = searches
        self._healthy = share_evenly(replace(case, slow={}, ports={}), in_turns=False)
        self._found = [self._candidate(JobRemedy.KEEP, simulate(self._current, case))]
        self._refused: dict[JobRemedy, str] = {}

    def compared(self, gain: float, horizon: int) -> RemedyComparison:
        """Return all candidates and the best of them."""
        finders = {
            JobRemedy.REORDER: self._reordered,
            JobRemedy.SHARE: self._shared,
            JobRemedy.DETOUR: self._detoured,
            JobRemedy.DELEGATE: self._by_delegate,
        }
        for kind, find in finders.items():
            try:
                find()
            except PlanError:
                self._refused[kind] = _NO_ROOM
        return RemedyComparison(self._case, tuple(self._found), self._refused, _best(self._found, gain, horizon))

    def _reordered(self) -> None:
        """Plan each replica by the planner of one pipeline, and all together if their period may be shorter still."""
        case = self._case
        if case.guests:  # no replica is at home with all of its microbatches
            self._add(JobRemedy.REORDER, case, [self._maker(case, [self._healthy], 0.5)])
            return
        crossed = crossed_replicas(self._current.routing)
        cases = [pipeline_case(case, replica) for replica in range(case.replicas)]
        running: dict[Case, Program | None] = {}
        for replica, one in enumerate(cases):
            running.setdefault(one, None if replica in crossed else order_of_replica(self._current, replica))
        planned: dict[Case, Program] = {}
        for left, (one, incumbent) in zip(range(len(running), 0, -1), running.items(), strict=True):
            planned[one] = self._searches.orders(one, incumbent, 0.3 / left)
        makers = [(lambda: join([planned[one] for one in cases]), ()), self._maker(case, [self._healthy], 0.2)]
        if self._current.routing == self._healthy:
            makers.append((lambda: self._current, ()))
        self._add(JobRemedy.REORDER, case, makers)

    def _shared(self) -> None:
        case = self._case
        tiers = [self._shares(in_turns=in_turns) for in_turns in (False, True)]
        if not any(tiers):
            self._refused[JobRemedy.SHARE] = "no worker slow enough" if case.slow else "no slow worker"
            return
        self._add(JobRemedy.SHARE, case, [self._maker(case, tier, 0.4) for tier in tiers if tier])

    def _shares(self, in_turns: bool) -> list[Routing]:
        """Return shares of slow workers and narrow ports, of which links to other replicas tell."""
        case = self._case
        crossing = any(case.replica_of(here) != case.replica_of(there) for here, there in case.links)
        found = shares(case, in_turns=in_turns) if case.slow or case.ports or crossing else []
        return [routing for routing in found if routing != self._healthy]

    def _detoured(self) -> None:
        case = self._case
        if not case.links and not case.ports:
            self._refused[JobRemedy.DETOUR] = "no narrow or late link"
            return
        blocks = self._shares(in_turns=False)
        found = [one.program.routing for one in self._found if one.kind is JobRemedy.SHARE]
        bases = dict.fromkeys((self._healthy, *blocks, *found))
        ways = [around_links(case, base) for base in bases]
        ways += [way for base in (self._healthy, *blocks[:1]) for way in detoured(case, base)]
        counted = {way: hand_overs(way) for way in ways if way is not None and way not in bases}
        by_hand_overs = sorted(counted, key=counted.__getitem__)
        tiers = [list(tier) for _, tier in groupby(by_hand_overs, key=counted.__getitem__)]
        if not tiers:
            self._refused[JobRemedy.DETOUR] = "no better link between replicas"
            return
        # Those with the fewest hand-overs come first, and all others together.
        rest = [way for tier in tiers[2:] for way in tier]
        self._add(JobRemedy.DETOUR, case, [self._maker(case, tier, 0.4) for tier in (*tiers[:2], rest) if tier])

    def _by_delegate(self) -> None:
        case = self._delegated
        if case is None:
            return
        if not self._case.links and not self._case.ports:
            self._refused[JobRemedy.DELEGATE] = "no narrow or late link"
            return
        routings = [self._healthy, *(shares(case, in_turns=False) if case.slow else ())]
        self._add(JobRemedy.DELEGATE, case, [(lambda: self._current, ()), self._maker(case, routings, 0.5)])

    def _maker(self, case: Case, routings: Sequence[Routing], part: float) -> _Maker:
        return lambda: self._searches.routed(case, routings, part), routings

    def _add(self, kind: JobRemedy, case: Case, makers: Sequence[_Maker]) -> None:
        """Add the first program that is as good as the best one. Those whose bounds promise no more are not searched."""
        simulations: list[Simulation] = []
        least = math.inf
        for make, routings in makers:
            if routings and least <= (1 + ALIKE) * min(period_bound(case, routing).value for routing in routings):
                continue
            with contextlib.suppress(PlanError):
                simulated = simulate(make(), case)
                if not simulated.over_memory:
                    simulations.append(simulated)
                    least = min(least, simulated.period)
        first = next((one for one in simulations if one.period <= (1 + ALIKE) * least), None)
        if first is None:
            self._refused[kind] = _NO_ROOM
        else:
            self._found.append(self._candidate(kind, first))

    def _candidate(self, kind: JobRemedy, simulated: Simulation) -> RemedyCandidate:
        program, routing = simulated.program, simulated.program.routing
        cost = self._costs.get(kind, 0.0)
        if program != self._current:
            cost += max(simulated.makespan - simulated.period, 0.0)
        bound = period_bound(simulated.case, routing).value
        moved = sum(len(list(_takers(routing, *place))) for place in _places(routing))
        what, passed = _what(kind, routing), hand_overs(routing)
        return RemedyCandidate(kind, program, simulated.period, bound, cost, what, passed, moved, simulated.over_memory)


_Maker = tuple[Callable[[], Program], Sequence[Routing]]
"""How to get a program, and the routings among which it is searched, if any."""


def _what(kind: JobRemedy, routing: Routing) -> str:
    if kind is JobRemedy.KEEP:
        return "the program stays as it is"
    if kind is JobRemedy.REORDER:
        return "each replica computes its own microbatches"
    texts = list(moves(routing))
    shown = [*texts[:_MOST_NAMES], *(["…"] if len(texts) > _MOST_NAMES else [])]
    return "; ".join(["messages take the delegate", *shown] if kind is JobRemedy.DELEGATE else shown)


def _best(candidates: Sequence[RemedyCandidate], gain: float, horizon: int) -> RemedyCandidate:
    keep = candidates[0]
    before = math.inf if keep.over_memory else keep.seconds(horizon)

    def is_usable(candidate: RemedyCandidate) -> bool:
        if candidate.moved == 0 and keep.moved and candidate.kind is JobRemedy.REORDER:
            return candidate.seconds(horizon) <= (1 + ALIKE) * before
        return candidate.seconds(horizon) < (1 - gain) * before

    usable = [one for one in candidates[1:] if is_usable(one)]
    least = min((one.seconds(horizon) for one in usable), default=0.0)
    alike = [one for one in usable if one.seconds(horizon) <= (1 + ALIKE) * least]
    kinds = list(JobRemedy)
    return min(alike, key=lambda one: (one.hand_overs, one.moved, kinds.index(one.kind)), default=keep)


def hand_overs(routing: Routing) -> int:
    """Return how often accumulators change workers in a step: between two microbatches, and at the end to the own worker."""
    number = 0
    for replica, stage in _places(routing):
        holders = [routing.holder(replica, stage, microbatch) for microbatch in range(routing.microbatches)]
        home = routing.workers[replica][stage]
        number += sum(before != after for before, after in pairwise([*holders, holders[-1] if home is None else home]))
    return number


def moves(routing: Routing) -> Iterator[str]:
    """Yield which microbatches other replicas' workers compute, such as "3 of 8 microbatches of worker 1.2 run on 0.2, 2.2"."""
    for replica in range(routing.replicas):
        takers = [tuple(_takers(routing, replica, stage)) for stage in range(routing.stages)]
        for taken, run in groupby(range(routing.stages), key=takers.__getitem__):
            if not taken:
                continue
            stages = list(run)
            by = sorted(Counter(taker for _, taker in taken))
            where = f"{replica}.{stages[0]}" if len(stages) == 1 else f"{replica}.{stages[0]} to {replica}.{stages[-1]}"
            if len(stages) == 1:
                names = ", ".join(f"{taker}.{stages[0]}" for taker in by)
            else:
                names = f"replica{'s' * (len(by) > 1)} {', '.join(map(str, by))}"
            one = "worker" if len(stages) == 1 else "workers"
            yield f"{len(taken)} of {routing.microbatches} microbatches of {one} {where} run on {names}"


def _takers(routing: Routing, replica: int, stage: int) -> Iterator[tuple[int, int]]:
    """Yield the microbatches that others compute on a stage, with their replicas."""
    for microbatch in range(routing.microbatches):
        holder = routing.holder(replica, stage, microbatch)
        if holder != routing.workers[replica][stage]:
            yield microbatch, routing.replica_of(holder)


def _places(routing: Routing) -> Iterator[tuple[int, int]]:
    return ((replica, stage) for replica in range(routing.replicas) for stage in range(routing.stages))
