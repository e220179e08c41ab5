"""What survival costs: a healthy step, a call that breaks, and processes that are killed, with the bits of each run.

Ops are emulated, so that all ranks fit this machine. Jobs are started by ``adaptra run``. A run with faults must train as
one without. A loss costs the seconds from the fault, of two the later, to the first op of the first step that begins after it.

An episode is a kill at a random point of a step, or two at once. Or another follows within 0.4 s, so mostly during the
recovery. Kills of one run go on until a stage or a replica would have no process left.
"""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from _ranks import free_port
from _survivor import How, Seen
from _table import Row, parser, print_rows

_LONGEST = 600.0
"""Seconds after which a job hangs."""
_APART = 3
"""Steps from one episode of a run to the next."""
_TURNS = 4
"""Healthy runs with survival, and as many without."""
_NODES = 3
_POINTS = ("op", "op", "op", "REDUCE", "certificate", "optimizer", "clip")


@dataclass(frozen=True)
class Ran:
    """A job that ended: what each rank that is left saw, and when faults happened, by rank."""

    seen: dict[int, Seen]
    faults: dict[int, list[float]]

    @staticmethod
    def read(folder: Path) -> Ran:
        """Return what the processes of a job have left in a folder."""
        seen = {int(one.stem): Seen(**json.loads(one.read_text())) for one in folder.glob("[0-9]*.json")}
        faults = {int(one.suffix[1:]): [*map(float, one.read_text().split())] for one in folder.glob("fault.*")}
        return Ran(seen, faults)

    @property
    def lowest(self) -> Seen:
        """What the lowest rank saw that is left."""
        return self.seen[min(self.seen)]

    def goes_on(self, fault: float) -> float:
        """When the first op began of a step that began after a fault."""
        steps = zip(*(one.first_ops for one in self.seen.values()), strict=True)
        return next(first for first in map(min, steps) if first > fault)


def run(how: How) -> Ran | None:
    """Start the job by ``adaptra run`` and wait for its end; None if it hangs.

    Raises:
        SystemExit: It ends before its last step.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "how.json").write_text(json.dumps(asdict(how)))
        script = str(Path(__file__).resolve().parent / "_survivor.py")
        command = [sys.executable, "-m", "adaptra.cli", "run", "-n", str(how.size[0] * how.size[1]), script, name]
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        job = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        try:
            told, _ = job.communicate(timeout=_LONGEST)
        except subprocess.TimeoutExpired:
            job.send_signal(signal.SIGTERM)
            print(f"hangs: {how.faults} {how.followed}:\n{job.communicate()[0]}", file=sys.stderr)
            return None
        ran = Ran.read(folder)
        if job.returncode or not ran.seen:
            raise SystemExit(f"faults {how.faults} {how.followed}: the job ended with status {job.returncode}:\n{told}")
        return ran


def run_by_agents(how: How) -> Ran | None:
    """Start the job by torchrun's agents, as one on each of :data:`_NODES` nodes; None if it hangs.

    An agent ends its node's processes once one has ended. Those that are left wait minutes for it, so they are ended here.
    """
    with tempfile.TemporaryDirectory() as name:
        address = ["--master-addr=127.0.0.1", f"--master-port={free_port()}"]
        folder, per_node = Path(name), how.size[0] * how.size[1] // _NODES
        (folder / "how.json").write_text(json.dumps(asdict(how)))
        script = str(Path(__file__).resolve().parent / "_survivor.py")
        options = [f"--nnodes={_NODES}", f"--nproc-per-node={per_node}", "--max-restarts=0", "--rdzv-backend=static", *address]
        agents = [
            subprocess.Popen(
                [sys.executable, "-m", "torch.distributed.run", f"--node-rank={node}", *options, script, name],
                env={"OMP_NUM_THREADS": "1", **os.environ},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            for node in range(_NODES)
        ]
        until = time.monotonic() + _LONGEST
        try:
            while time.monotonic() < until:
                time.sleep(0.1)
                ran = Ran.read(folder)
                lost = {rank // per_node for rank in ran.faults}
                if all(rank in ran.seen for rank in range(_NODES * per_node) if rank // per_node not in lost):
                    return ran
            return None
        finally:
            for agent in agents:
                agent.terminate()
            for agent in agents:
                agent.wait()


def lose_nodes(size: tuple[int, int, int], seconds: float, trials: int, dice: random.Random) -> list[Row]:
    """The rows of that many jobs of torchrun's agents, each of which loses the last node by a kill of one process there."""
    lost, different, hangs, steps = list[float](), 0, 0, 2 * _APART
    size = (2, 3, size[2])
    whole = run(How(size, seconds, steps, True, False))
    assert whole is not None
    for _ in range(trials):
        ran = run_by_agents(How(size, seconds, steps, True, True, ["kill " + point(size, 5, _APART, dice)]))
        if ran is None:
            hangs += 1
            continue
        different += ran.lowest.state != whole.lowest.state
        ((fault,),) = ran.faults.values()
        lost.append(ran.goes_on(fault) - fault)
        print(f"a node lost: {lost[-1]:.2f} s, {ran.lowest.epochs} epochs", file=sys.stderr)
    return [
        Row("runs with other bits after the loss of a node", different, 0, "", trials),
        Row("runs that hang after the loss of a node", hangs, 0, "", trials),
        Row("a node of torchrun lost: to the first op redone, median", median(lost or [math.inf]), 1.5, "s", len(lost)),
    ]


def point(size: tuple[int, int, int], rank: int, step: int, dice: random.Random) -> str:
    """A random point of a step, at a rank's worker."""
    replica, stage = divmod(rank, size[1])
    where = dice.choice(_POINTS)
    if where == "op":
        where = f"{stage}{dice.choice('FW')}{dice.randrange(size[2])}"
    return f"{replica}.{stage} @{step}:{where}"


@dataclass(frozen=True)
class Episode:
    """Ranks that die in one step; with a delay the second one follows the first."""

    ranks: tuple[int, ...]
    delay: float | None = None


def episodes_of_a_run(size: tuple[int, int, int], most: int, dice: random.Random) -> list[Episode]:
    """Random episodes of one run, each stage and each replica keeping one process."""
    replicas, stages, _ = size
    left, episodes = set(range(replicas * stages)), list[Episode]()

    def is_kept(ranks: set[int]) -> bool:
        return len({rank % stages for rank in ranks}) == stages and len({rank // stages for rank in ranks}) == replicas

    while len(episodes) < most:
        count = dice.choice((1, 1, 2, 2))
        ranks = tuple(dice.sample(sorted(left), count))
        if not is_kept(left - {*ranks}):
            if not any(is_kept(left - {rank}) for rank in left):
                break
            continue
        left -= {*ranks}
        episodes.append(Episode(ranks, dice.uniform(0.0, 0.4) if count == 2 and dice.random() < 0.5 else None))
    return episodes


def kill(size: tuple[int, int, int], seconds: float, count: int, dice: random.Random) -> list[Row]:
    """The rows of that many episodes."""
    lost: dict[str, list[float]] = {"one": [], "two": []}
    whole: dict[int, str] = {}
    hangs = different = blamed = killed = epochs = 0
    done = 0
    while done < count:
        episodes = episodes_of_a_run(size, count - done, dice)
        done += len(episodes)
        steps = _APART * (len(episodes) + 1)
        faults, followed = list[str](), list[tuple[int, int, float]]()
        for number, episode in enumerate(episodes, 1):
            first, *others = episode.ranks
            faults.append("kill " + point(size, first, _APART * number, dice))
            if episode.delay is None:
                faults += ["kill " + point(size, rank, _APART * number, dice) for rank in others]
            else:
                followed += [(first, rank, episode.delay) for rank in others]
        if steps not in whole:
            undisturbed = run(How(size, seconds, steps, True, False))
            assert undisturbed is not None
            whole[steps] = undisturbed.lowest.state
        ran = run(How(size, seconds, steps, True, True, faults, followed))
        if ran is None:
            hangs += 1
            continue
        if ran.lowest.state != whole[steps]:
            different += 1
            print(f"other bits: {faults} {followed}", file=sys.stderr)
        dead = {rank for episode in episodes for rank in episode.ranks}
        named = {int(rank) for one in ran.lowest.lost for rank in one.partition(":")[0].removeprefix("rank ").split(",")}
        blamed += len(named - dead)
        killed += len(dead)
        epochs += ran.lowest.epochs
        for episode in episodes:
            fault = max(ran.faults[rank][0] for rank in episode.ranks)
            lost["two" if len(episode.ranks) > 1 else "one"].append(ran.goes_on(fault) - fault)
        latest = ", ".join(f"{one[-1]:.2f} s" for one in lost.values() if one)
        print(f"{done} of {count} episodes, the last {latest}: {faults} {followed}", file=sys.stderr)
    rows = [
        Row("runs with other bits after kills", different, 0, "", done),
        Row("runs that hang after kills", hangs, 0, "", done),
        Row("living processes taken for lost", blamed, 0, "", done),
        Row("epochs for each kill", epochs / max(killed, 1), 1, "", killed),
    ]
    for what, times in lost.items():
        if times:
            ordered = sorted(times)
            rows += [
                Row(f"{what} killed: to the first op redone, median", median(ordered), 0.5, "s", len(ordered)),
                Row(f"{what} killed: 99 of 100", ordered[math.ceil(0.99 * len(ordered)) - 1], 1.5, "s", len(ordered)),
                Row(f"{what} killed: longest", ordered[-1], 1.5, "s", len(ordered)),
            ]
    return rows


def break_calls(size: tuple[int, int, int], seconds: float, count: int, dice: random.Random) -> list[Row]:
    """The rows of one run with that many calls that break."""
    steps = 2 * count + 4
    at = range(3, steps - 1, 2)[:count]
    faults = ["break " + point(size, dice.randrange(size[0] * size[1]), step, dice) for step in at]
    broken, whole = run(How(size, seconds, steps, True, True, faults)), run(How(size, seconds, steps, True, False))
    if broken is None or whole is None:
        return [Row("runs that hang after breaks", 1, 0, "", count)]
    moments = sorted(moment for ranks in broken.faults.values() for moment in ranks)
    lost = sorted(broken.goes_on(moment) - moment for moment in moments)
    ours, theirs = broken.lowest, whole.lowest
    return [
        Row("a break: to the first op redone, median", median(lost), 0.5, "s", len(lost)),
        Row("a break: longest", lost[-1], 0.5, "s", len(lost)),
        Row("other bits after breaks", int(ours.state != theirs.state), 0, "", len(lost)),
        Row("epochs for each break", ours.epochs / len(lost), 1, "", len(lost)),
        Row("resident after breaks, beside none", ours.resident, theirs.resident, "MiB", 1),
        Row("open files after breaks, beside none", ours.files, theirs.files, "", 1),
    ]


def stay_healthy(size: tuple[int, int, int], seconds: float, steps: int) -> list[Row]:
    """The rows of steps without a fault, with survival beside without: runs in turn, as a machine's speed drifts."""
    rows: list[Row] = []
    for clips in (False, True):
        what = "step that clips" if clips else "step"
        medians, different = list[tuple[float, float]](), 0
        for turn in range(_TURNS):
            ran = {on: run(How(size, seconds, steps, clips, on)) for on in ((True, False) if turn % 2 else (False, True))}
            with_it, without = ran[True], ran[False]
            assert with_it is not None and without is not None
            ours, plain = (median(one.lowest.times[steps // 4 :]) * 1e3 for one in (with_it, without))
            medians.append((ours, plain))
            different += with_it.lowest.state != without.lowest.state
        ours, plain = (median(each) for each in zip(*medians, strict=True))
        ratio = median(ours / plain for ours, plain in medians)
        rows += [
            Row(f"{what}, with survive beside without", ours, plain, "ms", _TURNS * steps),
            Row(f"{what}: median of the ratios in turn", ratio, 1.005, "", _TURNS),
            Row(f"{what}: runs with other bits", different, 0, "", _TURNS),
        ]
    return rows


def main() -> int:
    """Run and print the table."""
    arguments = parser(__doc__)
    arguments.add_argument("--replicas", type=int, default=2)
    arguments.add_argument("--stages", type=int, default=4)
    arguments.add_argument("--microbatches", type=int, default=8)
    arguments.add_argument("--op-ms", type=float, default=10.0, help="duration of every emulated op, milliseconds")
    arguments.add_argument("--steps", type=int, default=40, help="steps of each healthy run")
    arguments.add_argument("--breaks", type=int, default=20, help="calls that break, in one run of twice as many steps")
    arguments.add_argument("--kills", type=int, default=10, help="episodes of kills, several in each run")
    arguments.add_argument("--nodes", type=int, default=0, help="jobs of 2 x 3 ranks under torchrun's agents that lose a node")
    arguments.add_argument("--seed", type=int, default=0)
    given = arguments.parse_args()
    size, seconds, dice = (given.replicas, given.stages, given.microbatches), given.op_ms / 1e3, random.Random(given.seed)
    rows = [
        *(stay_healthy(size, seconds, given.steps) if given.steps else ()),
        *(break_calls(size, seconds, given.breaks, dice) if given.breaks else ()),
        *(kill(size, seconds, given.kills, dice) if given.kills else ()),
        *(lose_nodes(size, seconds, given.nodes, dice) if given.nodes else ()),
    ]
    title = f"{size[0]} replicas of {size[1]} stages, {size[2]} microbatches, {given.op_ms:g} ms ops"
    print_rows(title, rows, baseline="without, or bar", as_json=given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
