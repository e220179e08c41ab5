"""What the control plane asks of its store in large jobs, counted rank by rank: all ranks in one process.

The store is in memory and counts requests, and the bytes of their keys and values. Prefixes of keys, signatures and frames come
on top. The ranks' parts in the agreement on plans and their relays are stepped one after the other, with no thread. Their
measurements scatter. Nothing here depends on the machine's speed.

    python bench/control.py --ranks 1000 10000 --steps 10 --noise 0.01

At rest all ranks run steps under one plan, and the busiest rank is shown. Beside the bars stands a job whose mail is all
direct. A hop is one mail from a rank to another. An agreement takes those from the proposal to the last confirmation.
Those from the entry of the plan log to the last rank that knows it come on top. A rank's stage that the coordinator knows
from an earlier step differs from what the rank measured: the largest difference is shown.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from _table import Row, parser, print_rows

from adaptra.runtime.control.mail.relay import RelayOptions
from adaptra.runtime.detection.level_shift import DetectorOptions
from adaptra.runtime.detection.news import REMEMBERED
from adaptra.runtime.measuring.measurement import StepMeasurement

ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(ROOT / "tests" / "support")]
from relayed_ranks import RelayedRanks

REQUESTS = 4.0
"""The bar: requests of the busiest rank in a step, at rest."""
BYTES = 1024.0
"""The bar: bytes of keys and values of the busiest rank in a step, at rest."""
HOPS = 16.0
"""The bar: hops until all ranks have agreed on a plan."""
_DETECTED = DetectorOptions().change


def at_rest(job: RelayedRanks, steps: int, what: str, bars: tuple[float | None, float | None]) -> Iterator[Row]:
    """Requests and bytes of the busiest rank in a step."""
    job.store.forget()
    job.run(steps)
    yield Row(f"{what}: requests, most", job.store.most_requests() / steps, bars[0], "1/rank/step", 1)
    yield Row(f"{what}: bytes, most", max(job.store.bytes.values()) / steps, bars[1], "B/rank/step", 1)


def agreeing(job: RelayedRanks, what: str) -> Iterator[Row]:
    """Hops, and requests and bytes of the busiest rank, until all ranks know that a new plan runs."""
    job.store.forget()
    version, hops = job.propose(), 0
    agreement = job.participants[0].agreement
    assert agreement is not None
    while agreement.proposal is not None:
        assert job.deliver(), "mail is under way until all have confirmed"
        hops += 1
    while job.deliver():
        pass
    end = job.steps[0]
    while job.log_version < version:
        end += 1
        job.step(end)
        while job.log_version < version and job.deliver():
            pass
    while min(job.known) < version:
        assert job.deliver(), "mail is under way until all know it"
        hops += 1
    yield Row(f"{what}: hops", hops, HOPS, "hops", 1)
    yield Row(f"{what}: requests, most", job.store.most_requests(), None, "1/rank", 1)


def restored(job: RelayedRanks, first: int, what: str) -> Iterator[Row]:
    """How far the coordinator's measurements of stages are from what ranks measured, from a step on."""
    farthest = 0.0
    for at, taken in job.restored.items():
        if at[0] >= first:
            ours, theirs = _seconds(taken), _seconds(job.measured[at])
            farthest = max(farthest, abs(ours / theirs - 1))
    yield Row(f"{what}: a stage's time, farthest from what was measured", 100 * farthest, 100 * _DETECTED, "%", 1)


def _seconds(measured: StepMeasurement) -> float:
    """What a rank's stage takes for a microbatch."""
    stage = measured.stages[0]
    assert stage.forward is not None and stage.backward is not None
    return stage.forward + stage.backward


def counted(count: int, steps: int, noise: float) -> Iterator[Row]:
    """The rows of jobs with one number of ranks."""
    relaying = RelayOptions(direct=0)
    warm_up = -(-REMEMBERED // relaying.period) * relaying.period
    job = RelayedRanks(count, relaying, noise)
    while job.deliver():
        pass
    job.run(warm_up)
    yield from at_rest(job, steps, f"{count} ranks at rest", (REQUESTS, BYTES))
    yield from restored(job, warm_up, f"{count} ranks at rest")
    yield from agreeing(job, f"{count} ranks agree on a plan")
    direct = RelayedRanks(count, None, noise)
    while direct.deliver():
        pass
    yield from at_rest(direct, steps, f"{count} ranks at rest, all mail direct", (None, None))


def main() -> None:
    """Count what the arguments say."""
    made = parser(__doc__)
    made.add_argument("--ranks", type=int, nargs="+", default=[1000, 10000], help="default: 1,000 and 10,000")
    made.add_argument("--steps", type=int, default=10, help="steps that are counted, a multiple of the period of reports")
    made.add_argument("--noise", type=float, default=0.01, help="standard deviation of measurements, as a fraction of them")
    given = made.parse_args()
    period = RelayOptions().period
    if given.steps < 1 or given.steps % period:
        made.error(f"--steps {given.steps}: expected a multiple of {period}, the steps from one report to the next")
    if min(given.ranks) < 2:
        made.error(f"--ranks {min(given.ranks)}: expected at least 2")
    if not 0 <= given.noise < 1:
        made.error(f"--noise {given.noise}: expected a fraction of at least 0 and below 1")
    rows = [row for count in given.ranks for row in counted(count, given.steps, given.noise)]
    print_rows("Requests of the control plane to its store", rows, baseline="bar", as_json=given.json)


if __name__ == "__main__":
    main()
