"""Responses to lost and slow workers and narrow links, compared by predicted seconds.

Routes around a lost worker are taken at once. What shortens steps further follows, if it pays over the horizon:

- share: a slow worker gives microbatches to its stage's others;
- detour: microbatches go round a narrow link;
- role move: a worker changes stages, so that no stage bears more losses than it should;
- re-cut: the stage with fewer workers gets fewer layers, in all replicas;
- shrink: whole replicas with a lost worker stand still, as torchft does it;
- wait: the job stands still until a worker joins;
- restart: a checkpoint is loaded, on as many whole replicas as the workers make.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum
from itertools import islice
from typing import Any, Final

from adaptra.errors import CaseError, PlanError
from adaptra.planning.layouts.choose_roles import LEAST_GAIN
from adaptra.planning.responses.normalize import RoleMove, losses, role_moves, stage_work, with_moves
from adaptra.planning.responses.recut import Recut, recuts
from adaptra.planning.routes.job_planner import plan_job
from adaptra.planning.routes.large_jobs import is_large, plan_large
from adaptra.planning.routes.period_bound import period_bound
from adaptra.program import Kind, Program
from adaptra.program.placement import is_straight
from adaptra.program.schedules import generate_for
from adaptra.simulation.case import Case
from adaptra.simulation.simulate import simulate
from adaptra.sizes import size_text

_PLAN_ALL_CUTS: Final = 64
"""The most workers with which all proposed cuts are planned; with more, only the first."""


@dataclass(frozen=True, slots=True)
class ResponsePrices:
    """What responses cost beside the steps they give: what moves, how fast, and how long the rest takes.

    Attributes:
        unit: Seconds of one unit of the case's time.
        state: Bytes of one stage's parameters and optimizer state.
        rate: Bytes per second at which state moves between two workers.
        room: Bytes of state that a worker has room for; infinite if memory does not matter.
        pieces: The number of equal pieces into which a stage can be cut.
        planning: Seconds until a plan around a lost worker runs, from the loss.
        restart: Seconds of a restart, with loading the checkpoint.
        checkpoint_age: Seconds of work since the last checkpoint, which a restart loses.
        joiner: Seconds until a worker joins; infinite if none is expected.
        horizon: Seconds over which a response must pay, such as the mean time to the next failure.

    Raises:
        CaseError: A value is not above 0, or negative where 0 is allowed.
    """

    unit: float = 0.01
    state: float = 16e9
    rate: float = 10e9
    room: float = math.inf
    pieces: int = 12
    planning: float = 1.0
    restart: float = 300.0
    checkpoint_age: float = 900.0
    joiner: float = math.inf
    horizon: float = 10_800.0

    def __post_init__(self) -> None:
        for price in fields(self):
            value = getattr(self, price.name)
            least = price.name in ("unit", "rate", "pieces", "horizon")
            if math.isnan(value) or value < 0 or (least and value == 0) or (math.isinf(value) and price.name in _FINITE):
                raise CaseError(f"{price.name}: {value:g}: expected a number {'above' if least else 'of at least'} 0")


_FINITE: Final = {"unit", "state", "rate", "planning", "restart", "checkpoint_age", "horizon"}


class ResponseKind(Enum):
    """A response, or none; see :mod:`adaptra.planning.responses.responses`."""

    KEEP = "keep"
    REROUTE = "reroute"
    SHARE = "share"
    DETOUR = "detour"
    MOVE = "role move"
    RECUT = "re-cut"
    MOVE_AND_RECUT = "role move and re-cut"
    SHRINK = "shrink"
    WAIT = "wait"
    RESTART = "restart"


@dataclass(frozen=True, slots=True)
class Response:
    """A response with its cost.

    Attributes:
        kind: The kind.
        what: What is done, or why it is refused, for people.
        period: The period of its plan in the case's unit; None if it is refused.
        bound: The period that no order of ops beats; None if it is refused.
        cost: Seconds that it costs once.
        held: The most microbatches that a worker holds.
    """

    kind: ResponseKind
    what: str
    period: float | None = None
    bound: float | None = None
    cost: float = 0.0
    held: int = 0

    @property
    def refused(self) -> bool:
        """Whether it is not possible."""
        return self.period is None


@dataclass(frozen=True)
class Decision:
    """All responses to what is lost, slow or narrow, and the choice among them.

    Attributes:
        case: The case.
        prices: What responses cost.
        healthy_period: The period of the plan with all workers, at full speed and without narrow links.
        one_f_one_b: The period of 1F1B with all workers and a barrier, against which published overheads are given.
        work: How long the busiest worker is busy when routes lie around what is lost.
        responses: The responses.
        first: What is done at once.
        then: What follows; None if nothing pays.
    """

    case: Case
    prices: ResponsePrices
    healthy_period: float
    one_f_one_b: float
    work: float
    responses: tuple[Response, ...]
    first: Response
    then: Response | None

    @property
    def last(self) -> Response:
        """The response in which the job goes on."""
        return self.then or self.first

    @property
    def fault_scaled_period(self) -> float:
        """The healthy period, if the workers left shared all work evenly."""
        return self.case.fault_scaled(self.healthy_period)

    def seconds(self, response: Response) -> float:
        """Return the seconds in which a response does what the healthy job does within the horizon; infinite if refused."""
        if response.period is None:
            return math.inf
        return response.cost + self._steps * response.period * self.prices.unit

    @property
    def _steps(self) -> int:
        return steps_within(self.prices, self.healthy_period)

    def __str__(self) -> str:
        first = f"{self.first.kind.value} now" if self.first.kind is not ResponseKind.KEEP else "keep the plan"
        return first if self.then is None else f"{first}, then {self.then.kind.value}"

    def to_json(self) -> dict[str, Any]:
        """Return the figures as JSON values: periods in the case's unit, costs in seconds."""
        return {
            "lost": sorted(self.case.lost),
            "losses": list(losses(self.case)),
            "healthy_period": self.healthy_period,
            "1f1b_period": self.one_f_one_b,
            "work_bound": self.work,
            "fault_scaled_period": self.fault_scaled_period,
            "decision": str(self),
            "responses": [
                {
                    "kind": one.kind.value,
                    "period": one.period,
                    "bound": one.bound,
                    "cost": one.cost,
                    "seconds": None if one.refused else self.seconds(one),
                    "held": one.held,
                    "what": one.what,
                }
                for one in self.responses
            ],
        }


def decide(case: Case, prices: ResponsePrices, *, effort: int | None = None, budget: float | None = None) -> Decision:
    """Compare all responses to a case by predicted seconds, and choose.

    A response other than routes must shorten the step by a fraction of at least
    :data:`~adaptra.planning.layouts.choose_roles.LEAST_GAIN`, and save more than it costs within the horizon.
    So noise and short failures start nothing.

    Args:
        case: The case, with what is lost, slow or narrow.
        prices: What responses cost.
        effort, budget: Effort or seconds of the search for each plan, as of :func:`plan_job`.

    Raises:
        CaseError: A worker has several stages.
    """
    if not is_straight(case.placement):
        raise CaseError(f"placement {list(case.placement)}: expected stage i on rank i, to compare responses")
    planner = _Planner(prices, effort, budget)
    healthy = planner.period(_one_replica(case, case.microbatches))
    steps = steps_within(prices, healthy)
    responses = list(planner.responses(case, healthy))
    now = [one for one in responses if one.kind in (ResponseKind.REROUTE, ResponseKind.KEEP) and one.period is not None]

    def seconds(one: Response) -> float:
        return math.inf if one.period is None else one.cost + steps * one.period * prices.unit

    first = now[0] if now else min(responses, key=seconds)
    then: Response | None = None
    saved = 0.0
    for response in responses if now else ():
        if response is first or response.period is None or first.period is None:
            continue
        before, after = first.period * prices.unit, response.period * prices.unit
        gain = steps * (before - after) - response.cost
        if gain > saved and after < (1 - LEAST_GAIN) * before:
            then, saved = response, gain
    work = max(stage_work(case, stage, lost) for stage, lost in enumerate(losses(case)))
    return Decision(case, prices, healthy, _one_f_one_b(case), work, tuple(responses), first, then)


def steps_within(prices: ResponsePrices, healthy: float) -> int:
    """Return the steps that the healthy job takes within the horizon, given its period; 0 if steps take no time."""
    return int(prices.horizon / (healthy * prices.unit)) if healthy > 0 else 0


@dataclass(frozen=True, slots=True)
class _Planner:
    """Plans for responses, with what each costs."""

    prices: ResponsePrices
    effort: int | None
    budget: float | None

    def responses(self, case: Case, healthy: float) -> Iterable[Response]:
        """Yield all responses, what is done at once first."""
        prices = self.prices
        step = healthy * prices.unit
        even = replace(case, slow={}, links={}, ports={})
        if case.lost:
            redone = prices.planning + step
            what = "other replicas' workers take the lost ones' microbatches; one step is run again"
            first = self._tried(ResponseKind.REROUTE, what, even, case, redone)
        else:
            alike = case == even
            plain = _one_replica(case, case.microbatches) if alike else even
            first = self._tried(ResponseKind.KEEP, "the plan stays as it is", plain, plain if alike else case, 0.0)
        yield first
        if case.slow:
            what = "slow workers give microbatches to their stage's others"
            yield self._tried(ResponseKind.SHARE, what, replace(case, links={}, ports={}), case, 0.0)
        if case.links or case.ports:
            what = "microbatches go round narrow links"
            yield self._tried(ResponseKind.DETOUR, what, case, case, 0.0)
        if not case.lost and not case.slow:
            return
        yield from self._layouts(case, first.period)
        if not case.lost:
            return
        yield self._shrunk(case, step)
        joined = prices.joiner + prices.state / prices.rate
        if math.isinf(prices.joiner):
            yield Response(ResponseKind.WAIT, "no worker is expected to join")
        else:
            what = f"the job stands still for {prices.joiner:g} s, then a worker takes the state"
            yield Response(ResponseKind.WAIT, what, healthy, healthy, joined)
        yield self._restarted(case)

    def period(self, case: Case) -> float:
        """Return the period of the plan for a case."""
        return simulate(self.plan(case), case).period

    def plan(self, case: Case) -> Program:
        """Return the plan for a case."""
        return plan_job(case, effort=self.effort, budget=self.budget)

    def _layouts(self, case: Case, before: float | None) -> Iterable[Response]:
        """Yield role moves, re-cuts, and both together."""
        prices = self.prices
        moves = role_moves(case)
        moved = with_moves(case, moves)
        moving = _moving_seconds(case, moves, prices)
        lack = 2 * prices.state > prices.room
        if not moves:
            yield Response(ResponseKind.MOVE, "the losses are where they cost least already")
        elif lack:
            room = f"room for {size_text(prices.room)}"
            yield Response(ResponseKind.MOVE, f"a worker that moves holds {size_text(2 * prices.state)} for a while: {room}")
        else:
            what = "; ".join(_move_text(case, move) for move in moves[:3]) + ("; …" if len(moves) > 3 else "")
            yield self._tried(ResponseKind.MOVE, what, moved, moved, moving)
        yield self._recut(ResponseKind.RECUT, case, before, 0.0)
        if moves and not lack:
            yield self._recut(ResponseKind.MOVE_AND_RECUT, moved, before, moving)

    def _recut(self, kind: ResponseKind, case: Case, before: float | None, moving: float) -> Response:
        prices = self.prices
        wanted = list(islice(recuts(case, prices.pieces), None if case.workers <= _PLAN_ALL_CUTS else 1))
        first = wanted[0]
        if first.case == case:
            return Response(kind, "the cuts are where they are best already")
        least = max(stage_work(first.case, *one) for one in enumerate(losses(case)))
        if before is not None and least >= (1 - LEAST_GAIN) * before:
            return Response(kind, f"at best a period of {least:.6g}, which is not {LEAST_GAIN:.0%} less")
        needed = max((held + received) * prices.state for held, received in zip(first.held, first.received, strict=True))
        if needed > prices.room:
            return Response(kind, f"a worker holds {size_text(needed)} for a while: room for {size_text(prices.room)}")
        return min((self._tried_cut(kind, cut, moving) for cut in wanted), key=lambda one: (one.refused, one.period or 0.0))

    def _tried_cut(self, kind: ResponseKind, cut: Recut, moving: float) -> Response:
        stages = [f"{held:.3g}" for held in cut.held]
        cost = moving + max(cut.received) * self.prices.state / self.prices.rate
        return self._tried(kind, f"stages of {', '.join(stages)} times what they had", cut.case, cut.case, cost)

    def _shrunk(self, case: Case, step: float) -> Response:
        broken = {worker // case.stages for worker in case.lost}
        whole = case.replicas - len(broken)
        if not whole:
            return Response(ResponseKind.SHRINK, "every replica has a lost worker")
        microbatches = -(-case.replicas * case.microbatches // whole)
        what = f"whole replicas only, {whole}, compute {microbatches} microbatches each"
        slowest = max((factor for worker, factor in case.slow.items() if worker // case.stages not in broken), default=1.0)
        return self._whole(ResponseKind.SHRINK, what, case, microbatches, slowest, self.prices.planning + step)

    def _restarted(self, case: Case) -> Response:
        whole = (case.workers - len(case.lost)) // case.stages
        if not whole:
            left = case.workers - len(case.lost)
            return Response(ResponseKind.RESTART, f"{left} workers are left: a replica has {case.stages} stages")
        microbatches = -(-case.replicas * case.microbatches // whole)
        what = f"a checkpoint is loaded; whole replicas, {whole}, compute {microbatches} microbatches each"
        spare = case.workers - len(case.lost) - whole * case.stages
        factors = sorted((factor for worker, factor in case.slow.items() if worker not in case.lost), reverse=True)
        slowest = max(factors[spare:], default=1.0)
        cost = self.prices.restart + self.prices.checkpoint_age
        return self._whole(ResponseKind.RESTART, what, case, microbatches, slowest, cost)

    def _whole(self, kind: ResponseKind, what: str, case: Case, microbatches: int, slowest: float, cost: float) -> Response:
        """Return the response in which replicas without lost workers compute so many microbatches each."""
        try:
            alone = _one_replica(case, microbatches)
        except CaseError as error:
            return Response(kind, str(error))
        # Each replica gets as many as any other, so a slow worker holds up its replica, and REDUCE all of them.
        return self._tried(kind, what, alone, replace(alone, slow=dict.fromkeys(range(alone.stages), slowest)), cost)

    def _tried(self, kind: ResponseKind, what: str, planned: Case, real: Case, cost: float) -> Response:
        """Return the response of the plan for one case, executed under another."""
        large = plan_large(real, budget=self.budget) if planned == real and is_large(real) else None
        if large is not None:
            return Response(kind, what, large.period, large.bound.value, cost, large.held)
        try:
            program = self.plan(planned)
        except PlanError as error:
            return Response(kind, str(error))
        found = simulate(program, real)
        bound = period_bound(real, program.routing).value
        return Response(kind, what, found.period, bound, cost, max(found.held))


def _one_replica(case: Case, microbatches: int) -> Case:
    """Return the healthy case of one replica, which stands for any number of replicas that are alike."""
    return replace(case, replicas=1, microbatches=microbatches, slow={}, links={}, ports={}, lost=frozenset())


def _moving_seconds(case: Case, moves: Sequence[RoleMove], prices: ResponsePrices) -> float:
    """Return the seconds in which workers that move receive their stage's state, each from another worker if possible."""
    entering = Counter(move.place % case.stages for move in moves)
    lost = losses(case)
    rounds = max((-(-number // (case.replicas - lost[stage])) for stage, number in entering.items()), default=0)
    return rounds * prices.state / prices.rate


def _move_text(case: Case, move: RoleMove) -> str:
    (was_replica, was), (replica, stage) = divmod(move.worker, case.stages), divmod(move.place, case.stages)
    return f"worker {move.worker} leaves stage {was} of replica {was_replica} for stage {stage} of replica {replica}"


def _one_f_one_b(case: Case) -> float:
    """Return the period of 1F1B with all workers, undivided backward passes, and a barrier at the end of each step."""
    split = generate_for("1f1b", tuple(range(case.stages)), case.microbatches)
    orders = [
        [op if op.kind is Kind.F else replace(op, kind=Kind.B) for op in order if op.kind is not Kind.W]
        for order in split.orders
    ]
    whole = replace(split, orders=tuple(map(tuple, orders)))
    update = max(step + reduce for step, reduce in zip(case.step, case.reduce, strict=True))
    return simulate(whole, case.cost).makespan + update
