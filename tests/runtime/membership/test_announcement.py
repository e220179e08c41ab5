"""What a rank announces of its process, and what is seen of a process on the same host."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from adaptra.errors import ControlError
from adaptra.runtime.membership.announcement import (
    announce,
    is_held_by_a_debugger,
    key_of_token,
    new_token,
    parse_announcement,
    write_announcement,
)

TRACED = """
import ctypes, os, signal
ctypes.CDLL(None).ptrace(0, 0, None, None)  # PTRACE_TRACEME
os.kill(os.getpid(), signal.SIGSTOP)
"""
STOPPED = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"


def test_an_announcement_is_read_as_it_was_written() -> None:
    made = announce("10.0.0.1", 4242, new_token())
    assert parse_announcement(write_announcement(made).encode(), 3) == made
    assert made.process == os.getpid() and made.place and made.started > 0


def test_with_the_jobs_secret_the_token_alone_is_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    token = new_token()
    assert key_of_token(token) == bytes.fromhex(token)
    monkeypatch.setenv("ADAPTRA_SECRET", "s" * 32)
    assert key_of_token(token) != bytes.fromhex(token)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"port": 70_000}, "field 'port': expected at most 65535"),
        ({"token": "ab"}, "field 'token': expected 32 bytes in hexadecimal"),
        ({"token": "z" * 64}, "field 'token': expected 32 bytes in hexadecimal"),
        ({"address": "a" * 200}, "field 'address'"),
        ({"mood": 1}, "unknown field 'mood'"),
    ],
)
def test_what_is_no_announcement_is_refused(change: dict[str, object], message: str) -> None:
    good = json.loads(write_announcement(announce("127.0.0.1", 1, new_token())))
    with pytest.raises(ControlError, match=f"process of rank 5: .*{message}"):
        parse_announcement(json.dumps(good | change).encode(), 5)


@pytest.mark.parametrize(("script", "is_held"), [(TRACED, True), (STOPPED, False)])
def test_a_process_that_a_debugger_holds_is_told_from_one_that_was_stopped(script: str, is_held: bool) -> None:
    with subprocess.Popen([sys.executable, "-S", "-c", script]) as child:
        try:
            # A tracer's wait reaps nothing of a child that stops.
            os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
            started = int(_stat(child.pid)[19])
            here = announce("127.0.0.1", 1, new_token())
            announced = dataclasses.replace(here, process=child.pid, started=started)
            assert is_held_by_a_debugger(announced) is is_held
            elsewhere = dataclasses.replace(announced, place="another host")
            assert not is_held_by_a_debugger(elsewhere)
            later = dataclasses.replace(announced, started=started + 1)
            assert not is_held_by_a_debugger(later), "its number is another process's now"
        finally:
            child.send_signal(signal.SIGKILL)
            deadline = time.monotonic() + 100
            while child.poll() is None:
                assert time.monotonic() < deadline, "the child does not end"
                time.sleep(0.01)


def _stat(number: int) -> list[str]:
    return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
