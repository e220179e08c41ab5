"""What must hold on every transport: each body runs on all ranks of one, as threads or as processes."""

import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from adaptra.errors import PeerLostError, TransportError
from adaptra.graph.ops.specs import TensorSpec
from adaptra.runtime.measuring.monitor import Monitor
from adaptra.runtime.step_messages.probes import Probes
from adaptra.runtime.transports.base import Identity, Purpose, Transport
from adaptra.runtime.transports.registry import create_transport

SPECS = (
    TensorSpec((2, 3), torch.float32),
    TensorSpec((5,), torch.int64),
    TensorSpec((), torch.bool),
    TensorSpec((0, 4), torch.float64),
    TensorSpec((3, 3), torch.bfloat16),
)
SMALL = (TensorSpec((4,), torch.float32),)
LARGE = (TensorSpec((5000,), torch.float32),)


def forward(
    microbatch: int, source: int = 0, destination: int = 1, specs: tuple[TensorSpec, ...] = SMALL, step: int = 0
) -> Identity:
    return Identity(step, Purpose.ACTIVATION, source, destination, microbatch, specs)


def backward(
    microbatch: int, source: int = 1, destination: int = 0, specs: tuple[TensorSpec, ...] = SMALL, step: int = 0
) -> Identity:
    return Identity(step, Purpose.GRADIENT, source, destination, microbatch, specs)


BULK = (Purpose.INPUT, Purpose.TARGET, Purpose.RESULT, Purpose.ACCUMULATOR, Purpose.SUM)


def bulk(
    microbatch: int, source: int = 0, destination: int = 1, specs: tuple[TensorSpec, ...] = LARGE, step: int = 0
) -> Identity:
    return Identity(step, BULK[microbatch % len(BULK)], source, destination, microbatch, specs)


def make(identity: Identity) -> tuple[Tensor, ...]:
    """Tensors that no other microbatch has."""
    generator = torch.Generator().manual_seed(identity.microbatch)
    return tuple(
        torch.randint(0, 2 if spec.dtype == torch.bool else 100, spec.shape, generator=generator).to(spec.dtype)
        for spec in identity.specs
    )


def same(got: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    return len(got) == len(expected) and all(
        a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b) for a, b in zip(got, expected, strict=True)
    )


def term(number: int, sender: int, specs: tuple[TensorSpec, ...] = LARGE) -> Identity:
    return Identity(1, Purpose.TERM, 2, 2, number, specs, sender, span=(sender, sender + 1))


def brings_parts_of_sums_to_where_they_belong(transport: Transport) -> None:
    """More at a time than there are slots, large and small, both ways, beside bulk messages of the same layout.

    Each comes once, to the memory that its receiver gave for it.
    """
    if transport.rank > 1:
        return
    rank, peer = transport.rank, 1 - transport.rank
    host = tuple(TensorSpec(spec.shape, spec.dtype, stays_on_host=True) for spec in LARGE)
    layouts = [
        host,
        (TensorSpec((3,), torch.float64, stays_on_host=True),),
        (TensorSpec((8193,), torch.uint8, stays_on_host=True),),
    ]
    transport.reserve({(peer, LARGE): 2})
    for repeated in range(2):
        theirs = [term(9 * repeated + number, peer, layouts[number % 3]) for number in range(9)]
        places = [torch.zeros(one.specs[0].shape, dtype=one.specs[0].dtype) for one in theirs]
        receives = [transport.receive(peer, one, place) for one, place in zip(theirs, places, strict=True)]
        others = [transport.receive(peer, bulk(number, peer, rank)) for number in range(2)]
        mine = [term(9 * repeated + number, rank, layouts[number % 3]) for number in range(9)]
        sends = [transport.send(peer, one, make(one)) for one in mine]
        sends += [transport.send(peer, one, make(one)) for one in (bulk(number, rank, peer) for number in range(2))]
        for other, pending in enumerate(others):
            assert same(pending.wait(100), make(bulk(other)))
            transport.release(pending)
        for one, place, pending in zip(theirs, places, receives, strict=True):
            assert same(pending.wait(100), [place]) and same([place], make(one))
        for send in sends:
            send.wait(100)


def carries_every_dtype(transport: Transport) -> None:
    """Values, shapes and dtypes arrive as they were sent, at an address that kernels like."""
    identity = forward(0, specs=SPECS, step=-3)
    if transport.rank == 0:
        transport.send(1, identity, make(identity)).wait(100)
    elif transport.rank == 1:
        transport.reserve({(0, SPECS): 1})
        pending = transport.receive(0, identity)
        got = pending.wait(100)
        assert same(got, make(identity))
        assert all(tensor.data_ptr() % 16 == 0 for tensor in got)
        assert not any(tensor.requires_grad for tensor in got)
        transport.release(pending)


def rounds_what_is_lossy(transport: Transport) -> None:
    """A tensor whose spec says so arrives as torch's rounding to bfloat16 leaves it, of its own dtype; others as they are."""
    identity = forward(0, specs=(TensorSpec((4, 700), torch.float32, lossy_bf16=True), TensorSpec((2,), torch.float32)))
    tensors = tuple(torch.randn(spec.shape, generator=torch.Generator().manual_seed(1)) for spec in identity.specs)
    if transport.rank == 0:
        transport.send(1, identity, tensors).wait(100)
    elif transport.rank == 1:
        transport.reserve({(0, identity.specs): 1})
        got = transport.receive(0, identity).wait(100)
        expected = (tensors[0].to(torch.bfloat16).to(torch.float32), tensors[1])
        assert same(got, expected) and not torch.equal(got[0], tensors[0])


def refuses_what_is_rounded_elsewhere(transport: Transport) -> None:
    """Both sides must agree on whether a message is rounded."""
    specs = (TensorSpec((4,), torch.float32, lossy_bf16=True),)
    if transport.rank == 0:
        transport.send(1, forward(2, specs=specs), make(forward(2)))
        transport.store.wait(["refused"])
    elif transport.rank == 1:
        transport.reserve({(0, SMALL): 1})
        with pytest.raises(TransportError, match=r"with float32\[4\]: got .*float32→bfloat16\[4\]"):
            transport.receive(0, forward(2)).wait(100)
        transport.store.set("refused", "")


def sends_what_requires_grad(transport: Transport) -> None:
    """A tensor with a graph arrives without it, and a strided one with its values."""
    identity = forward(0, specs=(TensorSpec((3, 2), torch.float32, requires_grad=True),))
    tensor = torch.arange(6.0).reshape(2, 3).requires_grad_().t()
    if transport.rank == 0:
        transport.send(1, identity, (tensor,)).wait(100)
    elif transport.rank == 1:
        transport.reserve({(0, identity.specs): 1})
        (got,) = transport.receive(0, identity).wait(100)
        assert got.is_leaf and not got.requires_grad and torch.equal(got, tensor)


def many_in_flight_both_ways(transport: Transport) -> None:
    """Sends never wait, receives may all be posted ahead, buffers are used again, and the directions don't mix."""
    count, rounds = 8, 3
    if transport.rank > 1:
        return
    peer = 1 - transport.rank
    transport.reserve({(peer, SMALL): count})
    mine, theirs = (forward, backward) if transport.rank == 0 else (backward, forward)
    for step in range(rounds):
        receives = [transport.receive(peer, theirs(k, step=step)) for k in range(count)]
        sends = [transport.send(peer, mine(k, step=step), make(mine(k))) for k in range(count)]
        for k, pending in enumerate(receives):
            assert same(pending.wait(100), make(theirs(k)))
            assert pending.done
            transport.release(pending)
        for pending in sends:
            assert pending.wait(100) == ()


def backward_overtakes_forward(transport: Transport) -> None:
    """A forward message that nobody receives yet holds up no backward message of the same pair, nor the other way round."""
    if transport.rank == 0:
        transport.reserve({(1, SMALL): 1})
        stuck = transport.send(1, forward(0), make(forward(0)))
        assert same(transport.receive(1, backward(0)).wait(100), make(backward(0)))
        transport.send(1, forward(1, specs=LARGE), make(forward(1, specs=LARGE)))
        stuck.wait(100)
    elif transport.rank == 1:
        transport.reserve({(0, SMALL): 1, (0, LARGE): 1})
        transport.send(0, backward(0), make(backward(0))).wait(100)
        assert same(transport.receive(0, forward(0)).wait(100), make(forward(0)))
        transport.receive(0, forward(1, specs=LARGE)).wait(100)


def classes_never_queue_behind_each_other(transport: Transport) -> None:
    """A message of any class that nobody receives yet holds up none of the other classes; each class keeps its order."""
    if transport.rank == 0:
        transport.reserve({(1, SMALL): 2})
        stuck = [transport.send(1, bulk(k), make(bulk(k))) for k in range(5)]
        stuck.append(transport.send(1, forward(0), make(forward(0))))
        stuck.append(transport.send(1, backward(0, 0, 1), make(backward(0, 0, 1))))
        for theirs in (backward(0), bulk(5, 1, 0, SMALL)):
            assert same(transport.receive(1, theirs).wait(100), make(theirs))
        for pending in stuck:
            pending.wait(100)
    elif transport.rank == 1:
        transport.reserve({(0, SMALL): 2, (0, LARGE): 5})
        for mine in (backward(0), bulk(5, 1, 0, SMALL)):
            transport.send(0, mine, make(mine)).wait(100)
        for theirs in (backward(0, 0, 1), forward(0), *map(bulk, range(5))):
            assert same(transport.receive(0, theirs).wait(100), make(theirs))


def refuses_other_shapes(transport: Transport) -> None:
    """A message of other shapes than expected, even a larger one, is an error that names edge, expectation and arrival."""
    if transport.rank == 0:
        transport.send(1, forward(2, specs=LARGE), make(forward(2, specs=LARGE)))
        transport.store.wait(["refused"])
    elif transport.rank == 1:
        transport.reserve({(0, SMALL): 1})
        with pytest.raises(TransportError, match=r"0SEND_F2 of step 0 on edge 0→1 with float32\[4\]: got .*float32\[5000\]"):
            transport.receive(0, forward(2)).wait(100)
        transport.store.set("refused", "")


def refuses_another_message(transport: Transport) -> None:
    """Where messages are matched by order, one out of order is an error and never another message's data."""
    if transport.rank == 0:
        transport.send(1, forward(1), make(forward(1)))
        transport.store.wait(["refused"])
    elif transport.rank == 1:
        transport.reserve({(0, SMALL): 1})
        with pytest.raises(TransportError, match=r"receive of 0SEND_F0 of step 0 on edge 0→1.*got 0SEND_F1 of step 0"):
            transport.receive(0, forward(0)).wait(100)
        transport.store.set("refused", "")


def refuses_another_bulk_message(transport: Transport) -> None:
    """The third class is matched by its order, too."""
    if transport.rank == 0:
        transport.send(1, bulk(4), make(bulk(4)))
        transport.store.wait(["refused"])
    elif transport.rank == 1:
        transport.reserve({(0, LARGE): 1})
        with pytest.raises(TransportError, match=r"receive of 0SEND_W3 of step 0 on edge 0→1.*got 0SEND_SUM4 of step 0"):
            transport.receive(0, bulk(3)).wait(100)
        transport.store.set("refused", "")


def refuses_another_part_of_a_sum(transport: Transport) -> None:
    """Parts of sums are matched by what is in them, too."""
    sent, expected = term(4, 0), replace(term(4, 0), span=(0, 2))
    if transport.rank == 0:
        transport.send(1, sent, make(sent))
        transport.store.wait(["refused"])
    elif transport.rank == 1:
        place = torch.zeros(5000)
        text = (
            "receive of part 4 with the terms of replicas 0 to 1 .*got part 4 with the terms of replicas 0 to 0 from replica 0"
        )
        with pytest.raises(TransportError, match=text):
            transport.receive(0, expected, place).wait(100)
        transport.store.set("refused", "")


def times_messages_when_they_arrive(transport: Transport) -> None:
    """Posting and arrival times are those of the message, not of the rank that gets round to waiting."""
    if transport.rank == 0:
        transport.store.wait(["posted"])
        before = time.monotonic()
        for k in range(2):
            transport.send(1, forward(k), make(forward(k))).wait(100)
        transport.store.set("sent", repr(before))
        transport.store.wait(["checked"])
    elif transport.rank == 1:
        transport.reserve({(0, SMALL): 2})
        first, second = (transport.receive(0, forward(k)) for k in range(2))
        transport.store.set("posted", "")
        second.wait(100)
        asked = time.monotonic()
        first.wait(100)
        assert first.arrived_at <= second.arrived_at <= asked
        # Both ranks are on one host here, so their clocks are one; what remains is the estimate's uncertainty.
        assert float(transport.store.get("sent")) - 0.02 <= first.sent_at <= first.arrived_at + 0.02
        transport.store.set("checked", "")


def tells_how_long_a_send_waited_for_its_receive(transport: Transport) -> None:
    """What waits for its receiver is not under way yet: a late receive must not look like a slow link."""
    if transport.rank == 0:
        sent = transport.send(1, forward(0), make(forward(0)))
        transport.store.set("under way", "")
        sent.wait(100)
    elif transport.rank == 1:
        transport.reserve({(0, SMALL): 1})
        transport.store.wait(["under way"])
        asked = time.monotonic()
        late = transport.receive(0, forward(0))
        late.wait(100)
        if transport.contract.send_waits_for_receiver and not transport.contract.in_order:
            assert asked <= late.departed_at <= late.arrived_at
        else:
            assert late.departed_at == late.sent_at


def counts_no_wait_of_a_probe_for_its_receiver(transport: Transport) -> None:
    """A rank that begins its step late must not make an idle edge look slow."""
    if transport.rank > 1:
        return
    monitor = Monitor(transport.rank, (0, 1))
    probes = Probes(transport.rank, (0, 1), transport, monitor, {})
    transport.reserve(probes.receive_counts())
    if transport.rank == 1:
        transport.store.wait(["probe sent"])
        time.sleep(0.2)
    asked = time.monotonic()
    probes.begin_step(0, ())
    if transport.rank == 0:
        transport.store.set("probe sent", "")
    probes.end_step(100)
    found = monitor.end_step(0, asked, time.monotonic()).edges
    assert len(found) == len(probes.receive_counts())
    if transport.rank == 1:
        # Both ranks are on one host here, so their clocks are one; what remains is the estimate's uncertainty.
        most = time.monotonic() - asked if transport.contract.send_waits_for_receiver else 0.2
        assert all(edge.estimate.flight <= most + 0.02 for edge in found)


def pool_is_bounded(transport: Transport) -> None:
    """A receive beyond the reservation is refused, one after a release is not."""
    if transport.rank == 0:
        for k in range(2):
            transport.send(1, forward(k), make(forward(k)))
        transport.store.wait(["bounded"])
    elif transport.rank == 1:
        with pytest.raises(AssertionError, match=r"all 0 buffers reserved for float32\[4\]"):
            transport.receive(0, forward(0))
        transport.reserve({(0, SMALL): 1})
        pending = transport.receive(0, forward(0))
        with pytest.raises(AssertionError, match=r"receive of 0SEND_F1 .* from rank 0: all 1 buffers"):
            transport.receive(0, forward(1))
        pending.wait(100)
        transport.release(pending)
        transport.receive(0, forward(1)).wait(100)
        transport.store.set("bounded", "")


def loses_a_rate_probe_alone(transport: Transport) -> None:
    """A rank that is done with the job may close its transport before the other end sends what it has asked for."""
    probe, later = replace(bulk(0), purpose=Purpose.RATE_PROBE), forward(1, 0, 2)
    if transport.rank == 0:
        transport.send(1, bulk(3), make(bulk(3))).wait(100)  # connected
        transport.store.wait(["closes"])
        time.sleep(0.5)
        with suppress(PeerLostError):
            transport.send(1, probe, make(probe)).wait(100)
        if transport.world_size > 2:
            transport.send(2, later, make(later)).wait(100)
        else:
            transport.reserve({(1, LARGE): 1})
            transport.receive(1, bulk(0, 1, 0))  # it is refused where the transport has ended
    elif transport.rank == 1:
        transport.reserve({(0, LARGE): 1})
        transport.receive(0, bulk(3)).wait(100)
        transport.store.set("closes", "")
        transport.close()
    else:
        transport.reserve({(0, SMALL): 1})
        assert same(transport.receive(0, later).wait(100), make(later))


def abort_ends_every_wait(transport: Transport) -> None:
    """An abort ends a wait that is under way, once, and everything after it raises the same error."""
    if transport.rank != 1:
        transport.store.wait(["aborted"])
        return
    transport.reserve({(0, SMALL): 2})
    pending = transport.receive(0, forward(0))
    assert transport.waiting_for(0) == forward(0)
    with pytest.raises(TransportError, match=r"0SEND_F0 .*not exchanged within 0.01 s"):
        pending.wait(0.01)
    caught = []

    def wait() -> None:
        try:
            pending.wait(100)
        except RuntimeError as error:
            caught.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    reason = RuntimeError("the reason")
    transport.abort(reason)
    transport.abort(RuntimeError("a later reason"))
    waiter.join(100)
    assert caught == [reason]
    for operation in (
        lambda: transport.receive(0, forward(1)),
        lambda: transport.send(0, backward(0), make(backward(0))),
    ):
        with pytest.raises(RuntimeError, match="the reason"):
            operation()
    transport.store.set("aborted", "")


def refuses_misuse(transport: Transport) -> None:
    """Tensors that don't fit their identity, ranks that don't exist and a closed transport are told apart."""
    if transport.rank != 0:
        return
    with pytest.raises(TransportError, match=r"send of 0SEND_F0 .*float32\[4\]: got float32\[5\]"):
        transport.send(1, forward(0), (torch.zeros(5),))
    for rank in (0, -1, transport.world_size):
        with pytest.raises(TransportError, match=rf"rank {rank}: .*expected another rank of 0\.\."):
            transport.send(rank, forward(0), make(forward(0)))
    transport.close()
    with pytest.raises(TransportError, match="the transport of rank 0 is closed"):
        transport.send(1, forward(0), make(forward(0)))
    transport.close()


def stands_by_for_whatever_comes_next(transport: Transport) -> None:
    """Once a step's messages have come, the next ones travel before they are asked for, one of another shape among them."""
    announced = [forward(0, step=-1), forward(1, specs=LARGE, step=1), forward(2, specs=LARGE, step=1)]
    if transport.rank == 0:
        transport.send(1, forward(0, specs=LARGE), make(forward(0, specs=LARGE))).wait(100)
        transport.store.wait(["standing"])
        for pending in [transport.send(1, identity, make(identity)) for identity in announced]:
            if transport.contract.send_waits_for_receiver:
                pending.wait(100)
        transport.store.set("travelled", "")
        transport.send(1, forward(3, specs=LARGE, step=1), make(forward(3, specs=LARGE))).wait(100)
    elif transport.rank == 1:
        transport.reserve({(0, LARGE): 2, (0, SMALL): 1})
        held = transport.receive(0, forward(0, specs=LARGE))
        held.wait(100)
        transport.stand_by(0, forward(0, specs=LARGE), 3)
        transport.release(held)
        transport.store.set("standing", "")
        transport.store.wait(["travelled"])
        for identity in (*announced, forward(3, specs=LARGE, step=1)):
            pending = transport.receive(0, identity)
            assert same(pending.wait(100), make(identity))
            transport.release(pending)


def drops_what_is_late(transport: Transport, dropped: int = 5) -> None:
    """A message of an earlier attempt that would fit a receive of this one is dropped where it arrives, and counted."""
    if transport.rank > 1:
        return
    other = (TensorSpec((7000,), torch.float32),)
    late = [forward(0), forward(1, specs=other), forward(2, specs=LARGE), forward(3, specs=LARGE), forward(4)]
    again = [forward(0), forward(2, specs=LARGE), forward(4), forward(3, specs=LARGE), bulk(0), bulk(1, specs=SMALL)]
    first = transport.attempt
    second = first._replace(number=first.number + 1)
    if transport.rank == 0:
        early = [transport.send(1, one, make(one)) for one in late]
        transport.store.set("sent", "")
        transport.store.wait(["waits"])
        transport.begin(second)
        for one in again:
            transport.send(1, one, [-tensor for tensor in make(one)])
        transport.reserve({(1, SMALL): 1})
        assert same(transport.receive(1, backward(0)).wait(100), make(backward(0)))
        assert all(pending.done for pending in early)
    else:
        transport.reserve({(0, SMALL): 3, (0, LARGE): 3})
        dead = [transport.receive(0, bulk(0)), transport.receive(0, bulk(1, specs=SMALL))]
        transport.store.wait(["sent"])
        transport.begin(second)
        for pending in dead:
            with pytest.raises(TransportError, match="attempt 0 of epoch 0 has ended, attempt 1 of epoch 0 has begun"):
                pending.wait(100)
        receives = [transport.receive(0, one) for one in again]
        ahead = transport.send(0, backward(0), make(backward(0)))  # rank 0 is still in the first attempt
        transport.store.set("waits", "")
        for one, pending in zip(again, receives, strict=True):
            assert same(pending.wait(100), [-tensor for tensor in make(one)])
            transport.release(pending)
        assert transport.dropped == dropped
        ahead.wait(100)
    assert transport.attempt == second
    with pytest.raises(TransportError, match="expected a later one than attempt 1 of epoch 0"):
        transport.begin(first)


ALL = (
    drops_what_is_late,
    stands_by_for_whatever_comes_next,
    carries_every_dtype,
    brings_parts_of_sums_to_where_they_belong,
    rounds_what_is_lossy,
    refuses_what_is_rounded_elsewhere,
    sends_what_requires_grad,
    many_in_flight_both_ways,
    backward_overtakes_forward,
    classes_never_queue_behind_each_other,
    refuses_other_shapes,
    times_messages_when_they_arrive,
    tells_how_long_a_send_waited_for_its_receive,
    counts_no_wait_of_a_probe_for_its_receiver,
    pool_is_bounded,
    loses_a_rate_probe_alone,
    abort_ends_every_wait,
    refuses_misuse,
)
IN_ORDER = (refuses_another_message, refuses_another_bulk_message, refuses_another_part_of_a_sum)
MATRIX = (*ALL, *IN_ORDER)


def run_matrix(rank: int, name: str, bodies: Sequence[Callable[[Transport], None]] = MATRIX, **options: Any) -> dict[str, str]:
    """Every body on a transport of its own, made with these options; what went wrong, by the name of the body."""
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")
    failures: dict[str, str] = {}
    for body in bodies:
        transport = create_transport(name, **options)
        try:
            body(transport)
        except BaseException:
            failures[body.__name__] = traceback.format_exc()
        transport.close()
    torch.distributed.barrier()  # the store ends with rank 0, and others may still need it
    return failures
