"""The hardware queues of a GPU, over which its streams are spread.

What waits at the head of a queue holds up all that is behind it there, of other streams too. So each stream needs a queue of
its own, else a message that waits holds up ops. CUDA reads the number of queues from the environment, once.
"""

from __future__ import annotations

import os
from typing import Final

VARIABLE: Final = "CUDA_DEVICE_MAX_CONNECTIONS"
USUAL: Final = 8
"""The number of queues where the variable is not set."""
MOST: Final = 32
"""The highest number that CUDA takes."""
_OF_OPS, _OF_COPIES, _OF_EDGE, _EDGES = 1, 2, 2, 4
STREAMS: Final = _OF_OPS + _OF_COPIES + _OF_EDGE * _EDGES
"""The streams of a rank amid a straight pipeline over NCCL.

One is that of ops, and the delegate has one for copies each way. An edge has one, and its communicator another; two neighbours
make four edges.
"""


def why_too_few() -> str | None:
    """Return the reason why a GPU that this process uses has too few queues; None if it has enough."""
    text = os.environ.get(VARIABLE)
    queues = USUAL if text is None else int(text) if text.isascii() and text.isdigit() else None
    if queues is not None and queues >= STREAMS:
        return None
    now = f"is not set, which means {USUAL}" if text is None else f"is {text}"
    return (
        f"{VARIABLE} {now}: expected {STREAMS} to {MOST} in the environment of every process, since a rank over NCCL has up to "
        f"{STREAMS} streams, and a message that waits holds up ops that share its queue"
    )
