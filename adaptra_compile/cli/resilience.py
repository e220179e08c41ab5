"""The command ``resilience``: what replicas still do with lost workers, which response pays, and throughput over days."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass, replace
from typing import Any, Final

from adaptra.cli import tables
from adaptra.cli.inputs import read_case
from adaptra.cli.output import as_json, check_outputs, line_width
from adaptra.errors import CaseError
from adaptra.planning.responses.availability import (
    DAY,
    FailureTrace,
    LiveWorkers,
    MtbfOf,
    ThroughputOverTime,
    TransitionCost,
    random_trace,
    read_trace,
    throughput_over,
)
from adaptra.planning.responses.resilience import Resilience
from adaptra.planning.responses.responses import Decision, ResponsePrices, decide
from adaptra.report import drawing
from adaptra.report.text import percent
from adaptra.simulation.case import Case
from adaptra.simulation.case_files import load_case

_PRICES: Final = "unit state rate room pieces planning restart checkpoint_age joiner horizon".split()
_ROWS: Final = 4
_DAYS: Final = 7.0
_REPAIR: Final = 4 * 3600.0


@dataclass(frozen=True)
class _Lived:
    """A job's throughput over a trace, in microbatches per second."""

    levels: tuple[LiveWorkers, ...]
    found: ThroughputOverTime
    healthy: float
    workers: int

    @property
    def share(self) -> float:
        """The average throughput as a fraction of the healthy one."""
        return self.found.average / self.healthy

    def to_json(self) -> dict[str, Any]:
        return {
            "seconds": self.found.end,
            "average_of_healthy": self.share,
            "average": self.found.average,
            "transitions": self.found.transitions,
            "lost_seconds": self.found.lost_seconds,
            "least_live": min(level.workers for level in self.levels),
            "curve": [[seconds, rate / self.healthy] for seconds, rate in self.found.curve],
        }

    def __str__(self) -> str:
        least = min(level.workers for level in self.levels)
        return (
            f"{self.found.end / DAY:.3g} days: {percent(self.share)} of the healthy throughput, {self.found.average:.6g} "
            f"microbatches/s on average\n"
            f"{self.found.transitions} changes, at least {least} of {self.workers} workers live, no step for "
            f"{self.found.lost_seconds:.4g} s\n"
        )


def run_resilience(options: Namespace) -> str:
    """Run the command ``resilience`` and return its standard output.

    Raises:
        AdaptraError: Wrong input.
    """
    check_outputs({options.output: drawing.SUFFIXES})
    case = _case(options)
    trace = _trace(options, case)
    if options.output is not None and trace is None:
        raise CaseError(f"-o {options.output}: a picture of throughput over time: expected --mtbf or --trace too")
    prices = _prices(options)
    harmed = not case.is_healthy or bool(case.links) or bool(case.ports)
    decision = decide(case, prices, budget=options.budget) if harmed else None
    healthy = replace(case.healthy, links={}, ports={})
    by_number = Resilience(healthy, prices, budget=options.budget)
    rows = list(by_number.rows(min(by_number.most, options.losses or _ROWS)))
    lived = None if trace is None else _live_through(by_number, trace, options.node or 1)
    if lived is not None and options.output is not None:
        from adaptra.report.availability import draw_availability

        curve = [(seconds, rate / lived.healthy) for seconds, rate in lived.found.curve]
        live = [(level.seconds, level.workers * (options.node or 1) / case.workers) for level in lived.levels]
        title = f"{_title(case)}: {percent(lived.share)} of the healthy throughput"
        draw_availability(curve, live, lived.found.end, options.output, title)
    if options.json:
        decided = None if decision is None else decision.to_json()
        found = {"case": case.name, "replicas": case.replicas, "stages": case.stages, "decision": decided, "rows": rows}
        return as_json(found | {"trace": None if lived is None else lived.to_json()})
    width = line_width(options)
    parts = [] if decision is None else [_decided(decision, width)]
    parts.append(tables.resilience(f"{_title(case)}, by lost workers: decision and period", rows, width))
    return "\n".join([*parts, *([] if lived is None else [str(lived)])])


def _case(options: Namespace) -> Case:
    if options.gpus is not None:
        if options.replicas:
            raise CaseError(f"--gpus {options.gpus} with --replicas {options.replicas}: expected one of them")
        stages = load_case(options.case).cost.stages
        options.replicas = options.gpus // stages
        if not options.replicas:
            raise CaseError(f"--gpus {options.gpus}: {options.case} has {stages} stages: expected at least as many workers")
    case = read_case(options)
    if case.is_one_pipeline and not options.replicas:
        raise CaseError(f"{options.case}: a case of one pipeline: expected --replicas N or --gpus N too")
    return case


def _trace(options: Namespace, case: Case) -> FailureTrace | None:
    for name in ("days", "repair", "seed"):
        if options.mtbf is None and getattr(options, name) is not None:
            raise CaseError(f"--{name}: expected --mtbf too")
    if options.trace is not None:
        return read_trace(options.trace)
    if options.node is not None:
        raise CaseError("--node: expected --trace too")
    if options.mtbf is None:
        return None
    days = _DAYS if options.days is None else options.days
    return random_trace(case.workers, days, options.mtbf, MtbfOf.JOB, options.repair or _REPAIR, options.seed or 0)


def _prices(options: Namespace) -> ResponsePrices:
    prices = {name: value for name in _PRICES if (value := getattr(options, name)) is not None}
    if options.mtbf is not None:
        prices.setdefault("horizon", options.mtbf)
    return ResponsePrices(**prices)


def _live_through(job: Resilience, trace: FailureTrace, node: int) -> _Lived:
    """Return the throughput over a trace. After a loss workers change stages, and after a return one takes its state."""
    case, prices = job.case, job.prices
    names = -(-case.workers // node)
    healthy = case.replicas * case.microbatches / (job.decision(0).healthy_period * prices.unit)
    moving = prices.state / prices.rate
    cost = TransitionCost(prices.planning + moving, moving, float(case.replicas * case.microbatches))
    levels = trace.levels(names)

    def rate(live: int) -> float:
        return healthy * job.throughput(max(0, case.workers - live * node))

    return _Lived(levels, throughput_over(levels, trace.end, rate, cost), healthy, case.workers)


def _title(case: Case) -> str:
    return f"{case.name}: {case.replicas} replicas of {case.stages} stages, {case.microbatches} microbatches each"


def _decided(decision: Decision, width: int) -> str:
    case = decision.case
    lost = ", ".join(case.place_of(worker) for worker in sorted(case.lost))
    title = (
        f"{_title(case)}{f', lost {lost}' if lost else ''}\n"
        f"healthy period {decision.healthy_period:.6g}, work bound {decision.work:.6g}, "
        f"scaled {decision.fault_scaled_period:.6g}, 1F1B {decision.one_f_one_b:.6g}; "
        f"in all: to do what the healthy job does in {decision.prices.horizon:g} s"
    )
    return f"{tables.responses(title, decision, width)}decision of the model, which has watched no job: {decision}\n"
