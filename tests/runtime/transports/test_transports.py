"""Transports within one process, and what all of them share."""

import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import transport_bodies as bodies
from installed import install_transport
from transport_bodies import LARGE, SMALL, forward, make

from adaptra.errors import LaunchError, TransportError
from adaptra.graph.ops.specs import TensorSpec
from adaptra.runtime.injection.faulty_transport import FaultyTransport
from adaptra.runtime.transports.base import Identity, Purpose, Transport
from adaptra.runtime.transports.clock_offset import Offset, share
from adaptra.runtime.transports.local import LocalHub
from adaptra.runtime.transports.message_format import (
    HEADER_BYTES,
    INLINE_BYTES,
    VERSION,
    MessageBuffer,
    arrival,
    flat_bytes,
)
from adaptra.runtime.transports.registry import create_transport, transport_names
from adaptra.runtime.world.world import Attempt


@pytest.mark.parametrize("wrap", [lambda transport: transport, lambda transport: FaultyTransport(transport, ())])
@pytest.mark.parametrize("body", bodies.ALL, ids=lambda body: body.__name__)
def test_local(body: Callable[[Transport], None], wrap: Callable[[Transport], Transport]) -> None:
    hub = LocalHub(3)
    transports = [wrap(hub.transport(rank)) for rank in range(3)]
    with ThreadPoolExecutor(3) as pool:
        for done in [pool.submit(body, transport) for transport in transports]:
            done.result(100)
    for transport in transports:
        transport.close()
    assert not [thread.name for thread in threading.enumerate() if thread.name.endswith("faults")]


def test_local_matches_in_any_order() -> None:
    """A receive takes its own message, whatever was sent before."""
    hub = LocalHub(2)
    sender, receiver = hub.transport(0), hub.transport(1)
    receiver.reserve({(0, SMALL): 3})
    early = receiver.receive(0, forward(2))
    for k in range(3):
        sender.send(1, forward(k), make(forward(k)))
    for k in (1, 0):
        assert bodies.same(receiver.receive(0, forward(k)).wait(1), make(forward(k)))
    assert bodies.same(early.wait(1), make(forward(2)))


def test_local_refuses_the_same_message_twice() -> None:
    hub = LocalHub(2)
    sender, receiver = hub.transport(0), hub.transport(1)
    sender.send(1, forward(0), make(forward(0)))
    with pytest.raises(TransportError, match=r"0SEND_F0 .*was sent before"):
        sender.send(1, forward(0), make(forward(0)))
    receiver.reserve({(0, SMALL): 2})
    receiver.receive(0, forward(1))
    with pytest.raises(TransportError, match=r"0SEND_F1 .*was posted before"):
        receiver.receive(0, forward(1))


def test_local_hub_refuses_impossible_ranks() -> None:
    with pytest.raises(LaunchError, match="world_size=0"):
        LocalHub(0)
    with pytest.raises(LaunchError, match=r"rank 2: expected a rank of 0\.\.1"):
        LocalHub(2).transport(2)


def test_reservation_may_grow_and_shrink_while_buffers_are_held() -> None:
    hub = LocalHub(2)
    sender, receiver = hub.transport(0), hub.transport(1)
    receiver.reserve({(0, SMALL): 2})
    held = [receiver.receive(0, forward(k)) for k in range(2)]
    receiver.reserve({(0, SMALL): 3, (0, LARGE): 1})
    held.append(receiver.receive(0, forward(2)))
    receiver.reserve({(0, SMALL): 1})
    for k, pending in enumerate(held):
        sender.send(1, forward(k), make(forward(k)))
        pending.wait(1)
        receiver.release(pending)
    receiver.receive(0, forward(3))
    with pytest.raises(AssertionError, match="all 1 buffers"):
        receiver.receive(0, forward(4))


def test_whether_a_gradient_is_wanted_is_no_part_of_a_message() -> None:
    hub = LocalHub(2)
    sender, receiver = hub.transport(0), hub.transport(1)
    wanted = forward(0, specs=(TensorSpec((4,), torch.float32, requires_grad=True),))
    receiver.reserve({(0, SMALL): 1})
    pending = receiver.receive(0, wanted)
    sender.send(1, forward(0), make(forward(0)))
    assert bodies.same(pending.wait(1), make(forward(0)))


class TestWire:
    def buffer(self, identity: Identity | None = None) -> MessageBuffer:
        identity = identity or forward(1)
        buffer = MessageBuffer(identity.specs)
        buffer.fill(make(identity))
        buffer.seal(identity, Attempt(3, 5), 12.5)
        return buffer

    def test_a_packed_message_reads_back(self) -> None:
        identity = forward(7, specs=bodies.SPECS, step=-(2**40))
        buffer = self.buffer(identity)
        assert buffer.check(identity) == 12.5
        assert bodies.same(buffer.tensors(), make(identity))
        assert all(view.data_ptr() % 64 == 0 for view in buffer.tensors() if view.numel())

    def test_a_header_says_of_which_attempt_it_is_and_what_follows(self) -> None:
        buffer = self.buffer(forward(1, specs=LARGE))
        assert arrival(bytes(buffer.first.numpy())) == (Attempt(3, 5), flat_bytes(LARGE), buffer.tag)
        assert arrival(bytes(HEADER_BYTES)) is None

    def test_codes_of_purposes_stay(self) -> None:
        """Another code for a purpose is another version of the header."""
        names = "activation gradient output input_gradient loss shared_gradient shared_sum probe gradient_norm model_state"
        names += " input target result accumulator term buffers rank_gradients rank_sums rate_probe"
        names += " model_outputs sum slot stolen"
        assert [purpose.name for purpose in Purpose] == [name.upper() for name in names.split()]

    @pytest.mark.parametrize(
        "other",
        [
            forward(2),
            forward(1, step=1),
            forward(1, source=1, destination=2),
            forward(1, destination=2),
            forward(1, specs=LARGE),
            forward(1, specs=(TensorSpec((4,), torch.int32),)),
            Identity(0, bodies.backward(1).purpose, 0, 1, 1, SMALL),
        ],
    )
    def test_any_difference_is_refused_and_shown(self, other: Identity) -> None:
        with pytest.raises(TransportError, match=r"receive of 0SEND_F1 of step 0 on edge 0→1 with float32\[4\]: got "):
            sent, expected = self.buffer(other), MessageBuffer(SMALL)
            expected.first.copy_(sent.first)
            expected.check(forward(1))

    def test_small_messages_travel_in_one_part_and_the_first_part_has_one_size(self) -> None:
        small, large = (MessageBuffer((TensorSpec((size,), torch.uint8),)) for size in (INLINE_BYTES, INLINE_BYTES + 1))
        assert small.rest is None
        assert large.rest is not None
        assert small.first.numel() == large.first.numel() == HEADER_BYTES + INLINE_BYTES

    @pytest.mark.parametrize("position", [0, 4, 5])
    def test_bytes_that_are_no_message_are_refused(self, position: int) -> None:
        buffer = self.buffer()
        buffer.first[position] = 255
        with pytest.raises(TransportError, match=f"no message of version {VERSION}"):
            buffer.check(forward(1))


def test_clock_offsets_add_up_along_the_ranks() -> None:
    """Ranks whose clocks read 0, 5 and 3 ahead of rank 0's."""
    import torch.distributed as dist

    store = dist.HashStore()
    steps = [Offset(5.0, 0.1), Offset(-2.0, 0.2), None]
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda rank: share(store, rank, 3, steps[rank]), range(3)))
    assert [offset.ahead for offset in found[0]] == [0, 5, 3]
    assert [offset.ahead for offset in found[1]] == [-5, 0, -2]
    assert [offset.ahead for offset in found[2]] == [-3, 2, 0]
    assert found[0][2].uncertainty == pytest.approx(0.3)


class TestRegistry:
    def install(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, package: str = "carrier", factory: str = "carrier:make"
    ) -> None:
        """A real installed package, as an installer leaves it."""
        (folder / "carrier.py").write_text(
            "from adaptra.runtime.transports.local import LocalHub\n"
            "def make(*, rank): return LocalHub(2).transport(rank)\n"
            "def wrong(): return 'pigeon'\n"
        )
        install_transport(folder, "pigeon", factory, package)
        monkeypatch.syspath_prepend(str(folder))
        monkeypatch.delitem(sys.modules, "carrier", raising=False)

    def test_an_installed_package_adds_a_transport(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.install(tmp_path, monkeypatch)
        assert transport_names() == ("c10d", "delegate", "local", "nccl", "pigeon")
        assert create_transport("pigeon", rank=1).rank == 1

    def test_two_packages_of_one_name_are_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.install(tmp_path, monkeypatch)
        self.install(tmp_path, monkeypatch, package="rival")
        with pytest.raises(LaunchError, match=r"'pigeon': added by several packages: carrier \(carrier:make\), rival"):
            create_transport("pigeon", rank=1)

    def test_what_is_no_transport_is_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.install(tmp_path, monkeypatch, factory="carrier:wrong")
        with pytest.raises(LaunchError, match=r"'pigeon' of carrier .*expected a Transport, got str"):
            create_transport("pigeon")

    def test_what_can_not_be_loaded_says_why(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.install(tmp_path, monkeypatch, factory="carrier:missing")
        with pytest.raises(LaunchError, match=r"'pigeon' of carrier \(carrier:missing\) can't be loaded: .*missing"):
            create_transport("pigeon")

    def test_an_unknown_name_lists_the_known(self) -> None:
        with pytest.raises(LaunchError, match="transport 'tcp': expected one of c10d, delegate, local"):
            create_transport("tcp")

    def test_local_by_name_and_a_transport_as_it_is(self) -> None:
        transport = create_transport("local", hub=LocalHub(2), rank=1)
        assert transport.rank == 1
        assert create_transport(transport) is transport
        with pytest.raises(LaunchError, match="options rank: this transport exists already"):
            create_transport(transport, rank=1)
