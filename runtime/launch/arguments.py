"""The ranks' comparison of the arguments that users gave to each of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import cast

from torch.distributed import Store

from adaptra.errors import ControlError, LaunchError
from adaptra.runtime.control_store.schema import decode
from adaptra.runtime.control_store.signed_store import new_nonce
from adaptra.runtime.launch.exchange import exchange


def agree_on_arguments(store: Store, rank: int, ranks: int, arguments: Mapping[str, str], timeout: float) -> list[str]:
    """Compare the arguments, and return each rank's text, by rank. The texts aren't signed and only compared."""
    own = json.dumps({"arguments": dict(arguments), "nonce": new_nonce()})
    found = exchange(store, "arguments", rank, own, range(ranks), timeout)
    found[rank] = own
    given = [_arguments_of(text, other) for other, text in enumerate(found)]
    for other, theirs in enumerate(given):
        for name, value in given[0].items():
            if theirs.get(name) != value:
                raise LaunchError(
                    f"adaptra.compile: rank {other} was given {name}={theirs.get(name)}, rank 0 {name}={value}: expected the "
                    "same arguments on every rank"
                )
    return found


def _arguments_of(text: str, rank: int) -> dict[str, object]:
    fields = decode(text.encode(), f"arguments of rank {rank}")
    given = fields.raw("arguments")
    fields.raw("nonce")
    fields.end()
    if not isinstance(given, dict):
        raise ControlError(f"arguments of rank {rank}: expected an object")
    return cast("dict[str, object]", given)
