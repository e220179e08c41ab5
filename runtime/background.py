"""Work beside training that leaves the interpreter to it."""

from __future__ import annotations

import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType
from typing import Final

WORK_SECONDS: Final = 200e-6
"""How long the interpreter is kept at most, but for calls into C++ that keep it longer."""

REST_SECONDS: Final = 50e-6
"""Enough for a thread that waits for the interpreter to wake up and take it."""


@contextmanager
def giving_way() -> Generator[None]:
    """Around what a background thread computes: give the interpreter away every few hundred microseconds.

    By itself Python takes it from a thread only after 5 ms, so that an op of the training thread that has just ended would wait
    so long for its next line. The thread's profile function, which is called with every call, is where this one looks at the
    time; no other thread has it.
    """
    began = time.perf_counter()

    def rest(_frame: FrameType, _event: str, _argument: object) -> None:
        nonlocal began
        if time.perf_counter() - began > WORK_SECONDS:
            time.sleep(REST_SECONDS)
            began = time.perf_counter()

    before = sys.getprofile()
    sys.setprofile(rest)
    try:
        yield
    finally:
        sys.setprofile(before)
