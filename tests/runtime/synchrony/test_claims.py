"""Each microbatch is claimed once, by whoever is first, however claims interleave."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import pytest
import torch
from torch.distributed import HashStore

from adaptra.errors import ControlError
from adaptra.planning.synchrony.modes import Deadline
from adaptra.runtime.synchrony.admissions import Admissions
from adaptra.runtime.synchrony.claims import Claimed, Claims
from adaptra.runtime.synchrony.deferral import Deferral
from adaptra.runtime.synchrony.slots import AdmittedSlots, ClaimedSlots, SlotMicrobatch
from adaptra.runtime.transports.local import LocalHub

MICROBATCHES, KEPT = 12, 2


def in_threads(take: Callable[[int], None], replicas: int) -> None:
    threads = [threading.Thread(target=take, args=(replica,)) for replica in range(replicas)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()


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

    in_threads(take, replicas)
    expected = [
        (step, replica, microbatch)
        for step in range(steps)
        for replica in range(replicas)
        for microbatch in range(KEPT, MICROBATCHES)
    ]
    assert sorted(one[:3] for one in found) == expected


def test_slots_that_are_asked_for_ahead_hold_each_microbatch_once() -> None:
    replicas, steps, most, hub = 4, 20, 3, LocalHub(4)
    slots = [
        ClaimedSlots(
            replica,
            MICROBATCHES,
            [replica],
            hub.transport(replica),
            most,
            Claims(hub.store, replica, replicas, MICROBATCHES),
            lambda _: True,
        )
        for replica in range(replicas)
    ]
    found: list[tuple[int, SlotMicrobatch, int]] = []
    told: dict[tuple[int, int], dict[int, int]] = {}
    barrier = threading.Barrier(replicas)

    def take(replica: int) -> None:
        chance, own = random.Random(replica), slots[replica]
        for step in range(steps):
            barrier.wait()
            own.begin_step(step, range(KEPT), is_open=(step + replica) % 5 > 0)
            for slot in range(MICROBATCHES + most):
                for _ in range(chance.randrange(3)):  # may be asked for again before it is filled
                    own.ask(slot)
                if (held := own.fill(slot)) is not None:
                    found.append((step, held, replica))
            own.end_step()
            told[step, replica] = dict(own.takers)
            barrier.wait()
        own.close()

    in_threads(take, replicas)
    expected = [
        (step, SlotMicrobatch(replica, microbatch))
        for step in range(steps)
        for replica in range(replicas)
        for microbatch in range(MICROBATCHES)
    ]
    assert sorted(one[:2] for one in found) == expected
    taken = [(at, *held, taker) for at, held, taker in found if held.replica != taker]
    assert sorted(taken) == sorted((*at, one, taker) for at, takers in told.items() for one, taker in takers.items())
    assert all(at % 5 != -replica % 5 for at, _, _, replica in taken), "a closed step takes none"


def test_what_is_asked_for_cannot_be_taken() -> None:
    hub = LocalHub(2)
    mine, others = Claims(hub.store, 0, 2, MICROBATCHES), Claims(hub.store, 1, 2, MICROBATCHES)
    slots = ClaimedSlots(0, MICROBATCHES, [0], hub.transport(0), 1, mine, lambda _: True)
    slots.begin_step(3, range(KEPT), is_open=True)
    others.open(3, MICROBATCHES)
    for slot in range(KEPT, MICROBATCHES - 2):
        assert slots.fill(slot) == (0, slot)
    slots.ask(MICROBATCHES - 2)
    while hub.store.get("claimed/0") != b"3 11 ":
        pass
    assert [others.steal(lambda _: True) for _ in range(2)] == [(0, MICROBATCHES - 1), None]
    assert slots.fill(MICROBATCHES - 2) == (0, MICROBATCHES - 2)
    assert slots.fill(MICROBATCHES - 1) is None
    assert slots.takers == {MICROBATCHES - 1: 1}
    slots.close()


def test_as_many_microbatches_begin_as_a_deadline_admits() -> None:
    replicas, steps, hub = 4, 20, LocalHub(4)
    deferrals = [Deferral(Deadline(0.8), replica, replicas, MICROBATCHES) for replica in range(replicas)]
    own = [0] * replicas
    barrier = threading.Barrier(replicas)
    free: list[tuple[int, int]] = []

    def take(replica: int) -> None:
        chance, deferral, transport = random.Random(replica), deferrals[replica], hub.transport(replica)
        slots = AdmittedSlots(replica, MICROBATCHES, [replica], transport, Admissions(hub.store, deferral))
        for step in range(steps):
            barrier.wait()
            admitted, deferred = deferral.free, deferral.deferred[replica]
            slots.begin_step(step, range(-deferred, 1), is_open=True)
            for slot in range(2 * MICROBATCHES - 1):
                for _ in range(chance.randrange(3)):
                    slots.ask(slot)
                slots.fill(slot)
            slots.end_step()
            assert slots.held == [SlotMicrobatch(replica, one) for one in range(-deferred, slots.own)]
            own[replica] = slots.own
            deferral.take(slots.own)
            barrier.wait()
            if replica == 0:
                free.append((sum(own) - replicas, admitted))
                told = torch.stack([one.told() for one in deferrals]).sum(0)
                for one in deferrals:
                    one.meet(told, mean=False)
            barrier.wait()
        slots.close()

    in_threads(take, replicas)
    left = replicas * (MICROBATCHES - 1)
    assert len(free) == steps and all(begun == min(admitted, left) for begun, admitted in free)


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
