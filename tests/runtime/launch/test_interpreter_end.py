"""The end of an interpreter whose threads are still in C++ code."""

from __future__ import annotations

import sys

import pytest
from commands import run_command
from delegate_lab import CALM, SECRET

SCRIPT = f"""
import sys, threading, time
from datetime import timedelta

from torch.distributed import DistStoreError, TCPStore

from adaptra import _C


class Lingering:
    def __del__(self):
        time.sleep(0.5)


def wait_for_the_engine():
    while not engine.receive(1, 0, 64).wait(0.02):
        waits.set()


def wait_for_a_store():
    while True:
        try:
            store.wait(["nothing"], timedelta(seconds=0.02))
        except DistStoreError:
            waits.set()


engine = _C.Engine(0, 2, {SECRET!r}, **{CALM!r})
engine.set_peer(1, [])
store = TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)
waits, lingering = threading.Event(), Lingering()
threading.Thread(target=globals()[sys.argv[1]], daemon=True).start()
waits.wait()
sys.exit(3)
"""


@pytest.mark.parametrize("wait", ["wait_for_the_engine", "wait_for_a_store"])
def test_a_thread_that_comes_back_from_cxx_as_the_interpreter_ends_changes_no_exit_code(wait: str) -> None:
    ended = run_command([sys.executable, "-c", SCRIPT, wait])
    assert ended.returncode == 3, ended.stderr
