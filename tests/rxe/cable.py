"""A cable that changes what it carries, in a way that the link's own check does not notice.

RoCE v2 packets end in a checksum (ICRC) that every port along the way could have spoilt and put right again. What changes in a
switch's memory arrives as if it had been sent so. Soft-RoCE drops and repeats what netem corrupts; only this reaches whoever
listens.
"""

from __future__ import annotations

import select
import socket
import struct
import threading
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

import inside

_SOL_PACKET, _PACKET_IGNORE_OUTGOING = 263, 23
_ALL_PROTOCOLS = 3
_MOST_BYTES = 1 << 14
_IP, _UDP, _BTH, _RETH = 14, 34, 42, 54
"""Where each header begins in a frame of Ethernet, IPv4, UDP and RoCE v2."""
_ROCE_PORT = 4791
_CHECKSUM_BYTES = 4

_WRITES = {0x06, 0x0A, 0x0B}
"""Reliable RDMA writes: the first packet of several, and the only one, without and with an immediate value."""


@dataclass
class Packet:
    """One RoCE v2 packet of a reliable queue pair in its frame.

    Attributes:
        frame: All of it, to be changed.
    """

    frame: bytearray

    @staticmethod
    def of(frame: bytearray) -> Packet | None:
        """The packet in this frame; None if it has none."""
        is_udp = len(frame) > _BTH and bytes(frame[12:14]) == b"\x08\x00" and frame[_IP + 9] == socket.IPPROTO_UDP
        if not is_udp or struct.unpack_from("!H", frame, _UDP + 2) != (_ROCE_PORT,):
            return None
        return Packet(frame)

    @property
    def is_write(self) -> bool:
        """Whether it begins an RDMA write."""
        return self.frame[_BTH] in _WRITES

    @property
    def checksum(self) -> bytes:
        """The ICRC that belongs to its contents: a CRC32 that leaves out what changes on the way."""
        covered = bytearray(b"\xff" * 8 + self.frame[_IP:-_CHECKSUM_BYTES])
        changing = (1, 8, 10, 11, _UDP - _IP + 6, _UDP - _IP + 7, _BTH - _IP + 4)
        for at in changing:
            covered[8 + at] = 0xFF
        return zlib.crc32(covered).to_bytes(4, "little")

    @property
    def is_sound(self) -> bool:
        """Whether its checksum is right."""
        return bytes(self.frame[-_CHECKSUM_BYTES:]) == self.checksum

    def put_right(self) -> None:
        """Give it the checksum of its contents."""
        self.frame[-_CHECKSUM_BYTES:] = self.checksum


def change_a_bit(packet: Packet) -> bool:
    """Change the last bit of what an RDMA write carries. Whether it did."""
    if packet.is_write:
        padding = packet.frame[_BTH + 1] >> 4 & 3
        packet.frame[-_CHECKSUM_BYTES - padding - 1] ^= 1
    return packet.is_write


def change_the_key(packet: Packet) -> bool:
    """Give an RDMA write a key that its peer never gave out, which ends the queue pairs at both sides. Whether it did."""
    if packet.is_write:
        packet.frame[_RETH + 8] ^= 0xFF
    return packet.is_write


class Tap:
    """Takes a host's plug out of its switch, and carries its packets by hand until it puts the plug back.

    Args:
        host: The host's number.
        rail: The rail's number.
        change: Called for every packet until it returns True: then it has changed the packet.

    Attributes:
        has_changed: Set once a packet was changed.
    """

    def __init__(self, host: int, rail: int, change: Callable[[Packet], bool]) -> None:
        self._plug, self._switch = f"p{host}_{rail}", f"rail{rail}"
        self._change = change
        self.has_changed = threading.Event()

    def __enter__(self) -> Tap:
        inside.shell("ip link add tap mtu 4200 type veth peer name tapped mtu 4200")
        inside.shell(f"ip link set tapped master {self._switch} up")
        inside.shell("ip link set tap up")
        inside.shell(f"ip link set {self._plug} nomaster")
        self._ends = [_listen(self._plug), _listen("tap")]
        self._stop, self._stopped = socket.socketpair()
        self._thread = threading.Thread(target=self._carry, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop.close()
        self._thread.join()
        for end in (*self._ends, self._stopped):
            end.close()
        inside.shell("ip link del tap")
        inside.shell(f"ip link set {self._plug} master {self._switch}")

    def _carry(self) -> None:
        here, there = self._ends
        others = {here: there, there: here}
        while True:
            ready, _, _ = select.select([*self._ends, self._stopped], [], [])
            if self._stopped in ready:
                return
            for end in ready:
                frame = bytearray(end.recv(_MOST_BYTES))
                self._spoil(frame)
                others[end].send(frame)

    def _spoil(self, frame: bytearray) -> None:
        packet = Packet.of(frame)
        if packet is None or self.has_changed.is_set():
            return
        assert packet.is_sound, "this is not how the device computes the checksum"
        if self._change(packet):
            packet.put_right()
            self.has_changed.set()


def _listen(interface: str) -> socket.socket:
    end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
    end.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
    end.bind((interface, _ALL_PROTOCOLS))
    return end
