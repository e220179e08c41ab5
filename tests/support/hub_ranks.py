"""The ranks of a hub, each a thread of the test's process."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from adaptra.runtime.transports.base import Transport
from adaptra.runtime.transports.local import LocalHub


def on_all_ranks(run: Callable[[Transport], Any], ranks: int = 3) -> list[Any]:
    """What ``run`` returns or raises on every rank of a hub, by rank."""
    hub = LocalHub(ranks)

    def caught(rank: int) -> Any:
        try:
            return run(hub.transport(rank))
        except Exception as error:
            return error

    with ThreadPoolExecutor(ranks) as threads:
        return list(threads.map(caught, range(ranks)))
