"""Work beside training that leaves the interpreter to it."""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

from adaptra import _C

WORK_SECONDS: Final = 200e-6
"""How long the interpreter is kept at most, but for calls into C++ that keep it longer."""

REST_SECONDS: Final = 50e-6
"""Enough for a thread that waits for the interpreter to wake up and take it."""


@contextmanager
def yielding_gil() -> Generator[None]:
    """Around what a background thread computes: give the interpreter away every few hundred microseconds.

    By itself Python takes it from a thread only after 5 ms, so that an op of the training thread that has just ended would wait
    so long for its next line. The thread's profile function, which is called with every call, is where this one looks at the
    time; no other thread has it. It is written in C++: one in Python makes the work take three times as long.
    """
    before = sys.getprofile()
    _C.give_way(WORK_SECONDS, REST_SECONDS)
    try:
        yield
    finally:
        sys.setprofile(before)
