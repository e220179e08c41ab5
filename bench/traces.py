"""Average throughput over failure traces, of adaptra's plans beside Oobleck's published throughputs and ReCycle's results.

The traces, and Oobleck's throughput by nodes, are published with Oobleck's simulator (``bench/traces/README.md``).

Oobleck is replayed as its simulator does. A node joins 45 s after its line. After each loss the job stands still for the
model's reconfiguration, and redoes its step. Only then nodes are counted that have joined meanwhile. Nodes beyond 30 are idle.
If two nodes are lost at the same time, the simulated job stops until a node joins. It seems an accident, but the published
figures have it. ``kinder`` rows leave it out.

Adaptra's side is modelled, not measured:

- The cluster is P replicas of S stages, 30 nodes together. F, I and W take 1 on every stage, the optimizer 3, messages nothing.
  How many microbatches Oobleck ran is not published; more of them leave fewer bubbles to fill. So two numbers are shown.
- Oobleck's figure for 30 nodes is taken for 1F1B with all nodes, as ReCycle does. It is scaled by the period of 1F1B, divided
  by that of the plan for the nodes that are left. Both are exact simulations. The figure is never exceeded: see ``share``.
- ``--base plan`` lifts that limit: adaptra's plan for all nodes is shorter than 1F1B. ``--base own`` takes the figure for that
  plan, so that no bubbles are left to fill.
- Losses are spread over the stages as ``normalized`` says, by role moves. The shorter of two plans counts: routes around the
  losses, or these with the stages cut anew. A stage can be cut into eight equal pieces: the models have 24 layers or more,
  each with attention and MLP. A worker holds up to 2·S microbatches, fewer of longer stages.
- A loss costs 0.5 s for detection and plan, and the step in which it occurs. A node joins 45 s after its line, between steps.
  State is copied beside training, so it costs nothing. ``--move N`` lets each change cost N of Oobleck's reconfigurations.

ReCycle's own case is 24 GPUs, 6 replicas of 4 stages, over six hours. The trace is not public, so it is stood in for. Oobleck's
average there, 9.01 of 11.34 samples/s, tells how many GPUs lived. Of all windows of six hours of the traces gcp and p3, scaled
to 24 workers, that with the nearest mean availability is replayed. The samples of a step are not published, so none is redone.
"""

from __future__ import annotations

import json
import math
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Final, NamedTuple

from _table import Row, parser, print_rows
from plan_failures import unit_case

from adaptra.planning.responses.availability import (
    FailureTrace,
    LiveWorkers,
    ThroughputOverTime,
    TransitionCost,
    read_trace,
    throughput_over,
)
from adaptra.planning.responses.normalize import normalized, stage_work
from adaptra.planning.responses.recut import recuts
from adaptra.planning.routes.job_planner import plan_job
from adaptra.progress import shown_progress
from adaptra.simulation.case import Case
from adaptra.simulation.simulate import simulate

FOLDER: Final = Path(__file__).parent / "traces"
TRACES: Final = ("gcp", "p3", "10m", "30m", "1h", "3h", "6h")
NODES: Final = 30
JOIN_DELAY: Final = 45.0
DETECT_AND_PLAN: Final = 0.5
PIECES: Final = 8
CUTS: Final = 3
"""Of each number of losses, this many ways to cut the stages anew are planned."""

PUBLISHED: Final = {("GPT-3 350M", "gcp"): 24.6, ("GPT-3 6.7B", "gcp"): 2.92, ("GPT-3 6.7B", "10m"): 3.55}
"""Samples per second that Oobleck's simulator prints, to validate the replay."""

BARS: Final = {("GPT-3 350M", "gcp"): 1.34}
OTHER_BAR: Final = 1.2

WINDOW: Final = 6 * 3600.0
RECYCLE: Final = 24, 6, 4
"""Workers, replicas and stages of ReCycle's own case."""
RECYCLE_HEALTHY, RECYCLE_AVERAGE, OOBLECK_AVERAGE = 11.34, 10.8, 9.01


class Model(NamedTuple):
    """What Oobleck's simulator says of a model."""

    name: str
    samples_per_step: float
    reconfiguration: float
    throughput: tuple[float, ...]

    def oobleck(self, workers: int) -> float:
        """Oobleck's samples per second; those of 15 nodes for fewer, and 0 for none."""
        return 0.0 if not workers else self.throughput[min(max(NODES - workers, 0), len(self.throughput) - 1)]


def models() -> list[Model]:
    """Oobleck's models."""
    found = json.loads((FOLDER / "oobleck.json").read_text())
    return [Model(n, m["samples_per_step"], m["reconfiguration"], tuple(m["throughput"])) for n, m in found.items()]


class Cluster:
    """Periods of replicas with any number of workers lost."""

    def __init__(self, replicas: int, stages: int, microbatches: int) -> None:
        self.case = unit_case(replicas, stages, microbatches)
        step = self.case.step[0]
        self.one_f_one_b = 3.0 * (microbatches + stages - 1) + step
        self.period = cache(self._period)

    def lost(self, number: int) -> Case:
        """The case with losses on the stages as :func:`normalized` says, over the replicas in turn."""
        turn = 0
        lost: set[int] = set()
        for stage, count in enumerate(normalized(self.case, number)):
            lost |= {self.case.worker((turn + one) % self.case.replicas, stage) for one in range(count)}
            turn += count
        return replace(self.case, lost=frozenset(lost))

    def _period(self, number: int) -> float:
        """The period of the best plan; infinite if a stage has no worker left."""
        if number > self.case.stages * (self.case.replicas - 1):
            return float("inf")
        around = self.lost(number)
        cases = [around] if number == 0 else [around, *(cut.case for cut in islice(recuts(around, PIECES), CUTS))]
        return min(simulate(plan_job(case), case).period for case in cases)

    def recycle(self, number: int) -> float:
        """The same share as ReCycle models it: as long as 1F1B, or as the busiest worker of routes around the losses."""
        busiest = max(stage_work(self.case, *one) for one in enumerate(normalized(self.case, number)))
        return self.one_f_one_b / max(self.one_f_one_b, busiest)

    def share(self, number: int, base: str) -> float:
        """The throughput with some workers lost, as a share of the fault-free figure.

        ``recycle``: the figure is 1F1B's, and is never exceeded. ``plan``: 1F1B's. ``own``: that of the plan without losses.
        """
        figure = self.period(0) if base == "own" else self.one_f_one_b
        share = figure / self.period(number)
        return min(1.0, share) if base == "recycle" else share


def replayed(model: Model, trace: FailureTrace, *, stops: bool = True) -> ThroughputOverTime:
    """Oobleck over a trace, as its simulator does it; ``stops``: whether losses at the same time stop it. See the module."""
    live = trace.levels(join_delay=JOIN_DELAY)
    times = [level.seconds for level in live]

    def after(level: LiveWorkers, lost: int) -> LiveWorkers:
        """The level once the job is reconfigured."""
        seconds = level.seconds + model.reconfiguration
        return LiveWorkers(seconds, live[bisect_right(times, seconds) - 1].workers, lost)

    levels = [after(live[0], 0)]
    for level in live:
        stopped = levels[-1].workers == 0
        if level.lost:
            found = after(level, level.lost)
            levels.append(replace(found, workers=0) if stops and level.lost > 1 else found)
        elif stopped and level.seconds > levels[-1].seconds:
            levels.append(after(level, 0))
    # A step that ends before the job is reconfigured counts. So the old rate goes on until then, and the rest is redone.
    cost = TransitionCost(samples_per_step=model.samples_per_step)
    within = [level for level in levels if level.seconds < trace.end]
    return throughput_over(within, trace.end, model.oobleck, cost)


def adapted(
    model: Model, trace: FailureTrace, share: Callable[[int], float], move: float, *, free: bool = False
) -> ThroughputOverTime:
    """A job whose throughput with some nodes lost is a share of that of all. With ``free``, changes cost nothing."""
    moving = move * model.reconfiguration
    cost = TransitionCost(DETECT_AND_PLAN + moving, moving, model.samples_per_step)
    levels = trace.levels(NODES, JOIN_DELAY)
    full = model.throughput[0]
    return throughput_over(levels, trace.end, lambda workers: full * share(NODES - workers), None if free else cost)


def limit(lost: int) -> float:
    """The share of the nodes that are left: the fault-scaled limit."""
    return (NODES - lost) / NODES


def oobleck_rows(clusters: Sequence[Cluster], base: str, move: float, only: str | None) -> Iterator[Row]:
    """Yield the rows of all models and traces."""
    missed = [0] * len(clusters)
    count = 0
    for model in models():
        for name in TRACES:
            if only is not None and only not in (name, model.name):
                continue
            count += 1
            trace = read_trace(FOLDER / f"{name}.csv")
            theirs = replayed(model, trace).average
            kinder = replayed(model, trace, stops=False).average
            what = f"{model.name}, {name}"
            if (published := PUBLISHED.get((model.name, name))) is not None:
                yield Row(f"{what}: Oobleck replayed, beside published", theirs, published, "samples/s", 1)
            limited = adapted(model, trace, limit, move, free=True).average
            yield Row(f"{what}: fault-scaled limit ÷ Oobleck's {theirs:.3g}", limited / theirs, None, "", 1)
            bar = BARS.get((model.name, name), OTHER_BAR)
            for index, cluster in enumerate(clusters):
                found = adapted(model, trace, lambda lost, one=cluster: one.share(lost, base), move)
                microbatches = f"{cluster.case.microbatches} microbatches"
                yield Row(f"{what}: adaptra ÷ Oobleck, {microbatches}", found.average / theirs, bar, "", 1)
                if kinder > theirs:
                    yield Row(f"{what}: the same, kinder", found.average / kinder, None, "", 1)
                missed[index] += found.average < bar * theirs
    for index, cluster in enumerate(clusters):
        yield Row(f"below their bar, of {count}, {cluster.case.microbatches} microbatches", missed[index], 0.0, "traces", count)


def recycle_rows(microbatches: Sequence[int], base: str) -> Iterator[Row]:
    """Yield the rows of ReCycle's own case, on the trace that stands in for theirs."""
    workers, replicas, stages = RECYCLE
    name, levels, mean = window(workers, OOBLECK_AVERAGE / RECYCLE_HEALTHY)

    def average(share: Callable[[int], float]) -> float:
        return throughput_over(levels, WINDOW, lambda live: share(workers - live), TransitionCost(DETECT_AND_PLAN)).average

    for count in microbatches:
        cluster = Cluster(replicas, stages, count)
        what = f"ReCycle's case, {name}, {mean:.1%} live, {count} microbatches"
        ours = average(lambda lost, one=cluster: one.share(lost, base))
        yield Row(f"{what}: ÷ fault-free", ours, RECYCLE_AVERAGE / RECYCLE_HEALTHY, "", 1)
        theirs = average(cluster.recycle)
        yield Row("the same, beside ReCycle's model on this trace", ours, theirs, "", 1)


def window(workers: int, wanted: float) -> tuple[str, list[LiveWorkers], float]:
    """The six hours of the traces gcp and p3, scaled, whose mean availability is nearest: name, levels and mean."""
    found: list[tuple[float, str, list[LiveWorkers], float]] = []
    for name in ("gcp", "p3"):
        trace = read_trace(FOLDER / f"{name}.csv")
        live = trace.levels(NODES)
        for index, first in enumerate(live):
            if first.seconds + WINDOW > trace.end:
                break
            levels = [
                LiveWorkers(level.seconds - first.seconds, round(level.workers * workers / NODES), level.lost)
                for level in live[index:]
                if level.seconds < first.seconds + WINDOW
            ]
            mean = throughput_over(levels, WINDOW, float).average / workers
            found.append((abs(mean - wanted), f"{name} from {first.seconds:.0f} s", levels, mean))
    _, name, levels, mean = min(found, key=lambda one: one[0])
    return name, levels, mean


def draw(cluster: Cluster, base: str, move: float, file: str) -> None:
    """Draw the throughput over time of two models on the two spot traces."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 6), layout="constrained")
    grid = figure.subplots(2, 2, sharex=True)
    shown = [model for model in models() if model.name in ("GPT-3 350M", "GPT-3 6.7B")]
    for row, model in zip(grid, shown, strict=True):
        for axes, name in zip(row, ("gcp", "p3"), strict=True):
            trace = read_trace(FOLDER / f"{name}.csv")
            curves = {
                "fault-scaled limit": adapted(model, trace, limit, move, free=True),
                "Oobleck": replayed(model, trace),
                "adaptra": adapted(model, trace, lambda lost: cluster.share(lost, base), move),
            }
            for (label, found), color in zip(curves.items(), ("0.6", "tab:orange", "tab:blue"), strict=True):
                points = [*found.curve, (found.end, found.curve[-1][1])]
                # A transition of seconds would be a line down to zero and back, and hide the rest.
                ends = [later for later, _ in points[1:]] + [math.inf]
                shown_points = [one for one, end in zip(points, ends, strict=True) if one[1] > 0 or end - one[0] > 60]
                times, rates = zip(*shown_points, strict=True)
                hours = [seconds / 3600 for seconds in times]
                axes.step(hours, rates, where="post", color=color, linewidth=0.9, label=f"{label}: {found.average:.3g}")
            axes.set_title(f"{model.name}, {name}")
            axes.set_ylim(bottom=0)
            axes.set_ylabel("samples/s")
            axes.legend(loc="lower right", title="average", fontsize="small")
    for axes in grid[-1]:
        axes.set_xlabel("hours")
    figure.savefig(file)


def main() -> int:
    """Plan for each number of losses, replay and print."""
    arguments = parser(__doc__)
    arguments.add_argument("--replicas", type=int, default=6, choices=(3, 5, 6, 10), help="replicas; 30 nodes in all")
    arguments.add_argument("--microbatches", type=int, nargs="+", default=[8, 16], help="microbatches per replica")
    arguments.add_argument("--base", choices=("recycle", "plan", "own"), default="recycle", help="whose Oobleck's figure is")
    arguments.add_argument("--move", type=float, default=0.0, help="what a change costs, in Oobleck's reconfigurations")
    arguments.add_argument("--only", metavar="NAME", help="one model or one trace")
    arguments.add_argument("--picture", metavar="FILE.svg", help="draw throughput over time")
    given = arguments.parse_args()
    clusters = [Cluster(given.replicas, NODES // given.replicas, microbatches) for microbatches in given.microbatches]
    counts = [(cluster, lost) for cluster in clusters for lost in range(NODES // 2 + 1)]
    with shown_progress(after=0.0) as shown:
        for done, (cluster, lost) in enumerate(counts, start=1):
            cluster.period(lost)
            shown("planned", done, len(counts))
    rows = [*oobleck_rows(clusters, given.base, given.move, given.only), *recycle_rows(given.microbatches, given.base)]
    print_rows("average throughput over failure traces", rows, baseline="bar", as_json=given.json)
    if given.picture is not None:
        draw(clusters[0], given.base, given.move, given.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
