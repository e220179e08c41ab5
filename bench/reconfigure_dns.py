"""Seconds of a change of roles and of a cut where the name server loses questions.

Two replicas of two stages, each rank on a host of its own. torch's store asks for the name of each host that connects, and
answers nobody meanwhile. Each rank has a name server of its own, named by ``/etc/resolv.conf`` in a mount namespace. It knows
no name, and says so at once. Once training runs, it answers a question only when it is repeated, which is after 5 s, and that
for every ``--every``-th question. torch stops asking after one that was never answered. The hosts need root, see
``tests/links/``.

Ours changes with the spare clients that the job opened at its start. The baseline opens a connection for each client, as
without them. The excess is what a change takes more than with a name server that loses nothing: the bar is 0.5 s.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import socket
import sys
import tempfile
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch
import torch.distributed as dist
from _ranks import run_on_hosts, small_problem, timed
from _table import Row, parser, print_rows

import adaptra
from adaptra.runtime.control_store import spare_clients
from adaptra.runtime.transports import process_groups

RANKS: Final = 4
STAGES: Final = 2
SERVER: Final = "127.0.0.53"
"""The address of each host's name server."""
BAR: Final = 0.5
"""Seconds that a change may take beside moving its state."""

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


def serve_names(every: Synchronized[int]) -> None:
    """Be a name server that knows no name, and that loses every ``every``-th question until it is repeated."""
    seen: set[bytes] = set()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind((SERVER, 53))
        while True:
            question, sender = server.recvfrom(2048)
            is_new = question not in seen
            seen.add(question)
            if not (every.value and is_new and len(seen) % every.value == 0):
                server.sendto(question[:2] + b"\x81\x83" + question[4:], sender)


def without_spares() -> None:
    """Have each client be a connection of its own, as if none had been opened before."""
    spare_clients.take = lambda store: None
    process_groups.client_of_groups = lambda: None


def measure(_rank: int, every: int, spare: bool, runs: int) -> list[float]:
    """One rank: median seconds of a change of roles and of a cut, before the name server loses questions and while it does."""
    # A process, since torch keeps Python's lock while it opens a client.
    forking = multiprocessing.get_context("fork")
    losing: Synchronized[int] = forking.Value("i", 0)
    forking.Process(target=serve_names, args=(losing,), daemon=True).start()
    names()
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


def main() -> int:
    """Start the hosts and print the table."""
    arguments = parser(__doc__)
    arguments.add_argument("--runs", type=int, default=3)
    arguments.add_argument("--every", type=int, default=16, help="which questions are lost at first: every N-th one")
    given = arguments.parse_args()
    ours, theirs = (run_on_hosts(measure, RANKS, [], given.every, spare, given.runs, own_group=True) for spare in (True, False))
    rows = [
        Row("change of roles", ours[2], theirs[2], "s", given.runs),
        Row("change of a cut", ours[3], theirs[3], "s", 2 * given.runs),
        Row("the same of roles, nothing lost", ours[0], theirs[0], "s", given.runs),
        Row("the same of a cut, nothing lost", ours[1], theirs[1], "s", 2 * given.runs),
        Row("excess, roles", ours[2] - ours[0], BAR, "s", given.runs),
        Row("excess, cut", ours[3] - ours[1], BAR, "s", 2 * given.runs),
    ]
    title = f"changes while a name server loses every {given.every}th question"
    print_rows(title, rows, baseline="without spares; the bar of an excess", as_json=given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
