"""What measuring costs a step: recording ops and messages, condensing them into a measurement, and the probes over every edge.

The first row takes what a rank with two edges measured in a real step. It records and condenses that many times, on one
thread; beside it stands the iteration that it belongs to. The other rows are four processes over gloo with two pipelines of
the same model, their steps in turn. One of the two records nothing and sends no probes. The rows are the iteration with
emulated devices, and the processor time of a step of small tensors, mean of the ranks.
"""

from __future__ import annotations

import sys
import time
from statistics import median
from typing import Any

from _ranks import run_on_ranks, small_problem, timed_in_turn
from _table import Row, parser, print_rows

import adaptra
from adaptra.runtime.measuring.monitor import Monitor


def record_often(ranks: int, microbatches: int, times: int) -> float:
    """Seconds per step that recording and condensing takes, for what a rank with two edges measured."""
    problem = small_problem(ranks, microbatches)
    with adaptra.compile(**problem) as pipe:
        pipe.step(*problem["example_inputs"])
        built = pipe._session
        assert built is not None
        records = built.workers[1].monitor.kept[-1]
    monitor = Monitor(1, tuple(range(ranks)))
    took: list[float] = []
    for step in range(times):
        begun = time.perf_counter()
        monitor.begin_step()
        for op in records.ops:
            monitor.wait(op.op, op.start - 0.001, op.start)
            monitor.op(*op)
        for message in records.messages:
            monitor.message(*message)
        for neighbour in (0, 2):
            monitor.probe(neighbour, 1, records.start, records.start + 0.001)
        monitor.end_step(step, records.start, records.end)
        took.append(time.perf_counter() - begun)
    return median(took)


def blind(pipe: adaptra.Pipeline) -> None:
    """Have this process's rank of a pipeline record nothing and send no probes; all ranks do."""
    built = pipe._session
    assert built is not None

    def ignore(*_: object) -> None:
        pass

    for worker in built.workers:
        for unused in (worker._parts._probes, worker.monitor):
            for name in ("begin_step", "answer", "end_step") if unused is worker._parts._probes else ("op", "message", "wait"):
                setattr(unused, name, ignore)


def measure(rank: int, ranks: int, microbatches: int, runs: int, emulated_runs: int, seconds: float) -> dict[str, Any]:
    """One rank: steps that are watched and steps that are not, in turn."""
    problem = small_problem(ranks, microbatches)

    def pairs(count: int, **options: Any) -> list[Any]:
        common = adaptra.Options(adapt=False, schedule="zb_h1", **options)
        with adaptra.compile(**problem, options=common) as watched, adaptra.compile(**problem, options=common) as unwatched:
            blind(unwatched)
            return timed_in_turn((watched, unwatched), problem["example_inputs"], count)

    device = adaptra.EmulatedDevice(seconds, seconds, seconds)
    return {"small": pairs(runs), "emulated": pairs(emulated_runs, emulate=device)}


def main() -> int:
    """Measure and print the table."""
    arguments = parser(__doc__)
    arguments.add_argument("--ranks", type=int, default=4)
    arguments.add_argument("--microbatches", type=int, default=16)
    arguments.add_argument("--times", type=int, default=2000, help="how often the step is recorded")
    arguments.add_argument("--runs", type=int, default=60, help="paired steps of small tensors")
    arguments.add_argument("--emulated-runs", type=int, default=25)
    arguments.add_argument("--op-ms", type=float, default=20.0, help="duration of every emulated op, milliseconds")
    given = arguments.parse_args()
    recorded = record_often(given.ranks, given.microbatches, given.times)
    found = run_on_ranks(
        measure, given.ranks, given.ranks, given.microbatches, given.runs, given.emulated_runs, given.op_ms / 1e3
    )

    def of(name: str, side: int, clock: int) -> float:
        return median(pair[side][clock] for pair in found[name])

    def row(name: str, what: str, clock: int, runs: int) -> Row:
        return Row(name, 1e3 * of(what, 0, clock), 1e3 * of(what, 1, clock), "ms", runs)

    iteration = of("emulated", 1, 0)
    rows = [
        Row("recording and condensing a step (beside: the iteration)", 1e6 * recorded, 1e6 * iteration, "µs", given.times),
        row("emulated iteration", "emulated", 0, given.emulated_runs),
        row("processor time of an emulated step", "emulated", 1, given.emulated_runs),
        row("processor time of a small step", "small", 1, given.runs),
    ]
    title = f"watching, {given.ranks} ranks, {given.microbatches} microbatches, ops of {given.op_ms:g} ms where emulated"
    print_rows(title, rows, baseline="unwatched", as_json=given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
