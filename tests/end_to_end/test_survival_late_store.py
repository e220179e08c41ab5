"""A store that answers late delays a recovery, and changes no number."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
from errors_table import check_documented
from proxy import Proxy
from test_hosting import digest
from test_survival import join_by

pytestmark = pytest.mark.processes

LATE, KILLED = 2, 3
"""The step from which on the store is late, and the one in which a rank dies."""
KILL = f"kill 1.1 @{KILLED}:1F2"
GIVES_UP, CUT_OFF_FOR = 2.0, 16.0
"""Seconds after which a rank that is cut off gives up, and those after which its links would be back."""
CUT_OFF = "the job's store is lost: all other ranks have been silent for … s"


def train_late(rank: int, port: int, faults: list[str]) -> tuple[str, list[float]]:
    """A digest of a training's losses, and the seconds of its steps; from one on the store is late.

    Or, in place of a digest, the error by which it ends.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _get_default_store
    from training import MIXED, compiled

    import adaptra
    from adaptra.errors import PeerLostError
    from adaptra.runtime.control_store.stores import innermost
    from adaptra.runtime.survival import evidence

    evidence.CUT_OFF_SECONDS = GIVES_UP  # pyright: ignore[reportConstantRedefinition]
    join_by(port)
    dist.init_process_group("gloo")
    inputs, _, targets = batch = MIXED.rows(12, seed=0)
    losses: list[torch.Tensor] = []
    seconds: list[float] = []
    with compiled(MIXED, batch, stages=2, microbatches=4, options=adaptra.Options(survive=True, faults=faults)) as pipe:
        for step in range(KILLED + 3):
            if step == LATE and faults:
                store = innermost(_get_default_store())
                store.set(f"waits/{rank}", "")
                store.wait(["is late"])
            began = time.monotonic()
            try:
                losses.append(pipe.step(inputs[0], targets))
            except PeerLostError as error:
                return str(error), [*seconds, time.monotonic() - began]
            seconds.append(time.monotonic() - began)
    return digest(torch.stack(losses)), seconds


def train_by(make_late: Callable[[Proxy], object], faults: list[str]) -> list[tuple[str, list[float]]]:
    """What the ranks of a training return that are left, with a store that becomes late."""
    from processes import run_processes
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    proxy = Proxy(store.port)

    def watch() -> None:
        while not store.check([f"waits/{rank}" for rank in range(4)]):
            time.sleep(0.01)  # a wait would keep Python's other threads from running
        make_late(proxy)
        store.set("is late", "")

    if faults:
        threading.Thread(target=watch, daemon=True).start()
    told = run_processes(train_late, 4, proxy.port, faults, may_die=(3,) if KILL in faults else ())
    return [one for one in told if one is not None]


def test_a_store_that_answers_late_costs_time_alone() -> None:
    ((numbers, _), *_) = train_by(lambda _: None, [])
    late = train_by(lambda proxy: proxy.delay(0.3), [KILL])
    assert [one for one, _ in late] == [numbers] * 3
    assert all(seconds[KILLED] >= 0.3 for _, seconds in late), "no recovery goes without an answer of the store"


@pytest.mark.timed
def test_a_rank_that_is_cut_off_for_long_gives_up() -> None:
    """To one rank the others and the store are silent, as if its links were cut; they go on without it."""

    def cut(proxy: Proxy) -> None:
        threading.Timer(0.2, proxy.stall).start()
        threading.Timer(CUT_OFF_FOR, proxy.go_on).start()

    ((numbers, _), *_) = train_by(lambda _: None, [])
    frozen = [f"freeze {worker} @{KILLED} {CUT_OFF_FOR:g}s" for worker in ("0.0", "0.1", "1.0")]
    *lived, (text, seconds) = train_by(cut, frozen)
    assert [one for one, _ in lived] == [numbers] * 3
    check_documented("PeerLostError", text, CUT_OFF)
    assert seconds[-1] > GIVES_UP
