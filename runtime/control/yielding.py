"""Background work that yields the interpreter to training."""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

from adaptra import _C

WORK_SECONDS: Final = 200e-6
"""The longest time that the interpreter is kept, except in calls into C++ that keep it longer; seconds."""

REST_SECONDS: Final = 50e-6
"""Seconds in which a thread that waits for the interpreter can wake up and take it."""


@contextmanager
def yielding_gil() -> Generator[None]:
    """Yield the interpreter every few hundred microseconds while a background thread computes.

    By itself Python switches threads only after 5 ms, so a training thread whose op has just ended would wait that long. The
    thread's own profile function, which is called at every call, checks the time. It is written in C++, because one in Python
    makes the work take three times as long.
    """
    before = sys.getprofile()
    _C.give_way(WORK_SECONDS, REST_SECONDS)
    try:
        yield
    finally:
        sys.setprofile(before)
