"""Each microbatch is claimed once, by whoever is first, however claims interleave."""

from __future__ import annotations

import random
import threading

import pytest
from torch.distributed import HashStore

from adaptra.errors import ControlError
from adaptra.runtime.synchrony.claims import Claimed, Claims

MICROBATCHES, KEPT = 12, 2


def test_threads_claim_each_microbatch_once() -> None:
    store, replicas, steps = HashStore(), 4, 20
    claims = [Claims(store, replica, replicas, MICROBATCHES) for replica in range(replicas)]
    found: list[tuple[int, int, int, int]] = []
    barrier = threading.Barrier(replicas)

    def take(replica: int) -> None:
        own = claims[replica]
        for step in range(steps):
            barrier.wait()
            own.open(step, KEPT)
            while (microbatch := own.claim()) is not None:
                found.append((step, replica, microbatch, replica))
            while (stolen := own.steal(lambda _: True)) is not None:
                found.append((step, *stolen, replica))
            barrier.wait()
            for microbatch, taker in own.takers.items():
                assert (step, replica, microbatch, taker) in found

    threads = [threading.Thread(target=take, args=(replica,)) for replica in range(replicas)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    expected = [
        (step, replica, microbatch)
        for step in range(steps)
        for replica in range(replicas)
        for microbatch in range(KEPT, MICROBATCHES)
    ]
    assert sorted(one[:3] for one in found) == expected


def test_others_take_the_last_ones_of_who_has_most_left() -> None:
    store = HashStore()
    first, second, third = (Claims(store, replica, 3, MICROBATCHES) for replica in range(3))
    for one in (first, second):
        one.open(5, KEPT)
    third.open(4, KEPT)  # is still in the step before
    assert [second.claim() for _ in range(3)] == [2, 3, 4]
    while first.claim() is not None:
        pass
    assert first.steal(lambda other: other != 1) is None, "its inputs have not come"
    assert [first.steal(lambda _: True) for _ in range(2)] == [(1, 11), (1, 10)]
    assert [second.claim() for _ in range(6)] == [5, 6, 7, 8, 9, None]
    assert second.takers == {10: 0, 11: 0}
    assert first.steal(lambda _: True) is None


def test_records_are_read_as_they_are_written() -> None:
    chance = random.Random(1)
    for _ in range(50):
        one = Claimed(
            chance.randrange(99), chance.randrange(9), tuple(chance.randrange(20) for _ in range(chance.randrange(4)))
        )
        assert Claimed.parse(str(one).encode()) == one
    for payload in (b"", b"1 2", b"1 2 x", b"\xff"):
        with pytest.raises(ControlError, match="record of claimed microbatches"):
            Claimed.parse(payload)
