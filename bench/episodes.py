"""Detection on noisy machines: false switches in hours of healthy training, and random faults found, located and named.

Steps are simulated and their records disturbed (``tests/support/noisy_steps.py``): ops scatter and drift, ranks pause, messages
have a long tail. Monitor, detector, planner and cost test are the real ones. A fault matters when another plan would win by
more than a switch costs. Its kind can't be known where neither a queue nor a probe shows how much of a flight is occupancy;
such faults are counted apart. A lossy path shows itself only as often as it loses messages, so the steps until it is detected
are rows of their own. Figures of episodes are shares of the faults, with the bar as baseline.

``--flapping N`` compares flap damping instead: N episodes in which a link or a stage comes and goes, and N random ones. Ours is
the control loop as it is, the baseline acts on each recovery at once. A step's time is compared with that of the best plan for
it, as if it had been known before.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import fmean, median

from _table import Row, parser, print_rows
from rich.console import Console
from rich.progress import Progress, track

from adaptra.runtime.control.deciding.policy import ControllerOptions
from adaptra.runtime.detection.changes import ChangeKind
from adaptra.runtime.detection.level_shift import DetectorOptions
from adaptra.simulation.case import Case
from adaptra.simulation.cost import CostModel

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests" / "support"))
from noisy_steps import NoisySteps, flapping_episode, judge, over_the_best, random_episode


def healthy(case: Case, hours: float, seed: int) -> NoisySteps:
    """So many emulated hours without a fault."""
    run = NoisySteps(case, seed)
    with Progress(console=Console(stderr=True)) as progress:
        shown = progress.add_task("healthy hours", total=3600 * hours)
        while run.seconds < 3600 * hours:
            run.step()
            progress.update(shown, completed=run.seconds)
    return run


def damping(case: Case, episodes: int, seed: int) -> list[Row]:
    """The same episodes with and without it."""
    without = ControllerOptions(detector=DetectorOptions(relapse=0))
    flapping = [flapping_episode(case, seed + episode) for episode in range(episodes)]
    steady = [(case, random_episode(case, seed + episode)) for episode in range(episodes)]
    rows: list[Row] = []
    for name, drawn, steps in (("flapping", flapping, 300), ("other", steady, 60)):
        shares, switches = ([list[float](), list[float]()] for _ in range(2))
        for index, (one, faults) in enumerate(track(drawn, f"{name} episodes", console=Console(stderr=True))):
            for side, options in enumerate((ControllerOptions(), without)):
                run = NoisySteps(one, seed + index, faults=faults, options=options)
                shares[side].append(over_the_best(run, steps))
                switches[side].append(len(run.switches))
        rows.append(Row(f"{name}: step over the best known before", fmean(shares[0]), fmean(shares[1]), "times", episodes))
        rows.append(Row(f"{name}: worst episode of these", max(shares[0]), max(shares[1]), "times", episodes))
        rows.append(Row(f"{name}: switches", sum(switches[0]), sum(switches[1]), "switches", episodes))
    return rows


def main() -> int:
    """Measure and print."""
    arguments = parser(__doc__)
    arguments.add_argument("--stages", type=int, default=4)
    arguments.add_argument("--microbatches", type=int, default=16)
    arguments.add_argument("--op-ms", type=float, default=20.0, help="duration of every op, milliseconds")
    arguments.add_argument("--hours", type=float, default=2.0, help="of healthy training, as its emulated clock says")
    arguments.add_argument("--episodes", type=int, default=100)
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--flapping", type=int, metavar="N", help="compare flap damping in N episodes instead")
    given = arguments.parse_args()
    seconds = given.op_ms / 1e3
    cost = CostModel.uniform(given.stages, seconds, seconds, seconds, latency=2e-4)
    case = Case(cost, given.microbatches, tuple(range(given.stages)))
    if given.flapping:
        rows = damping(case, given.flapping, given.seed)
        print_rows(f"flap damping, {given.flapping} episodes each", rows, baseline="no damping", as_json=given.json)
        return 0
    calm = healthy(case, given.hours, given.seed)
    verdicts = [
        verdict
        for episode in track(range(given.episodes), "episodes", console=Console(stderr=True))
        for faults in [random_episode(case, given.seed + episode)]
        for verdict in judge(NoisySteps(case, given.seed + episode, faults=faults), faults)
    ]
    matter = [verdict for verdict in verdicts if verdict.matters]
    found = [verdict for verdict in verdicts if verdict.detected]
    told = [verdict for verdict in found if verdict.kind is not None]
    delays, of_loss = (
        [
            verdict.steps + 1
            for verdict in found
            if verdict.steps is not None and (verdict.fault.kind is ChangeKind.LOSS) is wanted
        ]
        for wanted in (False, True)
    )

    def share(part: int, whole: int) -> float:
        return part / max(whole, 1)

    print_rows(
        f"{calm.seconds / 3600:.2f} healthy hours, {len(verdicts)} faults, {len(matter)} of which matter",
        [
            Row("false switches", len(calm.switches), 0, "switches", 1),
            Row("changes seen where there was none", len(calm.detections) - 1, 0, "detections", 1),
            Row("faults that matter: detected", share(sum(v.detected for v in matter), len(matter)), 1.0, "share", len(matter)),
            Row("detected: right place", share(sum(v.named for v in found), len(found)), 0.98, "share", len(found)),
            Row("kind told: right", share(sum(v.kind is True for v in told), len(told)), 0.98, "share", len(told)),
            Row("detected: kind told", share(len(told), len(found)), 0.98, "share", len(found)),
            Row("slow steps until detected, median", median(delays or [0]), None, "steps", len(delays)),
            Row("slow steps until detected, most", max(delays, default=0), None, "steps", len(delays)),
            Row("lossy steps until detected, median", median(of_loss or [0]), None, "steps", len(of_loss)),
            Row("lossy steps until detected, most", max(of_loss, default=0), None, "steps", len(of_loss)),
        ],
        baseline="bar",
        as_json=given.json,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
