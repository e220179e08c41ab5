"""Control data from other ranks: text of bounded size that must be a JSON object, whose fields are checked before use.

Nothing is ever unpickled or executed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from adaptra.errors import ControlError
from adaptra.json_files import Fields

MAX_BYTES: Final = 64 * 1024 * 1024
"""The longest control message that is read. The plan of 64 stages and 512 microbatches is about 1 MB."""


def encode(data: dict[str, Any]) -> str:
    """Return a JSON object as text to be sent.

    Raises:
        ControlError: The text would be longer than :data:`MAX_BYTES`.
        ValueError: A number is not finite.
    """
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    if len(text) > MAX_BYTES:
        raise ControlError(f"control message of {len(text)} bytes: expected at most {MAX_BYTES}")
    return text


def decode(payload: bytes, where: str) -> Fields:
    """Read a JSON object that was sent.

    Raises:
        ControlError: It is too long, not JSON or not an object.
    """
    if len(payload) > MAX_BYTES:
        raise ControlError(f"{where}: {len(payload)} bytes: expected at most {MAX_BYTES}")
    try:
        data = json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise ControlError(f"{where}: not JSON: {error}") from None
    return Fields(data, where)


def decode_all(texts: Sequence[str], what: str) -> list[Fields]:
    """Read the JSON object that each rank told, by rank. Errors are those of :func:`decode`, and begin with ``what`` it is."""
    return [decode(text.encode(), f"{what} of rank {rank}") for rank, text in enumerate(texts)]
