"""The ranks' comparison of the arguments that users gave to each of them.

Each rank publishes its arguments, but others read them only to name a difference. Digests of them go up a tree and come down
again, so each rank makes a few requests however many ranks there are. See :mod:`.digest_tree`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Final, cast

from torch.distributed import DistError, DistStoreError, Store

from adaptra.errors import ControlError, LaunchError
from adaptra.json_files import Fields
from adaptra.runtime.control_store.digest_tree import (
    DigestLevel,
    ancestors_of,
    children_of,
    lowest_two,
    parent_of,
    root_digest,
    subtree_digest,
    text_digest,
)
from adaptra.runtime.control_store.schema import decode, encode
from adaptra.runtime.control_store.signed_store import new_nonce
from adaptra.runtime.control_store.stores import get_all
from adaptra.runtime.exchange.store_exchange import late_error, log_late, lost_store, no_check, not_set, wait

_NAME: Final = "arguments"
_UP: Final = "arguments up"
_DOWN: Final = "arguments down"
_READ: Final = "arguments read"
_READ_SECONDS: Final = 3.0
"""The longest time that a rank stays for others to read the result, because the store may live in its process; seconds."""
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")


def agree_on_arguments(store: Store, rank: int, ranks: int, arguments: Mapping[str, str], timeout: float) -> str:
    """Compare the arguments of all ranks. All call it at the same time. The records aren't signed and only compared.

    Args:
        store: Shared by the ranks; its keys are used for nothing else.
        rank, ranks: This rank, and the number of ranks.
        arguments: This rank's arguments by name.
        timeout: Seconds to wait for the other ranks.

    Returns:
        A digest over what all ranks sent, for :func:`.signed_store.signed`. Each rank computes it from its own part, in which
        it drew an unpredictable number. Ranks that read different texts get different digests.

    Raises:
        LaunchError: A rank has other arguments or has not come; names it.
        ControlError: The store is lost, or a record in it is not as expected.
    """
    text = json.dumps({"arguments": dict(arguments), "nonce": new_nonce()})
    compared = hashlib.sha256(json.dumps(dict(arguments), sort_keys=True).encode()).hexdigest()
    try:
        comparison = _ArgumentComparison(store, rank, ranks, timeout)
        result = comparison.compare(text, compared)
        texts = comparison.texts_of(0, result.differs) if result.differs is not None else ()
        comparison.part()
    except DistError as error:
        raise lost_store(_NAME, rank, error) from error
    if result.differs is not None:
        pair = [
            _arguments_of(text if other == rank else found, other)
            for other, found in zip((0, result.differs), texts, strict=True)
        ]
        raise _difference(result.differs, *pair)
    return result.root


@dataclass(frozen=True, slots=True)
class _Compared:
    """The root's digest, and the lowest rank whose arguments differ from rank 0's, if one has others."""

    root: str
    differs: int | None


class _ArgumentComparison:
    """One rank's part in the comparison."""

    def __init__(self, store: Store, rank: int, ranks: int, timeout: float) -> None:
        self._store = store
        self._rank = rank
        self._ranks = ranks
        self._children = children_of(rank, ranks)
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout

    def compare(self, text: str, compared: str) -> _Compared:
        """Send digests up and down the tree.

        Args:
            text: This rank's text.
            compared: The digest that must be the same on all ranks.
        """
        own_key = f"{_NAME}/{self._rank}"
        level, values = DigestLevel(text_digest(self._rank, text), ()), [(self._rank, compared)]
        if self._children or self._rank == 0:
            self._store.set(own_key, text)
        if self._children:
            keys = [f"{_UP}/{child}" for child in self._children]
            self._wait(keys)
            reports = [self._parse_up(payload, key) for payload, key in zip(get_all(self._store, keys), keys, strict=True)]
            level = DigestLevel(level.text, tuple(digest for digest, _ in reports))
            values = lowest_two([*values, *(value for _, of_child in reports for value in of_child)])
        own = subtree_digest(level.text, level.children)
        above: list[DigestLevel] = []
        if self._rank == 0:
            differs = values[1][0] if len(values) > 1 else None
        else:
            up = encode({"digest": own, "compared": values})
            if self._children:
                self._store.set(f"{_UP}/{self._rank}", up)
            else:  # in one request
                self._store.multi_set([own_key, f"{_UP}/{self._rank}"], [text, up])  # pyright: ignore[reportAttributeAccessIssue]
            key = f"{_DOWN}/{parent_of(self._rank)}"
            self._wait([key])
            above, differs = self._parse_down(get_all(self._store, [key])[0], key)
        if self._children:
            down = {"levels": [asdict(one) for one in (level, *above)], "differs": differs}
            self._store.set(f"{_DOWN}/{self._rank}", encode(down))
        return _Compared(root_digest(self._rank, own, above), differs)

    def texts_of(self, *ranks: int) -> list[bytes]:
        """Return the texts of ranks that have come."""
        return get_all(self._store, [f"{_NAME}/{rank}" for rank in ranks])

    def part(self) -> None:
        """Stay until the ranks below have read the result, for a few seconds at most."""
        with contextlib.suppress(DistError):  # the result is known; without the store whatever follows fails by itself
            if self._children:
                with contextlib.suppress(DistStoreError):
                    self._store.wait([f"{_READ}/{child}" for child in self._children], timedelta(seconds=_READ_SECONDS))
            if self._rank:
                self._store.set(f"{_READ}/{self._rank}", "")

    def _wait(self, keys: list[str]) -> None:
        def on_late(seconds: float) -> None:
            log_late(_NAME, _listed(self._without(_NAME)), seconds)

        try:
            wait(self._store, keys, self._deadline - time.monotonic(), no_check, on_late)
        except DistStoreError as error:
            if absent := self._without(_NAME):
                raise late_error(_NAME, _listed(absent), self._timeout) from error
            # All have come, so only their digests are still on the way.
            try:
                wait(self._store, keys, self._timeout, no_check, on_late)
            except DistStoreError:
                raise late_error(_NAME, _listed(self._stalled()), self._timeout) from error

    def _without(self, name: str) -> list[int]:
        """Return the ranks that have not set their key of a name."""
        keys = {f"{name}/{rank}": rank for rank in range(self._ranks) if name != _DOWN or children_of(rank, self._ranks)}
        return [keys[key] for key in not_set(self._store, list(keys))] if keys else []

    def _stalled(self) -> list[int]:
        """Return the ranks that came, but did not send a digest on that they could have sent."""
        if waiting := set(self._without(_UP)) - {0}:
            return sorted(rank for rank in waiting if waiting.isdisjoint(children_of(rank, self._ranks)))
        waiting = set(self._without(_DOWN))
        return sorted(rank for rank in waiting if rank == 0 or parent_of(rank) not in waiting)

    def _parse_up(self, payload: bytes, where: str) -> tuple[str, list[tuple[int, str]]]:
        """Read what a child sends: its digest, and the lowest two ranks of its subtree with different values."""
        fields = decode(payload, where)
        digest = _digest(fields.raw("digest"), where)
        values: list[tuple[int, str]] = []
        for pair in fields.items("compared"):
            match pair:
                case [int(rank), str(value)] if 0 <= rank < self._ranks:
                    values.append((rank, _digest(value, where)))
                case _:
                    raise ControlError(f"{where}: field 'compared': expected pairs of a rank and a digest, got {pair!r:.80}")
        fields.end()
        return digest, values

    def _parse_down(self, payload: bytes, where: str) -> tuple[list[DigestLevel], int | None]:
        fields = decode(payload, where)
        levels = [_parse_level(one) for one in fields.objects("levels")]
        differs = fields.raw("differs")
        fields.end()
        sizes = [len(children_of(one, self._ranks)) for one in ancestors_of(self._rank)]
        if [len(level.children) for level in levels] != sizes:
            raise ControlError(f"{where}: field 'levels': expected {sizes} digests")
        if differs is not None and not (isinstance(differs, int) and 0 < differs < self._ranks):
            raise ControlError(f"{where}: field 'differs': expected a rank or null, got {differs!r:.80}")
        return levels, differs


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def _parse_level(fields: Fields) -> DigestLevel:
    level = DigestLevel(
        _digest(fields.raw("text"), "field 'text'"),
        tuple(_digest(one, "field 'children'") for one in fields.items("children")),
    )
    fields.end()
    return level


def _digest(value: object, where: str) -> str:
    if not isinstance(value, str) or not _DIGEST.fullmatch(value):
        raise ControlError(f"{where}: expected a digest, got {value!r:.80}")
    return value


def _difference(rank: int, ours: Mapping[str, object], theirs: Mapping[str, object]) -> LaunchError | ControlError:
    """Return the error for the arguments of rank 0, ``ours``, and those of another rank."""
    for name in {**ours, **theirs}:
        if theirs.get(name) != ours.get(name):
            return LaunchError(
                f"adaptra.compile: rank {rank} was given {name}={theirs.get(name)}, rank 0 {name}={ours.get(name)}: expected "
                "the same arguments on every rank"
            )
    return ControlError(f"arguments of rank {rank}: expected others than rank 0's, as their digest says")


def _arguments_of(text: str | bytes, rank: int) -> dict[str, object]:
    fields = decode(text.encode() if isinstance(text, str) else text, f"arguments of rank {rank}")
    arguments = fields.raw("arguments")
    fields.raw("nonce")
    fields.end()
    if not isinstance(arguments, dict):
        raise ControlError(f"arguments of rank {rank}: expected an object")
    return cast("dict[str, object]", arguments)
