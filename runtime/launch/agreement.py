"""The ranks' check that all of them have computed the same."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping
from typing import Final

from torch.distributed import DistError

from adaptra.errors import LaunchError
from adaptra.runtime.exchange.store_exchange import Check, exchange, no_check, records_of
from adaptra.runtime.launch.connecting import on_threads
from adaptra.runtime.launch.job import Launch
from adaptra.runtime.transports.base import Transport

_FAILED: Final = "failed: "
_TEXT_LIMIT: Final = 4000


def agree(transport: Transport, what: str, facts: Mapping[str, object], timeout: float, check: Check = no_check) -> None:
    """Check that every rank of the pipeline has the same facts. All ranks call this or :func:`disagree`.

    Args:
        transport: This rank's transport; its store carries the comparison.
        what: The name of the facts, for the error; each comparison has a name of its own.
        facts: JSON values, by what they are.
        timeout: Seconds to wait for the other ranks.
        check: As of :func:`.exchange.gather`.

    Raises:
        LaunchError: Ranks differ, or have failed or not answered; names them, and the first fact that differs.
        ControlError: The store is lost.
    """
    digests = {name: _digest(one) for name, one in facts.items()}
    ranks = range(transport.world_size)
    texts = exchange(records_of(transport), f"agree/{what}", transport.rank, _digest(digests), ranks, timeout, check)
    for rank, text in enumerate(texts):
        if text.startswith(_FAILED):
            raise LaunchError(f"{what}: rank {rank} failed: {text.removeprefix(_FAILED)}")
    different = [rank for rank, other in enumerate(texts) if other != texts[0]]
    if different:
        both = (0, different[0])
        pair = exchange(records_of(transport), f"agree/{what}/each", transport.rank, json.dumps(digests), both, timeout, check)
        one, other = (json.loads(text) for text in pair)
        fact = next(name for name in (*one, *other) if one.get(name) != other.get(name))
        raise LaunchError(
            f"{what}: rank {', '.join(map(str, different))} compiled something else than rank 0: {fact}: expected every rank "
            "to build the same model and to call adaptra.compile with the same arguments"
        )


def agree_here(launched: Launch, facts: Mapping[str, object], timeout: float, check: Check = no_check) -> None:
    """Check with all workers of this process that every rank has the same facts of the pipeline; raises as :func:`agree`."""
    on_threads(lambda transport: agree(transport, "pipeline", facts, timeout, check), launched.transports, launched.device)


def _digest(fact: object) -> str:
    return hashlib.sha256(json.dumps(fact, sort_keys=True).encode()).hexdigest()


def disagree(transport: Transport, what: str, error: BaseException) -> None:
    """Report, in place of :func:`agree`, that this rank has failed, so that the others' :func:`agree` raises it."""
    text = f"{_FAILED}{type(error).__name__}: {error}"[:_TEXT_LIMIT]
    with contextlib.suppress(DistError):  # without the store no report is possible, and the others notice themselves
        records_of(transport).set(f"agree/{what}/{transport.rank}", text)
