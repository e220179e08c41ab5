"""What a process that keeps to its job's epochs has heard counts, whenever it hears it. The store is real."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

from adaptra.errors import PeerLostError
from adaptra.runtime.survival.keeper import EpochKeeper
from adaptra.runtime.world.world import ProcessId, World

WORLD = World.of_fewer(4, places=2, replicas=2)


def test_an_end_that_was_told_before_the_record_breaks_the_epoch_that_is_still_with_that_process() -> None:
    """Who decided had not heard of it. Nobody tells it again."""
    from torch.distributed import TCPStore

    store: Any = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    breaks: SimpleQueue[str] = SimpleQueue()

    def keep(process: ProcessId) -> EpochKeeper:
        on_break = (lambda lost: breaks.put(str(lost))) if process == 1 else (lambda lost: None)
        return EpochKeeper(store.clone(), process, WORLD, on_break, lambda gone: None)

    with ThreadPoolExecutor(len(WORLD.processes)) as side_by_side:
        keepers = [*side_by_side.map(keep, WORLD.processes)]
    try:
        keepers[1]._evidence._told[3] = "was ended by SIGKILL"
        keepers[2].broke(0, PeerLostError("a reset"))
        assert all(keeper.follower(0).epoch == 1 for keeper in keepers)
        assert breaks.get(timeout=10) == "epoch 0 of the job has broken: rank 2: a reset"
        assert breaks.get(timeout=10) == "epoch 1 of the job has broken: rank 3 was ended by SIGKILL"
    finally:
        for keeper in keepers:
            keeper.close()
