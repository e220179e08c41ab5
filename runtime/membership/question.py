"""One direct question to a process: does it live? ``csrc/liveness/listener.h`` answers it."""

from __future__ import annotations

import errno
import hashlib
import hmac
import os
import secrets
import socket
from enum import Enum
from typing import Final

from adaptra.runtime.membership.announcement import Announcement

_NONCE_BYTES: Final = 16
_ANSWER_BYTES: Final = hashlib.sha256().digest_size


class Reply(Enum):
    """What has come of a question."""

    OPEN = "no answer yet"
    ANSWERED = "the process lives"
    REFUSED = "the process is gone: nobody listens on its port, or somebody else"
    UNREACHABLE = "the network says that nothing gets there"
    FAILED = "the question could not be put, or broke off, which tells nothing"


_UNREACHABLE: Final = frozenset({errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN})


class Question:
    """A question under way, which never blocks. Call :meth:`look` now and then, and :meth:`close` at the end.

    Args:
        asked: The process.
    """

    def __init__(self, asked: Announcement) -> None:
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        self._expected = hmac.digest(asked.key, self._nonce, hashlib.sha256)
        self._got = b""
        self._is_sent = False
        self._socket: socket.socket | None = None
        self._began = 0
        try:
            self._socket = socket.socket(socket.AF_INET6 if ":" in asked.address else socket.AF_INET)
            self._socket.setblocking(False)
            self._began = self._socket.connect_ex((asked.address, asked.port))
        except OSError as error:  # no descriptor left, or no such address
            self._began = error.errno or errno.EIO

    def look(self) -> Reply:
        """Move on as far as possible without waiting."""
        if self._socket is None or self._began not in (0, errno.EINPROGRESS):
            return _reply_of(self._began)
        try:
            if not self._is_sent:
                if failed := self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    raise OSError(failed, os.strerror(failed))
                self._is_sent = self._socket.send(self._nonce) == _NONCE_BYTES
            while len(self._got) < _ANSWER_BYTES:
                got = self._socket.recv(_ANSWER_BYTES - len(self._got))
                if not got:
                    # A stranger that hangs up, or the process as it ends: the next question tells.
                    return Reply.FAILED
                self._got += got
        except (BlockingIOError, InterruptedError):
            return Reply.OPEN
        except OSError as error:
            return _reply_of(error.errno)
        return Reply.ANSWERED if hmac.compare_digest(self._got, self._expected) else Reply.REFUSED

    @property
    def has_got_through(self) -> bool:
        """True if the system of the process's host has taken the question, as it does also for a process that is frozen."""
        return self._is_sent

    def close(self) -> None:
        """Give it up."""
        if self._socket is not None:
            self._socket.close()


def _reply_of(error: int | None) -> Reply:
    if error in _UNREACHABLE:
        return Reply.UNREACHABLE
    return Reply.REFUSED if error == errno.ECONNREFUSED else Reply.FAILED
