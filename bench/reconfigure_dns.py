"""Seconds of a change of roles and of a cut, and of a recovery after a kill, where the name server loses questions.

Two replicas of two stages, each rank on a host of its own. torch's store asks for the name of each host that connects, and
answers nobody meanwhile. Each rank has a name server of its own, named by ``/etc/resolv.conf`` in a mount namespace. It knows
no name, and says so at once. Once training runs, it answers a question only when it is repeated, which is after 5 s, and that
for every ``--every``-th question. torch stops asking after one that was never answered. The hosts need root, see
``tests/links/``.

A recovery is from the kill of a rank to the first op redone by the others. From the kill on, every question is lost at first.
Nothing of a recovery should ask for a name, so the baseline is a name server that loses nothing.

Ours changes with the spare clients that the job opened at its start. The baseline opens a connection for each client, as
without them. The excess is what a change takes more than with a name server that loses nothing: the bar is 0.5 s.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import socket
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch
import torch.distributed as dist
from _ranks import linked_hosts, run_on_hosts, small_problem, timed
from _survivor import How, train
from _table import Row, parser, print_rows
from survival import Ran
from torch.distributed import TCPStore

import adaptra
from adaptra.runtime.control_store import spare_clients
from adaptra.runtime.survival.ends import Ends
from adaptra.runtime.transports import process_groups

RANKS: Final = 4
STAGES: Final = 2
VICTIM: Final = 3
"""The rank that is killed."""
SERVER: Final = "127.0.0.53"
"""The address of each host's name server."""
BAR: Final = 0.5
"""Seconds that a change may take beside moving its state, and a recovery from the kill on."""

_NEW_MOUNTS: Final = 0x00020000
_PRIVATE: Final = 0x00040000 | 0x4000
_BIND: Final = 0x1000


def names() -> None:
    """Give this thread, and those it starts, the name server of its host."""
    os.environ.pop("RES_OPTIONS", None)
    libc = ctypes.CDLL(None, use_errno=True)
    with tempfile.NamedTemporaryFile("w", suffix=".conf") as file:
        file.write(f"nameserver {SERVER}\n")
        file.flush()
        done = (
            libc.unshare(_NEW_MOUNTS),
            libc.mount(b"none", b"/", None, _PRIVATE, None),
            libc.mount(file.name.encode(), os.path.realpath("/etc/resolv.conf").encode(), None, _BIND, None),
        )
    if any(done):
        raise OSError(ctypes.get_errno(), "a mount namespace with another /etc/resolv.conf")
    assert Path("/etc/resolv.conf").read_text() == f"nameserver {SERVER}\n"


def serve_names(every: Callable[[], int], asked: Synchronized[int]) -> None:
    """Be a name server that knows no name. It loses every ``every()``-th question until it is repeated.

    It counts the questions in the time in which it loses some. As long as ``every()`` is 0 it loses none.
    """
    seen: set[bytes] = set()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind((SERVER, 53))
        while True:
            question, sender = server.recvfrom(2048)
            is_new = question not in seen
            seen.add(question)
            lost = every()
            asked.value += lost > 0
            if not (lost and is_new and len(seen) % lost == 0):
                server.sendto(question[:2] + b"\x81\x83" + question[4:], sender)


def ask_own_server(every: Callable[[], int]) -> Synchronized[int]:
    """Give this host a name server as :func:`serve_names`, and this process that one. Returns what it counts."""
    # A process, since torch keeps Python's lock while it opens a client.
    forking = multiprocessing.get_context("fork")
    asked: Synchronized[int] = forking.Value("i", 0)
    forking.Process(target=serve_names, args=(every, asked), daemon=True).start()
    names()
    return asked


def without_spares() -> None:
    """Have each client be a connection of its own, as if none had been opened before."""
    spare_clients.take = lambda store: None
    process_groups.client_of_groups = lambda: None


def measure(_rank: int, every: int, spare: bool, runs: int) -> list[float]:
    """One rank: median seconds of a change of roles and of a cut, before the name server loses questions and while it does."""
    losing: Synchronized[int] = multiprocessing.get_context("fork").Value("i", 0)
    ask_own_server(lambda: losing.value)
    if not spare:
        without_spares()
    dist.init_process_group("gloo")
    problem = small_problem(STAGES, 4)
    problem["model"].append(torch.nn.Linear(16, 16))
    batch: Any = problem["example_inputs"]
    found: list[float] = []
    with adaptra.compile(**problem, options=adaptra.Options(adapt=False, timeout=600.0)) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-3)

        def changes(count: int) -> list[float]:
            roles: list[float] = []
            cuts: list[float] = []
            for _ in range(count):
                assert pipe.roles is not None
                after = pipe.roles.swapped(1, 2)
                roles.append(timed(lambda after=after: pipe.take_roles(after, optimizer))[0])
                pipe.step(*batch)
                for split in (["2"], ["1"]):
                    cuts.append(timed(lambda split=split: pipe.take_split(split, optimizer))[0])
                    pipe.step(*batch)
            return [median(roles), median(cuts)]

        pipe.step(*batch)
        changes(1)
        found += changes(runs)
        losing.value = every
        found += changes(runs)
        losing.value = 0
    return found


def survive(rank: int, name: str, loses: bool) -> int:
    """One rank of a training in which one is killed. Returns how many names its host was asked for since, if it loses any."""
    folder = Path(name)
    kill = folder / f"fault.{VICTIM}"
    asked = ask_own_server(lambda: int(loses and kill.exists()))
    replica, stage = divmod(VICTIM, STAGES)
    how = How((RANKS // STAGES, STAGES, 4), 0.01, 6, True, True, [f"kill {replica}.{stage} @3:{stage}F1"])
    if rank == VICTIM:
        # As adaptra run does: it tells the end over connections that it has.
        ends = Ends(TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False), lambda *_: None)
        process = multiprocessing.get_context("spawn").Process(target=train, args=(how, folder))
        process.start()
        process.join()
        ends.tell(VICTIM, "was ended by SIGKILL")
        ends.close()
        return asked.value
    seen = train(how, folder)
    (folder / f"{rank}.json").write_text(json.dumps(asdict(seen)))
    others = [f"over/{other}" for other in range(RANKS) if other != VICTIM]
    process_groups.job_store().set(f"over/{rank}", "")
    if rank == 0:  # which has the store
        process_groups.job_store().wait(others)
    return asked.value


def recovery(loses: bool) -> tuple[float, int]:
    """Seconds from a kill to the first op redone, and how many names were asked for in them."""
    with tempfile.TemporaryDirectory() as folder, linked_hosts.LinkedHosts(RANKS) as hosts:
        asked = hosts.call(survive, folder, loses, timeout=200.0)
        ran = Ran.read(Path(folder))
    (moment,) = ran.faults[VICTIM]
    return ran.goes_on(moment) - moment, sum(asked)


def main() -> int:
    """Start the hosts and print the table."""
    arguments = parser(__doc__)
    arguments.add_argument("--runs", type=int, default=3)
    arguments.add_argument("--every", type=int, default=16, help="which questions are lost at first: every N-th one")
    given = arguments.parse_args()
    ours, theirs = (run_on_hosts(measure, RANKS, [], given.every, spare, given.runs, own_group=True) for spare in (True, False))
    lossy, healthy = ([*zip(*(recovery(loses) for _ in range(given.runs)), strict=True)] for loses in (True, False))
    rows = [
        Row("recovery after a kill", median(lossy[0]), median(healthy[0]), "s", given.runs),
        Row("recovery after a kill, beside the bar", median(lossy[0]), BAR, "s", given.runs),
        Row("names asked for in a recovery, at most", max(lossy[1]), 0, "", given.runs),
        Row("change of roles", ours[2], theirs[2], "s", given.runs),
        Row("change of a cut", ours[3], theirs[3], "s", 2 * given.runs),
        Row("the same of roles, nothing lost", ours[0], theirs[0], "s", given.runs),
        Row("the same of a cut, nothing lost", ours[1], theirs[1], "s", 2 * given.runs),
        Row("excess, roles", ours[2] - ours[0], BAR, "s", given.runs),
        Row("excess, cut", ours[3] - ours[1], BAR, "s", 2 * given.runs),
    ]
    title = f"changes while a name server loses every {given.every}th question"
    print_rows(title, rows, baseline="without spares; nothing lost; bar", as_json=given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
