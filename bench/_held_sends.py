"""Sends over NCCL that are late without a slow link: a kernel occupies their stream until a timer on the host lets it end.

The time of each message counts from when its tensors were there, so several messages are late at a time, as on a real link. A
sleep on the stream would delay each behind the one before.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, Final

import torch

_SLOTS: Final = 4096
_POLL_SECONDS: Final = 1e-4


class HeldSends:
    """Holds what is sent within :meth:`holding`.

    Args:
        device: The GPU of this rank.

    Attributes:
        delay: Seconds by which messages are late from now on.
    """

    def __init__(self, device: torch.device) -> None:
        self.delay = 0.0
        self._device = device
        self._stream = torch.cuda.Stream(device)
        # Of four numbers each, since Triton compiles another kernel for an address that no 16 divides.
        self._flags = torch.zeros(_SLOTS, 4, dtype=torch.int32, pin_memory=True)
        self._used = 0
        self._held: queue.SimpleQueue[tuple[torch.cuda.Event, float, Callable[[], object]]] = queue.SimpleQueue()
        with torch.cuda.stream(self._stream):
            self._spin()()  # Triton compiles now, not in a step
        torch.cuda.synchronize(device)
        threading.Thread(target=self._release_in_time, name="held sends", daemon=True).start()

    @contextmanager
    def holding(self) -> Generator[None]:
        """What is sent within begins ``delay`` seconds after all that the current stream has to do."""
        if not self.delay:
            yield
            return
        ready = torch.cuda.Event()
        ready.record(torch.cuda.current_stream(self._device))
        self._stream.wait_event(ready)
        with torch.cuda.stream(self._stream):
            self._held.put((ready, self.delay, self._spin()))
            yield

    def _spin(self) -> Callable[[], object]:
        """Occupy the current stream; return what ends that."""
        if (machine := sys.modules.get("fake_cuda.machine")) is not None:
            return machine.the_machine().hold().release
        from _spin_kernel import spin as kernel

        spin: Any = kernel
        flag = self._flags[self._used % _SLOTS]
        flag.zero_()
        self._used += 1
        spin[(1,)](flag, num_warps=1)
        return lambda: flag.fill_(1)

    def _release_in_time(self) -> None:
        torch.cuda.set_device(self._device)
        waiting = [self._held.get()]
        due: list[tuple[float, Callable[[], object]]] = []
        while True:
            while not self._held.empty() or not (waiting or due):
                waiting.append(self._held.get())
            now = time.monotonic()
            due += [(now + delay, release) for ready, delay, release in waiting if ready.query()]
            waiting = [held for held in waiting if not held[0].query()]
            for moment, release in due:
                if moment <= now:
                    release()
            due = [held for held in due if held[0] > now]
            time.sleep(_POLL_SECONDS)
