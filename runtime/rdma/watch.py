"""Watches RDMA ports: events of the devices (port down, queue pair fatal …), and the state of each port after them.

A device's events come through a file descriptor of its own, and one thread waits for all devices. An event can be late: a port
may be up again when its failure is reported. So the port's state is read after each event.
"""

from __future__ import annotations

import logging
import os
import select
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from adaptra.errors import MissingExtraError
from adaptra.runtime.rdma.devices import Port, describe_port, open_device

logger = logging.getLogger(__name__)

_EVENT_FILE: Final = "anon_inode:[infinibandevent]"
_OPEN_FILES: Final = Path("/proc/self/fd")
_TRIES: Final = 8


@dataclass(frozen=True, slots=True)
class RdmaEvent:
    """An event of a device.

    Attributes:
        device: The device's name.
        event: The event as libibverbs calls it, such as ``IBV_EVENT_PORT_ERR``.
        ports: All ports of the device, read after the event.
    """

    device: str
    event: str
    ports: tuple[Port, ...]

    def __str__(self) -> str:
        states = ", ".join(f"port {port.number} {port.unusable or port.state}" for port in self.ports)
        return f"RDMA device {self.device}: {self.event}; now {states}"


def watch(devices: Sequence[str], on_event: Callable[[RdmaEvent], None]) -> Watcher | None:
    """Return a watcher of these devices, or None if there are none or they can't be watched; the log says why."""
    if not devices:
        return None
    try:
        return Watcher(devices, on_event)
    except (MissingExtraError, OSError) as error:
        logger.warning("RDMA devices %s are not watched: %s", ", ".join(devices), error)
        return None


class Watcher:
    """Reports every event of some devices until it is closed.

    Args:
        devices: The devices' names.
        on_event: Called on the watcher's thread for each event.

    Raises:
        MissingExtraError: There is no pyverbs.
        OSError: A device can't be opened.
    """

    def __init__(self, devices: Iterable[str], on_event: Callable[[RdmaEvent], None]) -> None:
        self._on_event = on_event
        self._contexts: dict[int, Any] = {}
        try:
            for name in devices:
                descriptor, context = _open_with_events(name)
                self._contexts[descriptor] = context
        except BaseException:
            self._close_devices()
            raise
        self._stop = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._watch, name="adaptra-rdma-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread and close the devices. May be repeated."""
        if self._stop >= 0:
            os.eventfd_write(self._stop, 1)
            self._thread.join()
            os.close(self._stop)
            self._stop = -1
            self._close_devices()

    def _watch(self) -> None:
        poll = select.poll()
        for descriptor in (self._stop, *self._contexts):
            poll.register(descriptor, select.POLLIN)
        while True:
            for descriptor, _ in poll.poll():
                if descriptor == self._stop:
                    return
                try:
                    self._on_event(_take(self._contexts[descriptor]))
                except Exception:
                    logger.exception("an RDMA device's event was lost")

    def _close_devices(self) -> None:
        for context in self._contexts.values():
            context.close()
        self._contexts.clear()


def _take(context: Any) -> RdmaEvent:
    from pyverbs.device import translate_event_type  # pyright: ignore[reportMissingImports]

    # Does not wait: the descriptor was ready.
    event = context.get_async_event()
    event.ack()
    count = context.query_device().phys_port_cnt
    name = context.name.decode() if isinstance(context.name, bytes) else str(context.name)
    ports = tuple(describe_port(context, number) for number in range(1, count + 1))
    return RdmaEvent(name, str(translate_event_type(event.event_type)), ports)


def _open_with_events(name: str) -> tuple[int, Any]:
    """Return a device and the descriptor of its events, which pyverbs hides: the one that was added by opening the device."""
    for _ in range(_TRIES):
        before = _event_files()
        context = open_device(name)
        added = _event_files() - before
        if len(added) == 1:
            return added.pop(), context
        # Another thread opened or closed a device meanwhile, so it is not clear which one is ours.
        context.close()
    raise OSError(f"RDMA device {name}: the descriptor of its events can't be told from others")


def _event_files() -> set[int]:
    descriptors: set[int] = set()
    for link in _OPEN_FILES.iterdir():
        try:
            if str(link.readlink()) == _EVENT_FILE:
                descriptors.add(int(link.name))
        except OSError:
            continue  # Closed since it was listed.
    return descriptors
