"""The other side of the verbs wire, in Python over pyverbs: what the C++ engine does is seen and judged by other code.

It plays rank 1, the source of messages to an engine of rank 0. What it writes and reads is spelled out here once more, from
``csrc/delegate/{security/handshake,wire/frame,verbs/verbs_queue_pair}.h`` and ``docs/rdma.md``.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from pathlib import Path
from typing import Any

from delegate_lab import CALM, SECRET, pattern
from stranger import FRAME, frame, proof, read

from adaptra.runtime.transports.base import ChannelClass

PORT = 7100
SIZE = 4096
TIMEOUT = 20.0
GREETING = struct.Struct("<HBBIIHBx16s16x")
MAGIC, READY = 0x51A7, b"\x52"
CHUNK, RESYNC, GRANT, ACK, EXPOSE = 1, 3, 4, 5, 9
RECEIVES, CELL = 64, 512
FIRST_PACKET = 77


def receive_from_stranger_code(_host: int, listening: str) -> dict[str, Any]:
    """Rank 0: an engine that receives three messages from :func:`send_and_attack`, and holds all of them.

    It begins once there is a file ``listening``: where nobody listens, its only path has failed for good.

    Returns:
        Whether each is, in the end, what was sent, and the counters of its channel.
    """
    from adaptra import _C

    until = time.monotonic() + TIMEOUT
    while not Path(listening).exists():
        assert time.monotonic() < until, "the peer does not listen"
        time.sleep(0.01)
    engine = _C.Engine(0, 2, SECRET, **CALM)
    engine.add_verbs_path("rxe0_0", 1, "10.9.0.1")
    engine.set_peer(1, [("10.9.0.2", PORT)])
    engine.start()
    engine.reserve(1, SIZE, 3)
    requests = [engine.receive(1, ChannelClass.FORWARD, SIZE) for _ in range(3)]
    # Its connections, and with them its keys, are others than those of the channel above.
    other = engine.receive(1, ChannelClass.BACKWARD, SIZE)
    for number, request in enumerate(requests):
        assert request.wait(TIMEOUT), f"message {number} did not come"
        assert request.error is None, request.error
    import ctypes

    held: list[bool] = []
    for number, request in enumerate(requests):
        assert request.memory is not None
        held.append(ctypes.string_at(request.memory.address, SIZE) == pattern(number, SIZE))
    ((*_, counters),) = [one for one in engine.statistics() if not one[2] and not one[3]]
    engine.close("the test is over", 0.5)
    assert other.error is not None
    return {"held": held, "counters": counters}


def send_and_attack(_host: int, listening: str) -> dict[str, int]:
    """Rank 1: make a file ``listening``, send messages in both forms, and try keys where they must not open anything.

    Returns:
        How the device ended each forbidden write.
    """
    with socket.create_server(("10.9.0.2", PORT)) as listener:
        listener.settimeout(TIMEOUT)
        Path(listening).touch()
        door = Door(listener)
        forward, backward = door.next(ChannelClass.FORWARD), door.next(ChannelClass.BACKWARD)
        grants = [forward.granted() for _ in range(3)]
        slots = [forward.slots[slot] for slot, _ in grants]
        forward.write_bare(0, *grants[0])
        forward.wait_for_acknowledgement(0)
        forward.write_behind_header(1, *grants[1])
        forward.wait_for_acknowledgement(1)

        # Another connection's key, which is good, to a slot that holds a message.
        foreign = backward.write(*slots[0], b"x" * SIZE)
        # A key of a connection that has ended; the memory is the same, and open to the next connection by another key.
        forward.close()
        again = door.next(ChannelClass.FORWARD)
        assert again.exposed(grants[0][0])[0] == slots[0][0]
        revoked = again.write(*slots[0], b"x" * SIZE)

        last = door.next(ChannelClass.FORWARD)
        last.exposed(grants[2][0])
        last.write_bare(2, *grants[2])
        last.wait_for_acknowledgement(2)
        return {"foreign": foreign, "revoked": revoked}


class Door:
    """Lets the engine in, and tells its connections apart."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._waiting: list[Peer] = []

    def next(self, channel: ChannelClass) -> Peer:
        """The next connection of this class."""
        while True:
            for peer in self._waiting:
                if peer.channel == channel:
                    self._waiting.remove(peer)
                    return peer
            self._waiting.append(Peer(self._listener.accept()[0]))


class Peer:
    """The source's end of one connection: the handshake as the side that accepts, and a queue pair of its own."""

    def __init__(self, connection: socket.socket) -> None:
        from adaptra.runtime.rdma.devices import describe_port, load_pyverbs, open_device

        load_pyverbs()
        from pyverbs import enums  # pyright: ignore[reportMissingImports] - an extra
        from pyverbs.cq import CQ  # pyright: ignore[reportMissingImports] - an extra
        from pyverbs.mr import MR  # pyright: ignore[reportMissingImports] - an extra
        from pyverbs.pd import PD  # pyright: ignore[reportMissingImports] - an extra

        self._socket = connection
        self._socket.settimeout(TIMEOUT)
        self._enums = enums
        self.slots: dict[int, tuple[int, int]] = {}
        self._frames: list[tuple[Any, ...]] = []
        self._chunks = 0
        hello = read(connection, 56)
        self.channel = ChannelClass(hello[5])
        challenge = os.urandom(32)
        connection.sendall(challenge)
        assert read(connection, 32) == proof("opener", hello, challenge)
        connection.sendall(proof("acceptor", hello, challenge))

        self._device = open_device("rxe1_0")
        self._port = describe_port(self._device, 1)
        self._completions = CQ(self._device, 2 * RECEIVES)
        domain = PD(self._device)
        self._cells = MR(domain, RECEIVES * CELL, enums.IBV_ACCESS_LOCAL_WRITE)
        self._message = MR(domain, SIZE, enums.IBV_ACCESS_LOCAL_WRITE)
        self._connect(domain)

    def _connect(self, domain: Any) -> None:
        from pyverbs.addr import GID, AHAttr, GlobalRoute  # pyright: ignore[reportMissingImports] - an extra
        from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr  # pyright: ignore[reportMissingImports] - an extra

        enums = self._enums
        cap = QPCap(max_send_wr=16, max_recv_wr=RECEIVES, max_send_sge=1, max_recv_sge=1)
        kind = QPInitAttr(qp_type=enums.IBV_QPT_RC, scq=self._completions, rcq=self._completions, cap=cap)
        self._pair = QP(domain, kind, QPAttr(port_num=1))
        for cell in range(RECEIVES):
            self._post_receive(cell)
        assert self._port.address is not None
        own = bytes(10) + b"\xff\xff" + socket.inet_aton(self._port.address)
        self._socket.sendall(GREETING.pack(MAGIC, 1, 0, self._pair.qp_num, FIRST_PACKET, 0, enums.IBV_MTU_4096, own))
        magic, version, _, number, first_packet, _, mtu, gid = GREETING.unpack(read(self._socket, GREETING.size))
        assert (magic, version, mtu) == (MAGIC, 1, enums.IBV_MTU_4096)
        route = GlobalRoute(dgid=GID(gid.hex(":", 2)), sgid_index=self._port.gid_index, hop_limit=64)
        change = QPAttr(port_num=1)
        change.ah_attr = AHAttr(gr=route, is_global=1, port_num=1)
        change.path_mtu, change.dest_qp_num, change.rq_psn = enums.IBV_MTU_4096, number, first_packet
        change.max_dest_rd_atomic, change.min_rnr_timer = 1, 12
        change.sq_psn, change.timeout, change.retry_cnt, change.rnr_retry, change.max_rd_atomic = FIRST_PACKET, 14, 6, 6, 1
        self._pair.to_rts(change)
        self._socket.sendall(READY)
        assert read(self._socket, 1) == READY
        # Only who speaks is told what there is.
        self._send(frame(RESYNC))

    def close(self) -> None:
        """End the connection, as a process that ends does."""
        self._pair.close()
        self._socket.close()

    def granted(self) -> tuple[int, int]:
        """The next slot that is granted, and its generation; where it lies has been told before."""
        found = self._next(GRANT)
        assert found[3] in self.slots and found[8] == SIZE
        return found[3], found[4]

    def exposed(self, slot: int) -> tuple[int, int]:
        """Where this slot lies, and its key."""
        while slot not in self.slots:
            self._collect()
        return self.slots[slot]

    def wait_for_acknowledgement(self, number: int) -> None:
        """Wait until this message is acknowledged; an earlier one may be so again."""
        while self._next(ACK)[6] != number:
            pass

    def write_bare(self, number: int, slot: int, generation: int) -> None:
        """A message without a header: the immediate value is the checksum that the header would have."""
        header = self._header(number, slot, generation)
        assert self.write(*self.slots[slot], pattern(number, SIZE), header[-4:]) == self._enums.IBV_WC_SUCCESS

    def write_behind_header(self, number: int, slot: int, generation: int) -> None:
        """A message whose header is sent before: the immediate value counts such chunks."""
        self._send(self._header(number, slot, generation))
        immediate = struct.pack("<I", self._chunks)
        self._chunks += 1
        assert self.write(*self.slots[slot], pattern(number, SIZE), immediate) == self._enums.IBV_WC_SUCCESS

    def write(self, address: int, key: int, data: bytes, immediate: bytes | None = None) -> int:
        """One RDMA write; how it ended."""
        from pyverbs.wr import SGE, SendWR  # pyright: ignore[reportMissingImports] - an extra

        enums = self._enums
        self._message.write(data, len(data))
        request = SendWR(
            opcode=enums.IBV_WR_RDMA_WRITE if immediate is None else enums.IBV_WR_RDMA_WRITE_WITH_IMM,
            num_sge=1,
            imm_data=0 if immediate is None else socket.htonl(int.from_bytes(immediate, "little")),
            sg=[SGE(self._message.buf, len(data), self._message.lkey)],
            send_flags=self._flags(),
        )
        request.set_wr_rdma(key, address)
        self._pair.post_send(request)
        return self._sent()

    def _send(self, data: bytes) -> None:
        from pyverbs.wr import SGE, SendWR  # pyright: ignore[reportMissingImports] - an extra

        self._message.write(data, len(data))
        piece = SGE(self._message.buf, len(data), self._message.lkey)
        self._pair.post_send(SendWR(opcode=self._enums.IBV_WR_SEND, num_sge=1, sg=[piece], send_flags=self._flags()))
        assert self._sent() == self._enums.IBV_WC_SUCCESS

    def _flags(self) -> int:
        return self._enums.IBV_SEND_SIGNALED | self._enums.IBV_SEND_SOLICITED

    @staticmethod
    def _header(number: int, slot: int, generation: int) -> bytes:
        from adaptra import _C

        checksum = _C.crc32c(pattern(number, SIZE))
        return frame(CHUNK, slot=slot, generation=generation, length=SIZE, sequence=number, total=SIZE, checksum=checksum)

    def _post_receive(self, cell: int) -> None:
        from pyverbs.wr import SGE, RecvWR  # pyright: ignore[reportMissingImports] - an extra

        piece = SGE(self._cells.buf + cell * CELL, CELL, self._cells.lkey)
        self._pair.post_recv(RecvWR(wr_id=cell, num_sge=1, sg=[piece]))

    def _next(self, kind: int) -> tuple[Any, ...]:
        while True:
            for found in self._frames:
                if found[2] == kind:
                    self._frames.remove(found)
                    return found
            self._collect()

    def _sent(self) -> int:
        while (status := self._collect()) is None:
            pass
        return status

    def _collect(self) -> int | None:
        """Take one completion: a frame that came, or the end of what was sent, whose status is returned."""
        until = time.monotonic() + TIMEOUT
        count, completions = self._completions.poll(1)
        while count == 0:
            assert time.monotonic() < until, "nothing completes"
            # The engine and the devices share this processor.
            os.sched_yield()
            count, completions = self._completions.poll(1)
        (found,) = completions
        if not found.opcode & self._enums.IBV_WC_RECV or found.status != self._enums.IBV_WC_SUCCESS:
            return found.status
        data = self._cells.read(found.byte_len, found.wr_id * CELL)
        self._post_receive(found.wr_id)
        header = FRAME.unpack(data[: FRAME.size])
        if header[2] == EXPOSE:
            self.slots[header[3]] = struct.unpack("<QI", data[64:76])
        self._frames.append(header)
        return None
