"""Has the detector see what the delegate's engine does with pinned memory, which no op of torch tells.

The engine reads a message from the call that sends it, and may fill a slot from the call that gives it back.
"""

from __future__ import annotations

from typing import Any

from adaptra import _C
from fake_cuda.machine import the_machine


def watch() -> None:
    """Watch the engines of this process from now on."""
    engine: Any = _C.Engine
    if hasattr(engine, "fake_cuda_watches"):
        return
    engine.fake_cuda_watches = True
    send, release = engine.send, engine.release

    def watched_send(self: Any, peer: int, channel: int, message: Any, size: int, posted_at: float) -> Any:
        the_machine().host_op("the engine's send", [message.address], [])
        return send(self, peer, channel, message, size, posted_at)

    def watched_release(self: Any, request: Any) -> None:
        if request.memory is not None:
            the_machine().host_op("the engine's next arrival", [], [request.memory.address])
        release(self, request)

    engine.send, engine.release = watched_send, watched_release
