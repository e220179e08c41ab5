"""What the others of a job do when one of its processes is killed, frozen or cut off in the middle of training.

Each episode trains a tiny model over four processes, at random four stages or two replicas of two, over c10d or the delegate.
The control store lives in rank 0, or in a process of its own as torchrun's agent has it. Then one process gets SIGKILL or
SIGSTOP at a random time, the store's host among them. Counted are the survivors that have not ended after ``--limit`` seconds,
and those whose error names another process than the lost one. The end of a store's own process is named as the store's.

``--cuts`` adds episodes in which each rank is a host of its own (``tests/links``; needs root), and all links of one go down.
There the rank of the host that is cut off has to end too.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
import time
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from threading import Thread
from typing import Any

from _table import Row, parser, print_rows

sys.path += [str(Path(__file__).resolve().parent.parent / "tests" / folder) for folder in ("support", "links")]
import linked_hosts
from processes import free_port

RANKS = 4
STORE = RANKS
"""The number of the process that has the store, where no rank has it."""
MOST_KILLED = 3.0
MOST_STOPPED = 7.0
MOST_CUT = 15.0
_START_SECONDS = 120.0


@dataclass(frozen=True)
class Episode:
    """One random death."""

    seed: int
    stages: int
    transport: str
    launcher_has_store: bool
    victim: int
    is_kill: bool
    after: float

    @classmethod
    def draw(cls, seed: int) -> Episode:
        """Return the episode of a seed."""
        chance = random.Random(seed)
        launcher_has_store = chance.random() < 0.4
        victims: list[int] = [0, *range(RANKS), *([STORE] if launcher_has_store else [])]
        victim = chance.choice(victims)
        stages, transport = chance.choice([2, 4]), chance.choice(["c10d", "delegate"])
        return cls(seed, stages, transport, launcher_has_store, victim, chance.random() < 0.5, chance.uniform(0.1, 1.5))

    @property
    def cut_host(self) -> int:
        """The host that is cut off, if each rank has one; the store's is rank 0's then."""
        return self.victim % RANKS

    @property
    def cut_name(self) -> str:
        """For people: what happens if each rank has a host."""
        shape = f"{RANKS // self.stages}×{self.stages}"
        return f"{self.seed}: {shape} over {self.transport}, links of rank {self.cut_host}'s host down after {self.after:.1f} s"

    def __str__(self) -> str:
        shape = f"{RANKS // self.stages}×{self.stages}"
        who = "the store's process" if self.victim == STORE else f"rank {self.victim}"
        has = "launcher" if self.launcher_has_store else "rank 0"
        fault = "SIGKILL" if self.is_kill else "SIGSTOP"
        return f"{self.seed}: {shape} over {self.transport}, store in {has}, {fault} of {who} after {self.after:.1f} s"


@dataclass(frozen=True)
class Told:
    """What a survivor raised."""

    kind: str
    lost: int | None
    text: str
    at: float

    def names(self, lost: int) -> bool:
        """Return True if this names the process, or the control store for :data:`STORE`."""
        if self.kind != "PeerLostError":
            return False
        return self.lost is None and "control store" in self.text if lost == STORE else self.lost == lost


def serve(port: int, end: Connection) -> None:
    """Host the store, as torchrun's agent does."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", port, None, is_master=True, wait_for_workers=False)
    end.send("ready")
    time.sleep(3600)
    del store


def train(rank: int, port: int | None, episode: Episode, end: Connection) -> None:
    """Train until something raises, and tell what. Without a port the environment says where the others are."""
    if port is not None:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        if episode.launcher_has_store:
            os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    import torch
    from torch import nn

    import adaptra

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)), nn.BatchNorm1d(8))
    slow = adaptra.Options(emulate=adaptra.EmulatedDevice(0.005, 0.005, 0.005))
    rows, targets = torch.randn(16, 8), torch.randn(16, 8)
    pipe = adaptra.compile(
        model,
        stages=episode.stages,
        microbatches=4,
        example_inputs=(rows, targets),
        loss=nn.functional.mse_loss,
        transport=episode.transport,
        options=slow,
    )
    pipe.step(rows, targets)
    end.send("ready")
    try:
        while True:
            pipe.step(rows, targets)
    except Exception as error:
        end.send(Told(type(error).__name__, getattr(error, "rank", None), str(error), time.monotonic()))
    pipe.close()
    end.send("closed")


def train_on_host(rank: int, seed: int, limit: float) -> dict[str, Any]:
    """Train on a host of its own until something raises. The victim cuts its host off; the result has the time of that."""
    episode = Episode.draw(seed)
    theirs, ours = multiprocessing.Pipe()
    Thread(target=train, args=(rank, None, episode, ours), daemon=True).start()
    theirs.recv()
    found: dict[str, Any] = {}
    if rank == episode.cut_host:
        time.sleep(episode.after)
        for other in range(RANKS):
            if other != rank:
                linked_hosts.change_links(os.environ[linked_hosts.CONTROL], f"{rank}-{other} down")
        found["began"] = time.monotonic()
    until = time.monotonic() + limit + (0.0 if "began" in found else episode.after)
    for name in ("told", "closed"):
        if theirs.poll(until - time.monotonic()):
            said = theirs.recv()
            found[name] = asdict(said) if isinstance(said, Told) else said
    return found


def run_on_hosts(seed: int, limit: float) -> tuple[float, dict[int, Told], list[int]]:
    """Return what :func:`run` does, of an episode in which a host is cut off."""
    with linked_hosts.LinkedHosts(RANKS) as hosts:
        found = hosts.call(train_on_host, seed, limit, timeout=_START_SECONDS + 2 * limit)
    began = next(one["began"] for one in found if "began" in one)
    told = {rank: Told(**one["told"]) for rank, one in enumerate(found) if "told" in one}
    return began, told, [rank for rank, one in enumerate(found) if "closed" not in one]


def run(episode: Episode, limit: float) -> tuple[float, dict[int, Told], list[int]]:
    """Return when the signal was sent, what each survivor raised, and the survivors that had not ended in time."""
    context: Any = multiprocessing.get_context("forkserver")
    port = free_port()
    ends: dict[int, Connection] = {}
    processes: dict[int, Any] = {}
    try:
        for number in [*([STORE] if episode.launcher_has_store else []), *range(RANKS)]:
            ends[number], theirs = context.Pipe(duplex=False)
            arguments = (port, theirs) if number == STORE else (number, port, episode, theirs)
            processes[number] = context.Process(target=serve if number == STORE else train, args=arguments, daemon=True)
            processes[number].start()
            theirs.close()
            if number == STORE:
                ends[number].recv()
        for number in range(RANKS):
            try:
                is_ready = ends[number].poll(_START_SECONDS) and ends[number].recv() == "ready"
            except EOFError:
                is_ready = False
            if not is_ready:
                raise SystemExit(f"episode {episode}: rank {number} did not start")
        time.sleep(episode.after)
        os.kill(processes[episode.victim].pid, signal.SIGKILL if episode.is_kill else signal.SIGSTOP)
        began = time.monotonic()
        told: dict[int, Told] = {}
        left = {ends[number]: number for number in range(RANKS) if number != episode.victim}
        while left and (remaining := began + limit - time.monotonic()) > 0:
            for end in wait([*left], remaining):
                assert isinstance(end, Connection), "only pipes are waited for"
                number = left[end]
                try:
                    said = end.recv()
                except EOFError:  # it has ended
                    del left[end]
                    continue
                if isinstance(said, Told):
                    told[number] = said
        return began, told, sorted(left.values())
    finally:
        for process in processes.values():
            process.kill()
            process.join()


@dataclass
class Counted:
    """What all episodes came to."""

    hangs: int = 0
    wrong: int = 0
    survivors: int = 0

    def add(self, name: str, lost: int, outcome: tuple[float, dict[int, Told], list[int]]) -> float:
        """Count an episode and print it; return the seconds until the last survivor raised.

        ``lost`` is the process that is to be named, :data:`STORE` for the store's own.
        """
        began, told, hanging = outcome
        last = max((one.at - began for one in told.values()), default=0.0)
        bad = {rank: one for rank, one in told.items() if rank != lost and not one.names(lost)}
        said = f"raised after {last:.1f} s, {len(bad)} blamed another, {len(hanging)} hang"
        print(f"{name}: {said}", file=sys.stderr)
        for rank, one in bad.items():
            print(f"  rank {rank}: {one.kind}(rank={one.lost}): {one.text[:300]}", file=sys.stderr)
        self.hangs, self.wrong = self.hangs + len(hanging), self.wrong + len(bad)
        self.survivors += len(told.keys() - {lost})
        return last


def main() -> int:
    """Run the episodes and print the table."""
    arguments = parser(__doc__)
    arguments.add_argument("--runs", type=int, default=20, help="episodes of kills and stops")
    arguments.add_argument("--cuts", type=int, default=0, help="episodes in which a host is cut off")
    arguments.add_argument("--seed", type=int, default=0, help="the first episode's seed")
    arguments.add_argument("--limit", type=float, default=40.0, help="seconds after which a survivor hangs")
    given = arguments.parse_args()
    if given.cuts and (reason := linked_hosts.missing()) is not None:
        raise SystemExit(reason)
    multiprocessing.get_context("forkserver").set_forkserver_preload(["adaptra"])
    counted = Counted()
    kills, stops, cuts = [0.0], [0.0], [0.0]
    for seed in range(given.seed, given.seed + given.runs):
        episode = Episode.draw(seed)
        (kills if episode.is_kill else stops).append(counted.add(str(episode), episode.victim, run(episode, given.limit)))
    for seed in range(given.seed, given.seed + given.cuts):
        episode = Episode.draw(seed)
        cuts.append(counted.add(episode.cut_name, episode.cut_host, run_on_hosts(seed, given.limit)))
    rows = [
        Row("survivors that hang", counted.hangs, 0, "", given.runs + given.cuts),
        Row(f"survivors of {counted.survivors} that named another process", counted.wrong, 0, "", given.runs + given.cuts),
        Row("longest time until all raised, kills", max(kills), MOST_KILLED, "s", len(kills) - 1),
        Row("longest time until all raised, stops", max(stops), MOST_STOPPED, "s", len(stops) - 1),
        Row("longest time until all raised, cuts", max(cuts), MOST_CUT, "s", len(cuts) - 1),
    ]
    print_rows("Deaths in the middle of training", rows, baseline="bar", as_json=given.json)
    return int(
        bool(counted.hangs or counted.wrong) or max(kills) > MOST_KILLED or max(stops) > MOST_STOPPED or max(cuts) > MOST_CUT
    )


if __name__ == "__main__":
    raise SystemExit(main())
