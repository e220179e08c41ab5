"""What survival costs: a healthy step, a call that breaks, and a process that is killed, with the bits of each run.

Ops are emulated, so that all ranks fit this machine. A run with faults trains as one without. A loss costs the seconds by which
the broken step exceeds two usual ones: the other of these is the call that is done again. What is left passes until all know of
it, and the next epoch stands.
"""

from __future__ import annotations

import hashlib
import os
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from _ranks import small_problem
from _table import Row, parser, print_rows

import adaptra

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests" / "support"))
from processes import run_processes

EPISODE_STEPS = 8
"""Steps of a run in which processes are killed."""


def train(
    rank: int,
    port: int,
    size: tuple[int, int, int],
    seconds: float,
    steps: int,
    clips: bool,
    survives: bool,
    faults: Sequence[str],
) -> tuple[str, list[float], int, int]:
    """A digest of all losses, norms and parameters, the seconds of each step, resident KiB and open files at the end."""
    import torch.distributed as dist

    os.environ |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    replicas, stages, microbatches = size
    given = small_problem(stages, microbatches)
    emulated = adaptra.EmulatedDevice(seconds, seconds, seconds) if seconds else None
    options = adaptra.Options(emulate=emulated, survive=survives, faults=faults)
    digest, times = hashlib.sha256(), []
    with adaptra.compile(**given, replicas=replicas, options=options, transport="delegate") as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-3)
        inputs, targets = given["example_inputs"]
        for step in range(steps):
            began = time.monotonic()
            digest.update(pipe.step(inputs + pipe.replica + step, targets).numpy().tobytes())
            if clips:
                digest.update(pipe.clip_grad_norm_(1.0).numpy().tobytes())
            times.append(time.monotonic() - began)
            optimizer.step()
            optimizer.zero_grad()
        whole = pipe.full_state_dict()
        for name in sorted(whole):
            digest.update(whole[name].numpy().tobytes())
        state = digest.hexdigest() if whole else ""
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * 4
    return state, times, resident, len([*Path("/proc/self/fd").iterdir()])


def run(size: tuple[int, int, int], *args: Any, dead: tuple[int, ...] = ()) -> tuple[str, list[float], int, int]:
    """The result of the lowest rank that is left."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    told = run_processes(train, size[0] * size[1], store.port, size, *args, timeout=3600, may_die=dead)
    return next(one for rank, one in enumerate(told) if rank not in dead)


def points(size: tuple[int, int, int], dice: random.Random) -> str:
    """A random worker's random point of a step."""
    replicas, stages, microbatches = size
    replica, stage = dice.randrange(replicas), dice.randrange(stages)
    op = f"{stage}{dice.choice('FW')}{dice.randrange(microbatches)}"
    return f"{replica}.{stage} @{{}}:{dice.choice([op, op, op, 'REDUCE', 'certificate', 'optimizer', 'clip'])}"


def lost_seconds(times: Sequence[float], broken: Sequence[int]) -> list[float]:
    """The seconds by which each broken step exceeds the median of the others, less the step itself."""
    usual = median(one for step, one in enumerate(times) if step not in broken)
    return [max(0.0, times[step] - 2 * usual) for step in broken]


def main() -> int:
    """Run and print the table."""
    arguments = parser(__doc__)
    arguments.add_argument("--replicas", type=int, default=2)
    arguments.add_argument("--stages", type=int, default=4)
    arguments.add_argument("--microbatches", type=int, default=8)
    arguments.add_argument("--op-ms", type=float, default=10.0, help="duration of every emulated op, milliseconds")
    arguments.add_argument("--steps", type=int, default=40, help="steps of the healthy runs")
    arguments.add_argument("--breaks", type=int, default=20, help="calls that break, in one run of twice as many steps")
    arguments.add_argument("--kills", type=int, default=5, help="runs in each of which a process is killed")
    arguments.add_argument("--seed", type=int, default=0)
    given = arguments.parse_args()
    size, seconds, dice = (given.replicas, given.stages, given.microbatches), given.op_ms / 1e3, random.Random(given.seed)
    rows: list[Row] = []
    for clips in (False, True):
        what = "step that clips" if clips else "step"
        with_it, without = (run(size, seconds, given.steps, clips, on, ()) for on in (True, False))
        ours, plain = (median(one[1][given.steps // 4 :]) * 1e3 for one in (with_it, without))
        rows.append(Row(f"{what}, with survive beside without", ours, plain, "ms", given.steps))
        rows.append(Row(f"{what}: other bits", int(with_it[0] != without[0]), 0, "", 1))
    if given.breaks:
        steps = 2 * given.breaks + 4
        at = range(3, steps - 1, 2)[: given.breaks]
        faults = ["break " + points(size, dice).format(step) for step in at]
        broken, whole = run(size, seconds, steps, True, True, faults), run(size, seconds, steps, True, False, ())
        lost = lost_seconds(broken[1], [*at, *(step + 1 for step in at)])
        lost = sorted(lost[: len(at)])
        rows.append(Row("seconds lost by a break, median", median(lost), 0.5, "s", len(lost)))
        rows.append(Row("seconds lost by a break, longest", lost[-1], 0.5, "s", len(lost)))
        rows.append(Row("other bits after breaks", int(broken[0] != whole[0]), 0, "", len(lost)))
        rows.append(Row("resident after breaks, beside none", broken[2] / 1024, whole[2] / 1024, "MiB", 1))
        rows.append(Row("open files after breaks, beside none", broken[3], whole[3], "", 1))
    if given.kills:
        whole = run(size, seconds, EPISODE_STEPS, True, False, ())
        lost, different = [], 0
        for _ in range(given.kills):
            point = points(size, dice)
            replica, stage = map(int, point.split()[0].split("."))
            dead = replica * size[1] + stage
            killed = run(size, seconds, EPISODE_STEPS, True, True, [f"kill {point.format(4)}"], dead=(dead,))
            different += killed[0] != whole[0]
            usual = median(killed[1][:4])
            lost.append(max(killed[1][4:6]) - 2 * usual)
        rows.append(Row("seconds lost by a kill, median", median(lost), 0.5, "s", len(lost)))
        rows.append(Row("seconds lost by a kill, longest", max(lost), 1.5, "s", len(lost)))
        rows.append(Row("runs with other bits after a kill", different, 0, "", len(lost)))
    title = f"{size[0]} replicas of {size[1]} stages, {size[2]} microbatches, {given.op_ms:g} ms ops"
    print_rows(title, rows, baseline="without, or bar", as_json=given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
