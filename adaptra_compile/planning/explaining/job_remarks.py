"""What bounds the period of several replicas, and what would make it shorter, one sentence each."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import replace

from adaptra.equations.replicas import replica_equations
from adaptra.planning.explaining.job_numbers import ROUNDED, JobNumbers, Traffic, WorkerLoad
from adaptra.planning.responses.normalize import losses, role_moves, stage_work, with_moves
from adaptra.planning.routes.job_planner import plan_job
from adaptra.simulation.bound import Bound, BoundKind
from adaptra.simulation.case import Case
from adaptra.simulation.simulate import simulate


def remarks_of(numbers: JobNumbers, bound: Bound) -> Iterator[str]:
    """Yield what bounds the period, and what would make it shorter."""
    period, best = numbers.simulation.period, float(numbers.recut.result)
    if bound.kind is BoundKind.PORT:
        yield f"port: {bound.where} for that long; fewer microbatches through it would help"
    elif bound.kind is BoundKind.LINK:
        yield _detour(numbers, next(one for one in numbers.traffic if one.where == bound.where))
    else:
        where = bound.where.partition(",")[0]  # a path also has a stage
        load = max((load for load in numbers.loads if where == f"worker {load.worker}"), key=numbers.work)
        yield _computed(numbers, load)
        if bound.kind is BoundKind.WORK:
            yield from _role_moves(numbers.case)
            if bound.value > best * ROUNDED:
                yield (
                    f"re-cut: fewer layers for stage {load.stage} would take {best:.6g} at best; then it pays after "
                    f"its cost / {period - best:.6g} steps"
                )
    yield from _fit_remark(numbers)
    yield from _room_missing(numbers, bound)


def _computed(numbers: JobNumbers, load: WorkerLoad) -> str:
    replica, microbatches = numbers.routing.replica_of(load.worker), range(numbers.case.microbatches)
    own = sum(numbers.routing.holder(replica, load.stage, microbatch) == load.worker for microbatch in microbatches)
    others = load.microbatches - own
    return f"bound: {numbers.name(load)} computes {load.microbatches} microbatches, {others} of other replicas"


def _role_moves(case: Case) -> Iterator[str]:
    moves = role_moves(case)
    if moves:
        before, after = (
            max(stage_work(one, stage, lost) for stage, lost in enumerate(losses(one)))
            for one in (case, with_moves(case, moves))
        )
        listed = ", ".join(f"worker {move.worker} to the place of {move.place}" for move in moves)
        yield f"role move: {listed}; that would leave a work bound of {after:.6g} instead of {before:.6g}"


def _detour(numbers: JobNumbers, link: Traffic) -> str:
    model, size, way = replica_equations(), numbers.case.microbatches, numbers.way_round(link)
    if not way < link.occupancy:
        return f"link: {link.where} carries {link.messages} messages; no wider link leads to another replica's worker"
    share, best = (equation.evaluate(size, link.occupancy, 0, way) for equation in (model.detour_share, model.detour_bound))
    return (
        f"detour: {link.where} carries {link.messages} messages; with {share:.4g} of {size} on detours the links would be "
        f"busy for {best:.6g}"
    )


def _fit_remark(numbers: JobNumbers) -> Iterator[str]:
    """Yield that the fit holds and 1F1B is faster nevertheless, in a case as ReCycle has them."""
    model, case = replica_equations(), numbers.case
    delays = *case.cost.latency_forward, *case.cost.latency_backward, *(one.latency for one in case.links.values())
    busy = (one.occupancy for one in numbers.traffic)
    if not case.lost or not numbers.is_equal or case.slow or any(delays) or any(busy):
        return
    published = float(model.one_f_one_b.evaluate(case.microbatches, case.stages, *numbers.times(0)))
    fits = all(model.fit.evaluate(*numbers.size(stage), case.stages) for stage in range(case.stages))
    if fits and numbers.simulation.period > published * ROUNDED:
        yield (
            f"fit: it holds on every stage, and yet the period is above the {published:.6g} of the healthy 1F1B: it is "
            "necessary, not sufficient"
        )


def _room_missing(numbers: JobNumbers, bound: Bound) -> Iterator[str]:
    """Yield how much more room per worker gives the period that the planner finds without memory limit."""
    case, memory, period = numbers.case, numbers.case.memory, numbers.simulation.period
    of_memory = bound.kind in (BoundKind.MEMORY, BoundKind.FILL)
    if memory is None or (period <= bound.value * ROUNDED and not of_memory):
        return

    def period_with(more: int | None) -> float:
        roomy = replace(case, memory=None if more is None else tuple(room + more for room in memory))
        return simulate(plan_job(roomy), roomy).period

    free = period_with(None)
    if free * ROUNDED < period:
        most = max(load.microbatches for load in numbers.loads)
        enough = bisect_left(range(1, most), True, key=lambda more: period_with(more) <= free * ROUNDED) + 1
        yield f"memory: with room for {enough} more microbatches on every worker the planner finds {free:.10g}"
