"""Where a rank answers direct questions, and how others recognise its process; JSON in the control store."""

from __future__ import annotations

import contextlib
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from adaptra.errors import ControlError
from adaptra.runtime.control_store.schema import decode, encode
from adaptra.runtime.control_store.secret import derive, given_secret

TOKEN_BYTES: Final = 32
_TEXT_LIMIT: Final = 128
_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")
_STATE_FIELD: Final = 0
_STARTED_FIELD: Final = 19
"""Positions in ``/proc/<pid>/stat`` after the name, which is in parentheses: the state and the time of the start."""


@dataclass(frozen=True, slots=True)
class Announcement:
    """What a rank publishes of its process.

    Attributes:
        address: The numeric address of its listener; empty if it has none.
        port: The port of its listener.
        token: The number from which the key of its answers comes, in hexadecimal.
        place: Names the host and the namespace of process numbers; empty if unknown.
        process: The process's number in that namespace.
        started: The time of the process's start, in the system's units.
    """

    address: str
    port: int
    token: str
    place: str
    process: int
    started: int

    @property
    def key(self) -> bytes:
        """The key of its answers. With the job's secret, only a process that has the secret knows it."""
        return key_of_token(self.token)


def key_of_token(token: str) -> bytes:
    """Return the key of the answers of the process that published a token."""
    secret, salt = given_secret(), bytes.fromhex(token)
    return salt if secret is None else derive(secret, "liveness", salt)


def announce(address: str, port: int, token: str) -> Announcement:
    """Return the announcement of this process."""
    number = os.getpid()
    return Announcement(address, port, token, place_of_this_process(), number, _stat(number)[1])


def new_token() -> str:
    """Return an unpredictable token."""
    return secrets.token_hex(TOKEN_BYTES)


def place_of_this_process() -> str:
    """Return a name of this host and this process's namespace of process numbers; empty if the system doesn't tell them."""
    with contextlib.suppress(OSError):
        return f"{_BOOT.read_text().strip()} {Path('/proc/self/ns/pid').readlink()}"
    return ""


def is_held_by_a_debugger(announced: Announcement) -> bool:
    """Return True if a process on this host is stopped because another one, such as a debugger, traces it."""
    if not announced.place or announced.place != place_of_this_process():
        return False
    return _stat(announced.process) == ("t", announced.started)


def key_of_announcement(rank: int) -> str:
    """Return the store key of a rank's announcement."""
    return f"process of rank {rank}"


def write_announcement(announced: Announcement) -> str:
    """Return an announcement in its stored form."""
    return encode(
        {
            "address": announced.address,
            "port": announced.port,
            "token": announced.token,
            "place": announced.place,
            "process": announced.process,
            "started": announced.started,
        }
    )


def parse_announcement(payload: bytes, rank: int) -> Announcement:
    """Read a rank's announcement.

    Raises:
        ControlError: The payload is no announcement.
    """
    where = f"process of rank {rank}"
    fields = decode(payload, where)
    read = Announcement(
        address=fields.text("address", _TEXT_LIMIT),
        port=fields.whole("port"),
        token=fields.text("token", 2 * TOKEN_BYTES),
        place=fields.text("place", _TEXT_LIMIT),
        process=fields.whole("process"),
        started=fields.whole("started"),
    )
    fields.end()
    if read.port > 0xFFFF:
        raise ControlError(f"{where}: field 'port': expected at most 65535, got {read.port}")
    try:
        is_token = len(bytes.fromhex(read.token)) == TOKEN_BYTES
    except ValueError:
        is_token = False
    if not is_token:
        raise ControlError(f"{where}: field 'token': expected {TOKEN_BYTES} bytes in hexadecimal, got {read.token!r:.80}")
    return read


def _stat(number: int) -> tuple[str, int]:
    """Return the state and the start of a process on this host, or ``("", 0)``."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
        return fields[_STATE_FIELD], int(fields[_STARTED_FIELD])
    return "", 0
