"""The transport over NCCL between two ranks, which are threads with a device each; all other messages go by another way."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from fake_cuda.machine import Machine

    from adaptra.runtime.transports.nccl.nccl import NcclTransport

Body = Callable[[int, "NcclTransport"], Any]
SOON = 20.0


@pytest.fixture(params=["older", "newer"])
def backend(request: pytest.FixtureRequest, machine: Machine) -> Iterator[str]:
    from fake_cuda import nccl, nccl_backends
    from torch.distributed import distributed_c10d

    nccl_backends.use(request.param)
    nccl_backends.Older.made.clear()
    yield request.param
    vars(distributed_c10d).pop("ProcessGroupNCCL2", None)  # pyright: ignore[reportAttributeAccessIssue]
    nccl.install()


def device_of(rank: int) -> Any:
    import torch

    return torch.device("cuda", rank)


def join(rank: int, hub: Any, meeting: Any) -> NcclTransport:
    import torch

    from adaptra.runtime.transports.nccl.edges import edges_of
    from adaptra.runtime.transports.nccl.nccl import NcclTransport
    from adaptra.runtime.transports.process_groups import Members

    torch.cuda.set_device(rank)
    return NcclTransport(hub.transport(rank), Members("edges", rank, 2), meeting, device_of(rank), edges_of((0, 1), [(0, 1)]))


@pytest.fixture
def on_ranks(backend: str) -> Iterator[Callable[[Body], list[Any]]]:
    """Calls a function with the rank and its transport on two threads, and closes the transports once both have returned."""
    from torch.distributed import HashStore

    from adaptra.runtime.transports.local import LocalHub

    def call(body: Body) -> list[Any]:
        hub, meeting, all_returned = LocalHub(2), HashStore(), threading.Barrier(2)

        def one(rank: int) -> Any:
            transport = join(rank, hub, meeting)
            try:
                found = body(rank, transport)
                all_returned.wait(SOON)
                return found
            finally:
                transport.close()

        with ThreadPoolExecutor(2) as pool:
            return [future.result(2 * SOON) for future in [pool.submit(one, rank) for rank in (0, 1)]]

    yield call


def reports(machine: Machine) -> list[str]:
    return [*map(str, machine.detector.reports)]


def made_on(rank: int, identity: Any) -> list[Any]:
    from transport_bodies import make

    return [tensor.to(device_of(rank)) for tensor in make(identity)]


def are(got: Any, identity: Any) -> bool:
    from transport_bodies import make, same

    return same([tensor.cpu() for tensor in got], [tensor.cpu() for tensor in make(identity)])


def test_messages_of_all_dtypes_go_both_ways(on_ranks: Callable[[Body], list[Any]], machine: Machine, backend: str) -> None:
    import os

    from fake_cuda.nccl_backends import Older
    from transport_bodies import LARGE, SPECS, backward, forward

    def body(rank: int, transport: NcclTransport) -> int:
        before = sum(count for what, count in machine.syncs.items() if "communicator" in what)
        mine, theirs = (forward, backward) if rank == 0 else (backward, forward)
        for specs in (SPECS, LARGE):
            transport.reserve({(1 - rank, specs): 3})
            for step in range(3):
                receives = [transport.receive(1 - rank, theirs(k, specs=specs, step=step)) for k in range(3)]
                for k in range(3):
                    # The tensors die at once: their memory may be used again only after they are packed.
                    transport.send(1 - rank, mine(k, specs=specs, step=step), made_on(rank, mine(k, specs=specs)))
                for k, pending in enumerate(receives):
                    got = pending.wait(SOON)
                    assert all(tensor.device == device_of(rank) for tensor in got)
                    assert are(got, theirs(k, specs=specs)) and pending.sent_at <= pending.arrived_at + 0.01
                    transport.release(pending)
        return before

    on_ranks(body)
    assert not reports(machine)
    # One for each directed edge on each rank, none made by a message, each of one block, left alone by the watchdog.
    assert sum(count for what, count in machine.syncs.items() if "communicator" in what) == 4
    assert [environment for _, environment in Older.made] == [("0", "0")] * 4
    assert {(options.config.min_ctas, options.config.max_ctas) for options, _ in Older.made} == {(1, 1)}
    assert "TORCH_NCCL_ENABLE_MONITORING" not in os.environ
    assert {options.config.blocking for options, _ in Older.made} == {0 if backend == "older" else None}


def test_what_is_rounded_arrives_rounded(on_ranks: Callable[[Body], list[Any]], machine: Machine) -> None:
    import torch
    from transport_bodies import forward

    from adaptra.graph.ops.specs import TensorSpec

    specs = (TensorSpec((300,), torch.float32, lossy_bf16=True), TensorSpec((7,), torch.float32))
    sent = [torch.linspace(-3, 7, spec.elements) for spec in specs]

    def body(rank: int, transport: NcclTransport) -> list[Any]:
        identity = forward(0, specs=specs)
        if rank == 0:
            transport.send(1, identity, [tensor.to(device_of(0)) for tensor in sent]).wait(SOON)
            return []
        transport.reserve({(0, specs): 1})
        pending = transport.receive(0, identity)
        return [tensor.cpu() for tensor in pending.wait(SOON)]

    _, (rounded, whole) = on_ranks(body)
    assert torch.equal(rounded, sent[0].to(torch.bfloat16).float().cpu()) and torch.equal(whole, sent[1].cpu())
    assert not reports(machine)


def test_a_message_waits_for_its_tensors_and_nothing_waits_for_it(
    on_ranks: Callable[[Body], list[Any]], machine: Machine
) -> None:
    """While one edge waits for what the device has to compute, the host goes on and the other edge carries messages."""
    from transport_bodies import SMALL, backward, forward

    released: list[float] = []
    arrived = threading.Event()

    def body(rank: int, transport: NcclTransport) -> float:
        transport.reserve({(1 - rank, SMALL): 1})
        if rank == 0:
            pending = transport.receive(1, backward(0))
            tensors = made_on(0, forward(0))
            gate = machine.hold()
            tensors = [tensor * 1 for tensor in tensors]
            sent = transport.send(1, forward(0), tensors)
            assert not sent.done
            assert pending.wait(SOON) and not sent.done
            arrived.set()
            time.sleep(0.1)
            released.append(time.monotonic())
            gate.release()
            sent.wait(SOON)
            return 0.0
        transport.send(0, backward(0), made_on(1, backward(0)))
        pending = transport.receive(0, forward(0))
        assert arrived.wait(SOON)
        assert are(pending.wait(SOON), forward(0))
        return pending.sent_at

    _, sent_at = on_ranks(body)
    assert sent_at >= released[0], "it was sent when the device had computed it"
    assert not reports(machine)


def test_memory_is_used_again_behind_its_last_reader(on_ranks: Callable[[Body], list[Any]], machine: Machine) -> None:
    import torch
    from transport_bodies import LARGE, forward

    def body(rank: int, transport: NcclTransport) -> list[float]:
        if rank == 0:
            for k in range(4):
                transport.send(1, forward(k, specs=LARGE), [torch.full((5000,), float(k), device=device_of(0))])
            return []
        transport.reserve({(0, LARGE): 1})
        sums: list[Any] = []
        for k in range(4):
            pending = transport.receive(0, forward(k, specs=LARGE))
            (got,) = pending.wait(SOON)
            gate = machine.hold()
            sums.append(got.mean())
            transport.release(pending)
            threading.Timer(0.05, gate.release).start()
        return [float(one.item()) for one in sums]

    assert on_ranks(body)[1] == [0.0, 1.0, 2.0, 3.0]
    assert not reports(machine)


def test_another_message_than_expected_is_refused(on_ranks: Callable[[Body], list[Any]]) -> None:
    from transport_bodies import SMALL, forward

    from adaptra.errors import TransportError

    def body(rank: int, transport: NcclTransport) -> str:
        if rank == 0:
            transport.send(1, forward(1), made_on(0, forward(1))).wait(SOON)
            return ""
        transport.reserve({(0, SMALL): 1})
        with pytest.raises(TransportError) as caught:
            transport.receive(0, forward(0)).wait(SOON)
        return str(caught.value)

    assert "receive of 0SEND_F0 of step 0 on edge 0→1" in (text := on_ranks(body)[1]) and "got 0SEND_F1 of step 0" in text


def test_an_abort_ends_what_is_under_way_without_its_bytes(on_ranks: Callable[[Body], list[Any]], machine: Machine) -> None:
    """On both ranks, with the reason that each of them was given, and in little time."""
    from transport_bodies import SMALL, forward

    has_posted = threading.Event()

    def body(rank: int, transport: NcclTransport) -> tuple[str, float]:
        transport.reserve({(1 - rank, SMALL): 1})
        tensors = made_on(rank, forward(0))
        if rank == 0:
            assert has_posted.wait(SOON)
            machine.hold_for(0.5)
            pending = transport.send(1, forward(0), [tensor * 2 for tensor in tensors])
        else:
            pending = transport.receive(0, forward(0))
            has_posted.set()
        time.sleep(0.1)
        began = time.monotonic()
        transport.abort(RuntimeError(f"reason {rank}"))
        with pytest.raises(RuntimeError) as caught:
            pending.wait(SOON)
        with pytest.raises(RuntimeError, match=f"reason {rank}"):
            transport.send(1 - rank, forward(1), tensors)
        transport.close()
        return str(caught.value), time.monotonic() - began

    found = on_ranks(body)
    assert [text for text, _ in found] == ["reason 0", "reason 1"] and max(seconds for _, seconds in found) < 4
    assert not reports(machine)
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("adaptra")]


def test_what_nccl_ends_without_success_is_no_message(on_ranks: Callable[[Body], list[Any]], machine: Machine) -> None:
    """Its bytes stay where they are, and the error names the rank at the other end."""
    from transport_bodies import SMALL, forward

    from adaptra.errors import PeerLostError

    def body(rank: int, transport: NcclTransport) -> str:
        if rank == 0:
            return ""
        transport.reserve({(0, SMALL): 1})
        pending = transport.receive(0, forward(0))
        time.sleep(0.1)
        for communicator in transport._rank_edges._made.values():
            communicator.abort()
        with pytest.raises(PeerLostError) as caught:
            pending.wait(SOON)
        assert (caught.value.rank, caught.value.edge, caught.value.op) == (0, (0, 1), "0SEND_F0")
        return str(caught.value)

    expected = "rank 0 is lost: edge 0→1 failed at 0SEND_F0 of step 0: NCCL communicator was aborted"
    assert on_ranks(body) == ["", expected]
    assert not reports(machine)


def test_a_later_attempt_has_communicators_of_its_own(on_ranks: Callable[[Body], list[Any]], machine: Machine) -> None:
    """What was sent in an earlier one, and would fit a receive of this one, never arrives. One rank begins before the other."""
    from transport_bodies import LARGE, SMALL, backward, forward

    from adaptra.errors import TransportError
    from adaptra.runtime.world.world import Attempt

    has_begun = threading.Event()

    def body(rank: int, transport: NcclTransport) -> Any:
        transport.reserve({(1 - rank, SMALL): 2, (1 - rank, LARGE): 1})
        if rank == 0:
            late = transport.send(1, forward(0), made_on(0, forward(3)))
            larger = transport.send(1, forward(1, specs=LARGE), made_on(0, forward(1, specs=LARGE)))
            held = transport.receive(1, backward(0))
            time.sleep(0.05)
            transport.begin(Attempt(0, 1))
            has_begun.set()
            for pending in (late, larger, held):
                with pytest.raises(TransportError, match="attempt 0 of epoch 0 has ended"):
                    pending.wait(0)
            transport.send(1, forward(0), made_on(0, forward(0)))
            assert are(transport.receive(1, backward(0)).wait(SOON), backward(0))
        else:
            assert has_begun.wait(SOON)
            time.sleep(0.1)
            transport.begin(Attempt(0, 1))
            pending = transport.receive(0, forward(0))
            transport.send(0, backward(0), made_on(1, backward(0)))
            assert are(pending.wait(SOON), forward(0))
        with pytest.raises(TransportError, match="expected a later one"):
            transport.begin(Attempt(0, 1))
        return transport.attempt, transport.dropped

    assert on_ranks(body) == [(Attempt(0, 1), 0)] * 2


def test_it_carries_activations_and_gradients_between_neighbours_only(on_ranks: Callable[[Body], list[Any]]) -> None:
    from transport_bodies import SMALL, backward, bulk, forward

    from adaptra.runtime.transports.base import Identity, Purpose

    def body(rank: int, transport: NcclTransport) -> list[bool]:
        losses = Identity(0, Purpose.LOSS, 1, 0, 0, SMALL)
        asked = [(forward(0), 0, 1), (backward(0), 1, 0), (backward(0, 0, 1), 0, 1), (bulk(0), 0, 1), (losses, 1, 0)]
        return [transport.carries(*one) for one in asked]

    assert on_ranks(body) == [[True, True, False, False, False]] * 2


def test_a_rank_that_does_not_come_keeps_nobody_after_an_abort(backend: str, machine: Machine) -> None:
    """A wait for the other rank ends, although no operation of NCCL is under way that an abort could end."""
    from torch.distributed import HashStore

    from adaptra.runtime.transports.local import LocalHub

    joined = ThreadPoolExecutor(1).submit(join, 0, LocalHub(2), HashStore())
    connecting: list[threading.Thread] = []
    until = time.monotonic() + SOON
    while not connecting and time.monotonic() < until:
        time.sleep(0.05)
        connecting = [thread for thread in threading.enumerate() if thread.name == "adaptra rank 0 connects"]
    time.sleep(0.2)  # in which it comes to wait for rank 1
    assert not joined.done()
    communicators = connecting[0]._target.__self__  # type: ignore[attr-defined]
    communicators.end(RuntimeError("rank 1 is lost"), is_idle=False)
    with pytest.raises(RuntimeError, match="the transport has ended"):
        joined.result(SOON)


def test_a_slow_edge_moves_while_its_messages_are_under_way(on_ranks: Callable[[Body], list[Any]], machine: Machine) -> None:
    """One message of the step before is still to be computed when the edge moves, and the other edge stays where it is."""
    from transport_bodies import SMALL, backward, forward

    from adaptra.passes.insert_comm import InsertComm
    from adaptra.passes.lower_comm import LowerComm
    from adaptra.program.schedules import gpipe
    from adaptra.runtime.transports.base import Identity, Purpose
    from adaptra.runtime.transports.lanes import LanedTransport
    from adaptra.simulation.cost import CostModel

    cost = CostModel.uniform(2, 0.01, 0.01, 0.01)
    program = InsertComm().apply(gpipe(2, 2), cost)
    has_moved = threading.Event()

    def body(rank: int, transport: NcclTransport) -> list[str]:
        carriers: list[str] = []
        beside: Any = transport._beside
        laned = LanedTransport(transport, {"delegate": beside}, rest="delegate")
        for name, one in (("nccl", transport), ("beside", beside)):
            exchange = one.send

            def recorded(
                to: int, identity: Identity, tensors: Any, *, posted_at: Any, name: str = name, exchange: Any = exchange
            ) -> Any:
                carriers.append(f"{identity.op} of step {identity.step}: {name}")
                return exchange(to, identity, tensors, posted_at=posted_at)

            one.send = recorded  # type: ignore[method-assign]
        laned.use_lanes(0, program)
        laned.use_lanes(3, LowerComm(slow=((0, 1),)).apply(program, cost))
        laned.use_lanes(5, program)
        laned.reserve({(1 - rank, SMALL): 3})
        if rank == 0:
            first, second, third = (made_on(0, forward(k)) for k in range(3))
            gate = machine.hold()
            held = laned.send(1, forward(0, step=2), [tensor * 1 for tensor in first])
            laned.send(1, forward(0, step=3), second)
            assert has_moved.wait(SOON) and not held.done
            gate.release()
            held.wait(SOON)
            laned.send(1, forward(0, step=5), third).wait(SOON)
            laned.send(1, Identity(2, Purpose.LOSS, 0, 1, 0, SMALL), first)
            assert are(laned.receive(1, backward(0, step=3)).wait(SOON), backward(0))
            return carriers
        earlier = laned.receive(0, forward(0, step=2))
        moved = laned.receive(0, forward(0, step=3))
        got = moved.wait(SOON)  # it lies on the device whose stream is held
        assert not earlier.done
        has_moved.set()
        assert are(earlier.wait(SOON), forward(0)) and are(got, forward(1))
        assert are(laned.receive(0, forward(0, step=5)).wait(SOON), forward(2))
        laned.send(0, backward(0, step=3), made_on(1, backward(0)))
        return carriers

    assert on_ranks(body) == [
        [
            "0SEND_F0 of step 2: nccl",
            "0SEND_F0 of step 3: beside",
            "0SEND_F0 of step 5: nccl",
            "losses of step 2: beside",
        ],
        ["1SEND_B0 of step 3: nccl"],
    ]
