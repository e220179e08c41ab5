"""Control records that only the ranks of a job can have written, if the launcher gave a secret.

Every client that reaches the control store's port can write to it. So each record carries an HMAC-SHA256 over the full name of
its key and its value. No record can be made without the job's secret, or moved to another key. The key of the signatures is
derived from the secret and a number that each rank draws. So records of another job or launch with that secret are refused.

A signature doesn't show that a record is the latest one under its key, or that no record was removed. Counters (``add``), the
existence of keys, and the keys that torch writes for its own groups aren't signed.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Sequence
from datetime import timedelta
from typing import Final

from torch.distributed import Store

from adaptra.errors import ControlError
from adaptra.runtime.control_store.secret import FILE_VARIABLE, VARIABLE, derive, given_secret
from adaptra.runtime.control_store.spare_clients import Part, over
from adaptra.runtime.control_store.stores import clone, get_all

_SIGNATURE_LETTERS: Final = 2 * hashlib.sha256().digest_size
_NONCE_BYTES: Final = 32


class SignedStore(Store):
    """A client of a store whose records are signed. Its methods are the store's.

    A record that was not signed for its key, or was signed by another job or launch, raises
    :class:`adaptra.errors.ControlError` when it is read.

    Args:
        store: The store of the signed records.
        key: The key of the signatures.
        path: The prefix of all key names, which is part of the signed text.
    """

    def __init__(self, store: Store, key: bytes, path: str) -> None:
        super().__init__()
        self._store = store
        self._key = key
        self._path = path

    @property
    def underlying_store(self) -> Store:
        """The store of the signed records."""
        return self._store

    @property
    def timeout(self) -> timedelta:
        """The longest time of a wait."""
        return self._store.timeout  # pyright: ignore[reportAttributeAccessIssue] - torch's annotations lack it

    def set_timeout(self, timeout: timedelta) -> None:
        """Set :attr:`timeout`."""
        self._store.set_timeout(timeout)

    def clone(self) -> Store:
        """Return another client of the same store."""
        return clone(self)

    def over(self, client: Store) -> SignedStore:
        """Return the same records over another client."""
        return SignedStore(over(self._store, client), self._key, self._path)

    def under(self, name: str) -> SignedStore:
        """Return the keys under a prefix, over the same connection."""
        return SignedStore(Part(name, self._store), self._key, f"{self._path}/{name}")

    def set(self, key: str, value: str) -> None:
        """Set a key."""
        self._store.set(key, self._sealed(key, value))

    def multi_set(self, keys: list[str], values: list[str]) -> None:
        """Set several keys, in one message."""
        self._store.multi_set(keys, [self._sealed(key, value) for key, value in zip(keys, values, strict=True)])  # pyright: ignore[reportAttributeAccessIssue]

    def get(self, key: str) -> bytes:
        """Return the value of a key, once it is set."""
        return self._opened(key, self._store.get(key))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Return the values of keys, once all are set."""
        values: list[bytes] = self._store.multi_get(keys)  # pyright: ignore[reportAttributeAccessIssue, reportUnknownVariableType]
        return [self._opened(key, value) for key, value in zip(keys, values, strict=True)]

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        """Set a key if its value is the expected one, where "" means that it is not set, and return its value afterwards."""
        # A value has only one signature under its key, so signed values are equal if and only if the values are.
        expected = self._sealed(key, expected_value) if expected_value else ""
        found = self._store.compare_set(key, expected, self._sealed(key, desired_value))
        return self._opened(key, found) if found else found

    def queue_push(self, key: str, value: bytes | str) -> None:
        """Append to a queue."""
        self._store.queue_push(key, self._sealed(key, value if isinstance(value, str) else value.decode()))

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        """Take the first value of a queue, once there is one."""
        return self._opened(key, self._store.queue_pop(key, block))

    def add(self, key: str, value: int) -> int:
        """Add to a counter, which is not signed, and return its new value."""
        return self._store.add(key, value)

    def check(self, keys: list[str]) -> bool:
        """Return True if all keys are set, by any client."""
        return self._store.check(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until keys are set, by any client."""
        if timeout is None:
            self._store.wait(keys)
        else:
            self._store.wait(keys, timeout)

    def delete_key(self, key: str) -> bool:
        """Remove a key."""
        return self._store.delete_key(key)

    def _sealed(self, key: str, value: str) -> str:
        return self._signature(key, value.encode()) + value

    def _opened(self, key: str, payload: bytes) -> bytes:
        signature, value = payload[:_SIGNATURE_LETTERS], payload[_SIGNATURE_LETTERS:]
        if hmac.compare_digest(signature, self._signature(key, value).encode()):
            return value
        raise ControlError(
            f"the control store's record {self._path}/{key}: no rank of this job has signed it: expected that only the "
            f"job's hosts reach the store's port, and the same {VARIABLE} or {FILE_VARIABLE} on all ranks"
        )

    def _signature(self, key: str, value: bytes) -> str:
        name = f"{self._path}/{key}".encode()
        return hmac.digest(self._key, len(name).to_bytes(4, "big") + name + value, hashlib.sha256).hex()


def under(name: str, store: Store) -> Store:
    """Return the keys of a store under a prefix, signed if those of the store are."""
    return store.under(name) if isinstance(store, SignedStore) else Part(name, store)


def signed(store: Store, path: str, texts: Sequence[str]) -> Store:
    """Return a store whose records are signed, or ``store`` itself if no secret was given.

    Args:
        store: Its keys are used for nothing else.
        path: The store's name, the same on all ranks and unique in the job.
        texts: The text that each rank sent to all others, by rank, with an unpredictable number; this rank's own as it was
            sent. Or one digest over these texts, which each rank computes from its own. Ranks that read different texts refuse
            each other's records.

    Raises:
        LaunchError: See :func:`adaptra.runtime.control_store.secret.given_secret`.
    """
    secret = given_secret()
    if secret is None:
        return store
    salt = hashlib.sha256()
    for text in texts:
        salt.update(len(text).to_bytes(8, "big") + text.encode())
    return SignedStore(store, derive(secret, "records", salt.digest()), path)


def new_nonce() -> str:
    """Return an unpredictable number as text; empty if no secret was given, so that it costs nothing."""
    return "" if given_secret() is None else secrets.token_hex(_NONCE_BYTES)


def signed_together(store: Store, path: str, rank: int, ranks: int) -> Store:
    """Return a store as :func:`signed`, for ranks that have exchanged no texts yet; all call it at the same time.

    Raises:
        ControlError: A rank was given no secret, and this one was.
        torch.distributed.DistError: The store is lost, or a rank did not come within its timeout.
    """
    nonce = new_nonce()
    store.set(f"nonce/{rank}", nonce)
    if not nonce:
        return store
    texts = [text.decode(errors="replace") for text in get_all(store, [f"nonce/{other}" for other in range(ranks)])]
    without = [other for other, text in enumerate(texts) if not text]
    if without:
        raise ControlError(
            f"rank {rank} was given a secret ({VARIABLE}), rank {', '.join(map(str, without))} was not: expected the same one "
            "on all ranks, or none"
        )
    return signed(store, path, texts)
