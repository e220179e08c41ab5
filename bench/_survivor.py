"""One process of a job that ``bench/survival.py`` starts: trains, and writes what it saw into a folder.

Called with the folder. Its ``how.json`` is a :class:`How`; ``RANK.json`` is a :class:`Seen`, and ``fault.RANK`` has the moments
of this rank's faults. Moments are seconds of the monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from _ranks import small_problem

import adaptra
from adaptra.runtime.control.plans.events import EventKind
from adaptra.runtime.injection.failures import Failures
from adaptra.runtime.injection.faults import Fault

_LONG_SECONDS = 300.0
"""Seconds after which a process says where it is, as it seems to hang."""


@dataclass(frozen=True)
class How:
    """A training, and the faults that it is to have."""

    size: tuple[int, int, int]
    """Replicas, stages, microbatches."""
    seconds: float
    """Of every emulated op."""
    steps: int
    clips: bool
    survives: bool
    faults: Sequence[str] = ()
    followed: Sequence[tuple[int, int, float]] = ()
    """Ranks, each with another one, which is killed that many seconds after the first one's fault."""


@dataclass
class Seen:
    """What one rank saw."""

    state: str = ""
    """A digest of all losses, norms and parameters."""
    times: list[float] = field(default_factory=list[float])
    """Seconds of each step."""
    first_ops: list[float] = field(default_factory=list[float])
    """When the first op of each step began in the attempt that counts."""
    lost: list[str] = field(default_factory=list[str])
    """The texts of the events that name a lost process."""
    epochs: int = 0
    resident: float = 0.0
    """MiB at the end."""
    files: int = 0
    """Open ones at the end."""


def train(how: How, folder: Path) -> Seen:
    """Join the others, train as told, and see."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    _note_faults(folder, dist.get_rank())
    for first, second, delay in how.followed:
        if second == dist.get_rank():
            threading.Thread(target=_follow, args=(folder, first, second, delay), daemon=True).start()
    replicas, stages, microbatches = how.size
    given = small_problem(stages, microbatches)
    emulated = adaptra.EmulatedDevice(how.seconds, how.seconds, how.seconds) if how.seconds else None
    options = adaptra.Options(emulate=emulated, survive=how.survives, faults=how.faults)
    seen, digest = Seen(), hashlib.sha256()
    with adaptra.compile(**given, replicas=replicas, options=options, transport="delegate") as pipe:
        session = pipe._session
        assert session is not None
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-3)
        inputs, targets = given["example_inputs"]
        for step in range(how.steps):
            began = time.monotonic()
            digest.update(pipe.step(inputs + pipe.replica + step, targets).numpy().tobytes())
            ops = [op.start for worker in session.workers for record in worker.monitor.kept[-1:] for op in record.ops]
            seen.first_ops.append(min(ops, default=math.inf))
            if how.clips:
                digest.update(pipe.clip_grad_norm_(1.0).numpy().tobytes())
            seen.times.append(time.monotonic() - began)
            seen.epochs = session.local.launched.world.epoch
            optimizer.step()
            optimizer.zero_grad()
        whole = pipe.full_state_dict()
        for name in sorted(whole):
            digest.update(whole[name].numpy().tobytes())
        seen.state = digest.hexdigest() if whole else ""
        seen.lost = [event.text for event in pipe.events if event.kind is EventKind.LOST]
    return seen


def leave(seen: Seen) -> None:
    """Leave the others, and see what is left."""
    dist.destroy_process_group()
    seen.resident = int(Path("/proc/self/statm").read_text().split()[1]) / 256
    seen.files = len([*Path("/proc/self/fd").iterdir()])


def _note(folder: Path, rank: int) -> None:
    with (folder / f"fault.{rank}").open("a") as file:
        file.write(f"{time.monotonic()}\n")


def _note_faults(folder: Path, rank: int) -> None:
    act: Callable[[Failures, Fault], None] = Failures._act

    def noted(self: Failures, failure: Fault) -> None:
        _note(folder, rank)
        act(self, failure)

    Failures._act = noted


def _follow(folder: Path, first: int, second: int, delay: float) -> None:
    while not (folder / f"fault.{first}").exists():
        time.sleep(0.005)
    time.sleep(delay)
    _note(folder, second)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    faulthandler.dump_traceback_later(_LONG_SECONDS)
    at = Path(sys.argv[1])
    seen = train(How(**json.loads((at / "how.json").read_text())), at)
    leave(seen)
    written = at / f"{os.environ['RANK']}.new"
    written.write_text(json.dumps(asdict(seen)))
    written.rename(written.with_suffix(".json"))  # whole, for who waits for it
