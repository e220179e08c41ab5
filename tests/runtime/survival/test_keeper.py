"""What a process that keeps to its job's epochs has heard counts, whenever it hears it. The store is real."""

from __future__ import annotations

from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import pytest

from adaptra.errors import PeerLostError
from adaptra.runtime.survival.ends import Ends
from adaptra.runtime.survival.evidence import Evidence
from adaptra.runtime.survival.keeper import EpochKeeper
from adaptra.runtime.world.world import ProcessId, World

WORLD = World.of_fewer(4, places=2, replicas=2)


@contextmanager
def kept(on_break: Callable[[int, str], object] = lambda process, why: None) -> Generator[tuple[Any, list[EpochKeeper]]]:
    """A store, and the keepers of all processes of a job."""
    from torch.distributed import TCPStore

    store: Any = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def keep(process: ProcessId) -> EpochKeeper:
        return EpochKeeper(store.clone(), process, WORLD, lambda lost: on_break(process, str(lost)), lambda gone: None)

    with ThreadPoolExecutor(len(WORLD.processes)) as side_by_side:
        keepers = [*side_by_side.map(keep, WORLD.processes)]
    try:
        yield store, keepers
    finally:
        for keeper in keepers:
            keeper.close()


def test_an_end_that_was_told_before_the_record_breaks_the_epoch_that_is_still_with_that_process() -> None:
    """Who decided had not heard of it. Nobody tells it again."""
    breaks: SimpleQueue[str] = SimpleQueue()
    with kept(lambda process, why: breaks.put(why) if process == 1 else None) as (_, keepers):
        keepers[1]._evidence._told[3] = "was ended by SIGKILL"
        keepers[2].broke(0, PeerLostError("a reset"))
        assert all(keeper.follower(0).epoch == 1 for keeper in keepers)
        assert breaks.get(timeout=10) == "epoch 0 of the job has broken: rank 2: a reset"
        assert breaks.get(timeout=10) == "epoch 1 of the job has broken: rank 3 was ended by SIGKILL"


def test_who_dies_before_it_has_told_that_the_job_goes_on_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the launcher would take an end for a failure that cost the job nothing."""
    tell = Evidence.outlived

    def tell_unless_first(self: Evidence, processes: Any) -> None:
        if self is not keepers[0]._evidence:
            tell(self, processes)

    monkeypatch.setattr(Evidence, "outlived", tell_unless_first)
    outlived: SimpleQueue[int] = SimpleQueue()
    with kept() as (store, keepers):
        launcher = Ends(store, lambda *_: None, outlived.put)
        for number, (process, left) in enumerate([(3, keepers[:3]), (0, keepers[1:3])]):
            keepers[process].close()
            launcher.tell(process, "was ended by SIGKILL")
            assert all(keeper.follower(number).epoch == number + 1 for keeper in left)
        assert {outlived.get(timeout=10), outlived.get(timeout=10)} == {0, 3}
        launcher.close()
