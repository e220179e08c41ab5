"""Steps from the onset of a fault to the switch and from its end to the way back, in training over gloo, with real faults.

Episodes have one fault or two that overlap, of random kind, location, size and length (``tests/support/fault_episodes.py``):
messages are delayed and ops lengthened. Devices are emulated; planning, detection and switching are not. At the end every
parameter must be bitwise that of plain torch in one process that met no fault.

A fault matters when another plan than the one that ran when it began gains more than a switch is worth. Switches are counted
for faults that are alone and for which the cost test found a better plan. The way back counts only where another plan is
better once the fault has ended. A stage or edge flaps if an earlier episode there had ended shortly before. Its recovery is
to be doubted for longer. Two kinds of steps have rows of their own: plans that wait because something else flaps, and the way
back where the fault itself flaps.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from _ranks import run_on_ranks
from _table import Row, parser, print_rows

from adaptra.runtime.control.plans.events import ControlEvent, EventKind

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests" / "support"))
from fault_episodes import judge, misplaced, random_episodes, train_through


def measure(rank: int, *arguments: Any) -> dict[str, Any]:
    """One rank: how many parameters differ on all ranks together, and the coordinator's events."""
    differing, told, important = train_through(rank, *arguments)
    count = torch.tensor(len(differing))
    dist.all_reduce(count)
    return {"differing": int(count), "told": told, "important": important}


def main() -> int:
    """Measure and print."""
    arguments = parser(__doc__)
    arguments.add_argument("--ranks", type=int, default=4)
    arguments.add_argument("--microbatches", type=int, default=8)
    arguments.add_argument("--op-ms", type=float, default=5.0, help="duration of every emulated op, milliseconds")
    arguments.add_argument("--episodes", type=int, default=100)
    arguments.add_argument("--seed", type=int, default=0)
    given = arguments.parse_args()
    seconds = given.op_ms / 1e3
    found = run_on_ranks(measure, given.ranks, given.seed, given.episodes, given.ranks, given.microbatches, seconds)
    told = [ControlEvent(**event | {"kind": EventKind(event["kind"])}) for event in found["told"]]
    planned = random_episodes(given.seed, given.episodes, given.ranks, seconds)
    outcomes = judge(planned, told)
    matter = [one.detected is not None for one, is_important in zip(outcomes, found["important"], strict=True) if is_important]
    kinds = [one.kind for one in outcomes if one.kind is not None]
    rows = [
        Row("parameters that differ from an undisturbed run", found["differing"], 0, "tensors", 1),
        Row("faults that matter: detected", sum(matter), len(matter), "faults", len(matter)),
        Row("all faults: detected", sum(one.detected is not None for one in outcomes), len(outcomes), "faults", len(outcomes)),
        Row("slow where no fault was", len(misplaced(planned, told)), 0, "places", len(outcomes)),
        Row("late told from slow: right", sum(kinds), len(kinds), "faults", len(kinds)),
    ]
    for name, bar, steps in (
        ("slow steps until detected", 2, [one.detected for one in outcomes if one.detected is not None]),
        ("steps from onset to switch", 3, [one.switched for one in outcomes if one.switched and not one.has_waited]),
        ("the same while something flapped", None, [one.switched for one in outcomes if one.switched and one.has_waited]),
        ("steps from healing to switch back", 5, [one.back for one in outcomes if one.back and not one.is_flapping]),
        ("the same where it had flapped", None, [one.back for one in outcomes if one.back and one.is_flapping]),
    ):
        rows.append(Row(f"{name}, median", median(steps or [0]), bar, "steps", len(steps)))
        rows.append(Row(f"{name}, most", max(steps, default=0), bar, "steps", len(steps)))
    title = f"{given.episodes} episodes, {given.ranks} ranks, {given.microbatches} microbatches, {given.op_ms:g} ms ops"
    print_rows(title, rows, baseline="bar", as_json=given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
