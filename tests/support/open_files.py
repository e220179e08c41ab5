"""How many files and sockets this process has open, for tests of what is left open."""

import gc
import time
from pathlib import Path


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def more_open(than: int, allowed: int, seconds: float = 20.0) -> int:
    """The number of files opened since there were ``than``, once it is ``allowed`` or less, or ``seconds`` have passed.

    A socket goes away a moment after its process or its peer has closed it. What leaks stays for good.
    """
    deadline = time.monotonic() + seconds
    while True:
        gc.collect()
        more = open_files() - than
        if more <= allowed or time.monotonic() > deadline:
            return more
        time.sleep(0.1)
