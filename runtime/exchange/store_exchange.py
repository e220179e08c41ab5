"""Texts that the ranks of a job or pipeline exchange through the control store, with the late ones named.

What is gathered or told belongs to the transport's attempt: no rank reads a text of an earlier one.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Final

from torch.distributed import DistError, DistStoreError, Store

from adaptra.errors import ControlError, LaunchError
from adaptra.runtime.control_store.signed_store import under
from adaptra.runtime.control_store.stores import get_all
from adaptra.runtime.transports.base import Transport

logger = logging.getLogger(__name__)

Check = Callable[[], None]

_LATE_SECONDS: Final = 10.0
"""Seconds after which a waiting rank logs the ranks that are late; each further log entry comes after twice the time."""

_PAUSE_SECONDS: Final = 0.002
_MOST_PAUSE_SECONDS: Final = 0.2
"""The first and the longest time between two questions whether keys are set, seconds."""


def no_check() -> None:
    """Do nothing: only the timeout ends the wait."""


def gather(transport: Transport, what: str, data: object, timeout: float, check: Check = no_check) -> list[object] | None:
    """Gather every rank's data on rank 0. All ranks call it.

    Args:
        transport: This rank's transport; its store carries the data.
        what: A name that no other call uses.
        data: Any JSON value.
        timeout: Seconds to wait for the other ranks.
        check: Called each second meanwhile; an error that it raises ends the wait.

    Returns:
        The data by rank on rank 0, None elsewhere.

    Raises:
        LaunchError: Ranks have not answered; names them.
        ControlError: The store is lost.
    """
    wanted = range(transport.world_size) if transport.rank == 0 else range(0)
    store = records_of(transport)
    texts = exchange(store, f"gather/{what}", transport.rank, json.dumps(data), wanted, timeout, check)
    for rank in wanted:  # no other rank reads them
        store.delete_key(f"gather/{what}/{rank}")
    return [json.loads(text) for text in texts] if transport.rank == 0 else None


def exchange_data(
    transport: Transport, what: str, data: object, wanted: Sequence[int], timeout: float, check: Check = no_check
) -> list[object]:
    """Send data to the other ranks, and read the data that the wanted ranks send under the same name. They call it too.

    Args:
        transport, what, data, timeout, check: As of :func:`gather`.
        wanted: The ranks whose data are read.

    Returns:
        The data of the wanted ranks, in their order.

    Raises:
        LaunchError, ControlError: As :func:`gather`.
    """
    store = records_of(transport)
    texts = exchange(store, f"tell/{what}", transport.rank, json.dumps(data), wanted, timeout, check)
    return [json.loads(text) for text in texts]


def records_of(transport: Transport) -> Store:
    """Return a transport's records of its present attempt."""
    return under(str(transport.attempt), transport.store)


def exchange(
    store: Store, name: str, rank: int, text: str, wanted: Sequence[int], timeout: float, check: Check = no_check
) -> list[str]:
    """Publish this rank's text under a name and read the texts of the wanted ranks.

    Args:
        store: Shared by the ranks.
        name: A name that no other call uses.
        rank: This rank.
        text: This rank's text.
        wanted: The ranks whose texts are read.
        timeout, check: As of :func:`gather`.

    Returns:
        The texts of the wanted ranks, in their order.

    Raises:
        LaunchError, ControlError: As :func:`gather`.
    """
    keys = {f"{name}/{one}": one for one in wanted}

    def absent() -> str:
        return ", ".join(str(keys[key]) for key in not_set(store, list(keys)))

    try:
        store.set(f"{name}/{rank}", text)
        if not keys:
            return []
        wait(store, list(keys), timeout, check, lambda seconds: log_late(name, absent(), seconds))
        return [value.decode() for value in get_all(store, list(keys))]
    except DistStoreError as error:
        raise late_error(name, absent(), timeout) from error
    except DistError as error:
        check()  # a rank that ended the job may have taken the store with it, since the last look
        raise lost_store(name, rank, error) from error


def wait(store: Store, keys: list[str], timeout: float, check: Check, on_late: Callable[[float], None]) -> None:
    """Wait until keys are set.

    Args:
        store: The store of the keys.
        keys: The keys.
        timeout: Seconds to wait.
        check: Called each second meanwhile; an error that it raises ends the wait.
        on_late: Called with the seconds waited so far, after 10 s, 20 s, 40 s and so on.

    Raises:
        torch.distributed.DistStoreError: Keys have not been set in time.
        torch.distributed.DistError: The store is lost.
    """
    # A wait that ends without its keys makes torch write a warning: so waits are long, and with a check there are questions.
    began, say_after, check_after, pause = time.monotonic(), _LATE_SECONDS, 1.0, _PAUSE_SECONDS
    while True:
        waited = time.monotonic() - began
        if check is no_check:
            try:
                store.wait(keys, timedelta(seconds=max(0.001, min(say_after, timeout) - waited)))
            except DistStoreError:
                if min(say_after, timeout) == timeout:
                    raise
            else:
                return
        elif store.check(keys):
            return
        elif waited >= timeout:
            raise DistStoreError(f"not set within {timeout:g} s")
        else:
            time.sleep(max(0.0, min(pause, timeout - waited)))
            pause = min(1.5 * pause, _MOST_PAUSE_SECONDS)
        waited = time.monotonic() - began
        if waited >= check_after:
            check()
            check_after = waited + 1.0
        if waited >= say_after:
            on_late(waited)
            say_after *= 2


def log_late(name: str, absent: str, seconds: float) -> None:
    """Log the ranks that have not come yet, unless all have."""
    if absent:
        logger.warning("%s: rank %s has not answered for %.0f s; still waiting", name, absent, seconds)


def late_error(name: str, absent: str, timeout: float) -> LaunchError:
    """Return the error for ranks that have not come in time."""
    return LaunchError(f"{name}: rank {absent} did not answer within {timeout:g} s")


def lost_store(name: str, rank: int, error: DistError) -> ControlError:
    """Return the error for a store that is lost."""
    return ControlError(f"{name}: rank {rank} lost the control store: {error}")


def not_set(store: Store, keys: list[str]) -> list[str]:
    """Return the keys that are not set, found by bisection: few ranks are late, and each question takes a round trip to the
    store.
    """
    if store.check(keys):
        return []
    if len(keys) == 1:
        return keys
    half = len(keys) // 2
    return not_set(store, keys[:half]) + not_set(store, keys[half:])
