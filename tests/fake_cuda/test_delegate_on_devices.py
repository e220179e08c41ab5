"""The delegate between two devices, whose work a test holds back: what waits for what, in which memory, and at which time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from fake_cuda.machine import Machine

SOON = 30.0
ROOMS, MESSAGES, REPEATS = 2, 6, 5
BUSY, WAIT = 0.02, 0.5


@pytest.fixture
def ends(machine: Machine) -> Iterator[list[Any]]:
    """Two ranks' ends of the delegate, on a device each."""
    import torch
    from torch.distributed import HashStore

    from adaptra.runtime.transports.delegate.engine import Timing, listen, start_engine
    from adaptra.runtime.transports.delegate.gpu import GpuDelegateTransport

    store = HashStore()

    def end(rank: int) -> GpuDelegateTransport:
        torch.cuda.set_device(rank)
        started = start_engine(rank, 2, store, ["127.0.0.1"], Timing(), listen)
        return GpuDelegateTransport(started, lambda: None, torch.device("cuda", rank))

    with ThreadPoolExecutor(2) as pool:
        made = list(pool.map(end, (0, 1)))
    yield made
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda one: one.close(), made))
    torch.cuda.set_device(0)
    assert not machine.detector.reports, [*map(str, machine.detector.reports)]


def send(end: Any, identity: Any, value: float) -> None:
    """Send a message whose elements all have a value, made on the sender's device."""
    import torch

    torch.cuda.set_device(0)
    end.send(1, identity, [torch.full(spec.shape, value, dtype=spec.dtype, device="cuda:0") for spec in identity.specs])
    torch.cuda.set_device(1)


@pytest.mark.parametrize("rounded", [False, True])
def test_received_messages_use_the_memory_that_was_reserved(ends: list[Any], rounded: bool) -> None:
    import torch

    from adaptra.graph.ops.specs import TensorSpec
    from adaptra.runtime.transports.base import Identity, Purpose

    specs = (TensorSpec((5000,), torch.float32, lossy_bf16=rounded),)
    source, end = ends
    torch.cuda.set_device(1)
    end.reserve({(0, specs): ROOMS})
    addresses: set[int] = set()
    allocated: set[int] = set()
    for number in range(MESSAGES):
        identity = Identity(0, Purpose.ACTIVATION, 0, 1, number, specs)
        pending = end.receive(0, identity)
        send(source, identity, float(number))
        (got,) = pending.wait(SOON)
        addresses.add(got.data_ptr())
        allocated.add(torch.cuda.memory_allocated(1))
        assert got.tolist() == [float(number)] * 5000
        end.release(pending)
        del got
    assert len(addresses) <= ROOMS and len(allocated) == 1


def test_memory_is_filled_again_once_the_device_has_read_it_and_no_other_channel_waits_for_that(
    ends: list[Any], machine: Machine
) -> None:
    import torch
    from transport_bodies import LARGE, SMALL, forward

    from adaptra.runtime.transports.base import Identity, Purpose

    source, end = ends
    torch.cuda.set_device(1)
    end.reserve({(0, LARGE): 1, (0, SMALL): 1})
    first, second = (forward(number, specs=LARGE) for number in (0, 1))
    pending = end.receive(0, first)
    send(source, first, 1.0)
    (got,) = pending.wait(SOON)
    gate = machine.hold()
    read = got + 0
    end.release(pending)
    waiting = end.receive(0, second)
    send(source, second, 2.0)
    beside = Identity(0, Purpose.SHARED_GRADIENT, 0, 1, 0, SMALL)
    other = end.receive(0, beside)
    send(source, beside, 3.0)
    with torch.cuda.stream(torch.cuda.Stream(1)):  # the other one is held back
        assert other.wait(SOON)[0].tolist() == [3.0] * 4
    time.sleep(0.05)
    assert not waiting.done
    gate.release()
    (later,) = waiting.wait(SOON)
    assert (read.unique().tolist(), later.unique().tolist()) == ([1.0], [2.0])
    end.release(waiting)


@pytest.mark.alone
def test_a_message_behind_a_long_op_flies_no_longer(ends: list[Any], machine: Machine) -> None:
    import torch
    from transport_bodies import LARGE, forward

    source, end = ends
    torch.cuda.set_device(1)
    end.reserve({(0, LARGE): 1})
    flights: list[float] = []
    for number in range(REPEATS):
        identity = forward(number, specs=LARGE)
        pending = end.receive(0, identity)
        torch.cuda.set_device(0)
        machine.hold_for(BUSY)
        begun = time.monotonic()
        send(source, identity, 1.0)
        pending.wait(SOON)
        assert pending.arrived_at - begun > 0.9 * BUSY
        flights.append(pending.arrived_at - pending.sent_at)
        end.release(pending)
    assert min(flights) <= 1e-3


@pytest.mark.alone
def test_a_message_that_arrived_is_handed_over_while_another_channel_waits(ends: list[Any], machine: Machine) -> None:
    import torch
    from transport_bodies import LARGE, forward

    from adaptra.runtime.transports.base import Identity, Purpose

    source, end = ends
    torch.cuda.set_device(1)
    end.reserve({(0, LARGE): 2})
    delays: list[float] = []
    for number in range(REPEATS):
        waiting = end.receive(0, Identity(number, Purpose.SHARED_GRADIENT, 0, 1, 0, LARGE))
        identity = forward(number, specs=LARGE)
        pending = end.receive(0, identity)
        send(source, identity, 1.0)
        pending.wait(SOON)
        torch.cuda.current_stream().synchronize()
        delays.append(time.monotonic() - pending.arrived_at)
        assert not waiting.done
        end.release(pending)
        send(source, waiting.identity, 2.0)
        waiting.wait(SOON)
        end.release(waiting)
    assert min(delays) <= 2e-3


@pytest.mark.alone
@pytest.mark.parametrize("is_busy", [True, False], ids=["a busy device", "an idle device"])
def test_a_wait_is_as_long_as_the_device_has_nothing_to_do(ends: list[Any], machine: Machine, is_busy: bool) -> None:
    """The host waits for the message in any case; the times are read a while after that."""
    import torch
    from transport_bodies import LARGE, forward

    from adaptra.runtime.devices.device_clock import OpClock

    source, end = ends
    torch.cuda.set_device(1)
    end.reserve({(0, LARGE): 1})
    clock, errors = OpClock(torch.device("cuda", 1)), []
    for number in range(REPEATS):
        identity = forward(number, specs=LARGE)
        pending = end.receive(0, identity)
        if is_busy:
            machine.hold_for(5 * BUSY)
        asked = time.monotonic(), clock.mark()
        torch.cuda.set_device(0)
        machine.hold_for(BUSY)
        send(source, identity, 1.0)
        pending.wait(SOON)
        consumed = clock.mark()
        end.release(pending)
        waited_by_host = time.monotonic() - asked[0]
        time.sleep(0.1)
        begun, ended = clock.read([asked[1], consumed])
        expected = (asked[0] + 5 * BUSY, 0.0) if is_busy else (asked[0], waited_by_host)
        errors.append(max(abs(begun - expected[0]), abs(ended - begun - expected[1])))
    assert min(errors) <= 1e-3
