"""A stranger at the delegate's door: the greetings, proofs and frames of its wire, spelled out once more in Python."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import socket
import struct

from delegate_lab import SECRET

from adaptra import _C

STRANGER = "127.0.0.77"
"""The address that strangers call from."""

FRAME = struct.Struct("<HBBIIIQQQI16x")
"""A frame's header, but for its own checksum."""


def hello(
    path: int = 0,
    source: int = 0,
    destination: int = 1,
    index: int = 5,
    nonce: bytes | None = None,
    opener: int = 1,
    channel: int = 0,
) -> bytes:
    """A greeting: who opens a connection for which channel, and a nonce."""
    told = (b"adhs", 3, channel, opener == source, source, destination, path, index)
    return struct.pack("<4sBBBxIIII", *told) + (nonce or os.urandom(32))


def proof(role: str, greeting: bytes, challenge: bytes, secret: bytes = SECRET) -> bytes:
    """What the opener or the acceptor proves itself with, by Python's own HMAC, where the ranks of the session are 0 and 1."""
    is_opened_by_source = bool(greeting[6])
    source, destination = struct.unpack_from("<II", greeting, 8)
    ranks = (source, destination) if is_opened_by_source == (role == "opener") else (destination, source)
    told = f"adaptra {role} 3".ljust(18).encode() + hashlib.sha256(b"").digest() + struct.pack("<II", *ranks)
    return hmac.digest(secret, told + greeting + challenge, hashlib.sha256)


def prove(connection: socket.socket, greeting: bytes, secret: bytes = SECRET) -> bytes:
    """The opener's side of the handshake; the confirmation that came, or nothing."""
    connection.sendall(greeting)
    challenge = read(connection, 32)
    connection.sendall(proof("opener", greeting, challenge, secret))
    confirmation = read(connection, 32)
    if confirmation:
        assert confirmation == proof("acceptor", greeting, challenge, secret)
    return confirmation


def read(connection: socket.socket, size: int) -> bytes:
    """So many bytes, or nothing if the connection ends before."""
    data = b""
    with contextlib.suppress(ConnectionError):
        while len(data) < size and (more := connection.recv(size - len(data))):
            data += more
    return data if len(data) == size else b""


def frame(
    kind: int, slot: int = 0, generation: int = 0, length: int = 0, sequence: int = 0, offset: int = 0, total: int = 0,
    checksum: int = 0,
) -> bytes:  # fmt: skip
    """A frame's header with its checksum."""
    header = FRAME.pack(0xAD47, 2, kind, slot, generation, length, sequence, offset, total, checksum)
    return header + struct.pack("<I", _C.crc32c(header))
