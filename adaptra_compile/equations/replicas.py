"""The equations of several replicas: what lost, slow and cut-off workers cost at least, and when which answer pays.

Sources: ReCycle (SOSP 2024) for the fit and the period of 1F1B; all others are own. Each is written once as sympy. Solved forms
are solved by sympy from the condition beside them. The import of this module doesn't import sympy.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Final

from adaptra.equations.equation import Equation

REPLICA_SYMBOLS: Final = {
    "P": "replicas",
    "S": "stages of each replica",
    "M": "microbatches of each replica",
    "f": "lost workers of stage i",
    "L": "speed that is lost, in workers: 1 for a lost one, 1 - 1/phi for a slow one; L_i of stage i, L of all stages",
    "phi": "factor on the times of worker k: 1, more if it is slow",
    "tF": "time of F on stage i",
    "tI": "time of I, the input gradient, on stage i",
    "tW": "time of W, the weight gradient, on stage i",
    "tR": "time of REDUCE on stage i, which adds up its gradients",
    "tO": "time of STEP on stage i, the optimizer",
    "tA": "time of a microbatch's F, I and W on all stages together",
    "n": "microbatches that worker k computes, those of others included",
    "d": "from the end of an F on worker k to the earliest start of its I there",
    "A": "most microbatches that worker k may hold from the start of F to the end of W; n_k if there is no limit",
    "a": "most microbatches that worker k holds in this plan, those of others included",
    "T": "period: T of this plan, T_h of the healthy job, T_c after a re-cut",
    "C": "time that the re-cut itself costs, once",
    "H": "steps for which the loss lasts",
    "m": "messages of a step over link or port l, or over link r that leads round it",
    "o": "occupancy: how long one message keeps l or r busy",
    "b": "messages that go over r instead of l",
}
"""The meaning of each symbol, without its index. Index i numbers stages, k workers."""


@dataclass(frozen=True, slots=True)
class ReplicaEquations:
    """All equations of the model; :func:`replica_equations` makes the one instance.

    Attributes:
        extra: Microbatches of lost workers that the busiest live worker of a stage computes at least.
        fit: ``extra`` <= S - 1: published as the condition of no overhead over 1F1B, for equal stages. It is necessary, as the
            work bound shows, and not sufficient. With P=2, S=6, M=4, times 2, 2, 1 and the workers 0.0, 1.2, 1.5 lost it
            holds. The optimum there is 53, 1F1B takes 45, and the work bound is 40.
        most_lost: The most lost workers of a stage for which ``fit`` holds, solved from it.
        work: Work bound of a stage that shares its microbatches among live workers, none of them slow or fast.
        one_f_one_b: Fault-free period of 1F1B with equal stages and no delays.
        bears: The lost workers that a stage bears within a period T, solved from ``work``. Normalisation chooses the f_i whose
            greatest ``work`` is least. That is the least T within which all stages together bear all that are lost.
        capacity: Work of a stage, shared by speed in fractions of microbatches. For one slow worker L_i = 1 - 1/phi.
        kept: The microbatches that a worker keeps when all of its stage are busy for as long, solved from ``capacity``.
        worker_work: All ops of a worker, one after the other.
        fill: ``worker_work``, and the idle time before the first I of a worker that holds too few microbatches to fill it.
        fill_room: The microbatches that fill that time, solved from ``fill``.
        memory: Of A_k places for microbatches, one sees the most round trips.
        memory_room: The least A_k with which ``memory`` is within T, solved from it.
        memory_price: By how much ``memory_room`` grows for the microbatches of lost workers.
        held: A plan keeps the memory limit.
        fault_scaled: The healthy period, if what is left shared all work evenly.
        recut_limit: Work of all stages without STEP and REDUCE, shared evenly by what is left: no re-cut has a shorter period.
        recut_pays: A re-cut saves more than it costs.
        break_even: The steps after which it does, solved from ``recut_pays``.
        messages: Messages over a link or through a port, one after the other.
        detour: Messages over link l when b of them go over link r, which carries m_r of its own.
        detour_share: The best b, at which both links are busy for as long, solved from ``detour``.
        detour_bound: ``detour`` with the best b: no detour over r makes the links' part of the period shorter.
    """

    extra: Equation
    fit: Equation
    most_lost: Equation
    work: Equation
    one_f_one_b: Equation
    bears: Equation
    capacity: Equation
    kept: Equation
    worker_work: Equation
    fill: Equation
    fill_room: Equation
    memory: Equation
    memory_room: Equation
    memory_price: Equation
    held: Equation
    fault_scaled: Equation
    recut_limit: Equation
    recut_pays: Equation
    break_even: Equation
    messages: Equation
    detour: Equation
    detour_share: Equation
    detour_bound: Equation


@functools.cache
def replica_equations() -> ReplicaEquations:
    """Return the equations, which are built on the first call."""
    import sympy

    replicas, stages, microbatches = sympy.symbols("P S M", integer=True, positive=True)
    lost, computed, room, held, own = sympy.symbols("f_i n_k A_k a_k m_r", integer=True, nonnegative=True)
    trips = sympy.Symbol("trips", integer=True, positive=True)
    missing, all_missing, slow, whole, cost, horizon = sympy.symbols("L_i L phi_k tA C H", nonnegative=True)
    f, i, w, reduce, step, trip = sympy.symbols("tF_i tI_i tW_i tR_i tO_i d_k", nonnegative=True)
    period, healthy, recut = sympy.symbols("T T_h T_c", nonnegative=True)
    sent, taken, taken_round, crossing = sympy.symbols("m_l o_l o_r b", nonnegative=True)

    def solved(equal: Any, to: Any, symbol: Any) -> Any:
        """Return the one solution of ``equal = to``."""
        (found,) = sympy.solve(sympy.Eq(equal, to), symbol)
        return found

    shared = lost * microbatches / (replicas - lost)
    extra = sympy.ceiling(shared)
    ops, update = f + i + w, reduce + step
    own_update = step * slow + reduce
    # M + extra <= trips exactly if M P / (P - f) <= trips, since trips is whole.
    most = sympy.expand(solved(microbatches * replicas / (replicas - lost), trips, lost))
    within = sympy.floor((period - update) / ops)

    capacity = microbatches * replicas * ops / (replicas - missing)
    kept = solved(computed * slow * ops, capacity, computed)

    inverse: Any = sympy.together(sympy.expand(1 / kept))  # so that no minus sign stands before it

    work = computed * ops * slow + own_update
    idle = f * slow + trip - room * f * slow
    once = f * slow + trip + (i + w) * slow
    all_trips = sympy.floor((period - own_update) / once)
    # ceiling(n / A) <= trips exactly if n / A <= trips, since trips is whole.
    places = solved(computed / room, trips, room)
    price = sympy.simplify(places.subs(computed, computed + extra) - places)

    saved = (period - recut) * horizon
    detour = (sent - crossing) * taken, (own + crossing) * taken_round
    share = solved(*detour, crossing)

    stage_times, worker_times = (f, i, w, reduce, step), (f, i, w, reduce, step, slow)
    links = (sent, taken, own, taken_round)
    return ReplicaEquations(
        extra=Equation("microbatches of others per live worker", "ReCycle", extra, (lost, microbatches, replicas)),
        fit=Equation(
            "fit: no overhead over 1F1B",
            "ReCycle; for equal stages necessary, not sufficient",
            sympy.Le(extra, stages - 1),
            (lost, microbatches, replicas, stages),
        ),
        most_lost=Equation(
            "most lost workers that fit",
            "solved from the fit",
            sympy.floor(solved(shared, stages - 1, lost)),
            (microbatches, replicas, stages),
        ),
        work=Equation(
            "work of stage i",
            "lower bound",
            (microbatches + extra) * ops + update,
            (lost, microbatches, replicas, *stage_times),
        ),
        one_f_one_b=Equation(
            "healthy period of 1F1B",
            "ReCycle; equal stages, no delays",
            (microbatches + stages - 1) * ops + update,
            (microbatches, stages, *stage_times),
        ),
        bears=Equation(
            "lost workers that stage i bears within this period",
            "solved from the work of stage i",
            sympy.Min(sympy.floor(most.subs(trips, within)), replicas - 1),
            (microbatches, replicas, *stage_times, period),
        ),
        capacity=Equation(
            "work of stage i, shared by speed", "lower bound", capacity, (missing, microbatches, replicas, f, i, w)
        ),
        kept=Equation(
            "microbatches that a worker keeps",
            "solved from the work shared by speed",
            1 / inverse,
            (missing, microbatches, replicas, slow),
        ),
        worker_work=Equation("work of worker k", "lower bound", work, (computed, *worker_times)),
        fill=Equation(
            "work of worker k and its fill",
            "lower bound",
            work + sympy.Max(idle, 0),
            (computed, room, trip, *worker_times),
        ),
        fill_room=Equation("room that fills worker k", "solved from the fill", solved(idle, 0, room), (trip, f, slow)),
        memory=Equation(
            "memory of worker k",
            "lower bound",
            sympy.ceiling(computed / room) * once + own_update,
            (computed, room, trip, *worker_times),
        ),
        memory_room=Equation(
            "least room of worker k for this period",
            "solved from its memory",
            sympy.ceiling(places.subs(trips, all_trips)),
            (computed, trip, *worker_times, period),
        ),
        memory_price=Equation(
            "room for the microbatches of others, within this period",
            "difference of least rooms",
            price.subs(trips, all_trips),
            (lost, microbatches, replicas, trip, *worker_times, period),
        ),
        held=Equation("memory limit", "definition", sympy.Le(held, room), (held, room)),
        fault_scaled=Equation(
            "healthy period, scaled by the speed that is left",
            "ReCycle; slow workers own",
            healthy * replicas * stages / (replicas * stages - all_missing),
            (healthy, replicas, stages, all_missing),
        ),
        recut_limit=Equation(
            "period that no re-cut beats",
            "lower bound",
            microbatches * replicas * whole / (replicas * stages - all_missing),
            (microbatches, replicas, stages, whole, all_missing),
        ),
        recut_pays=Equation("a re-cut pays", "own", sympy.Gt(saved, cost), (period, recut, horizon, cost)),
        break_even=Equation(
            "steps until a re-cut pays", "solved from its gain", solved(saved, cost, horizon), (period, recut, cost)
        ),
        messages=Equation("messages over a link or through a port", "lower bound", sent * taken, (sent, taken)),
        detour=Equation("messages with b detours", "own; all b over one link r", sympy.Max(*detour), (*links, crossing)),
        detour_share=Equation("best number of detours", "solved from the detours", share, links),
        detour_bound=Equation(
            "messages with the best detours",
            "detours with their best number",
            sympy.factor(detour[0].subs(crossing, share)),
            links,
        ),
    )
