"""The secret that a launcher gives the ranks of a job, which is never written to the control store.

It comes in the environment variable ``ADAPTRA_SECRET``, or in the file that ``ADAPTRA_SECRET_FILE`` names. It is never used
directly: each purpose has a key of its own, derived by HMAC-SHA256 from the secret, the purpose and a salt.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from adaptra.errors import LaunchError

VARIABLE: Final = "ADAPTRA_SECRET"
FILE_VARIABLE: Final = "ADAPTRA_SECRET_FILE"
_LEAST_BYTES: Final = 32
_MOST_BYTES: Final = 4096


def given_secret(environment: Mapping[str, str] | None = None) -> bytes | None:
    """Return the secret that this process was given, or None.

    Args:
        environment: The environment to read; None for that of this process.

    Raises:
        LaunchError: Both variables are set, or the secret is shorter than 32 bytes. Or the file can't be read, isn't this
            user's or may be read by others.
    """
    environment = os.environ if environment is None else environment
    text, path = environment.get(VARIABLE), environment.get(FILE_VARIABLE)
    if text is not None and path is not None:
        raise LaunchError(f"{VARIABLE} and {FILE_VARIABLE} are both set: expected one of them")
    if path is not None:
        return _checked(_read(Path(path)), f"{FILE_VARIABLE}={path}")
    return None if text is None else _checked(text.encode(), VARIABLE)


def derive(secret: bytes, purpose: str, salt: bytes) -> bytes:
    """Return the key of 32 bytes for one purpose, from the job's secret and a salt that need not be secret."""
    # The label's length is part of the text, so no two purposes and salts make the same text.
    label = f"adaptra {purpose}".encode()
    return hmac.digest(secret, len(label).to_bytes(4, "big") + label + salt, hashlib.sha256)


def fingerprint(secret: bytes | None) -> str:
    """Return a public fingerprint of a secret, by which ranks check that they were given the same one."""
    return "none" if secret is None else f"fingerprint {derive(secret, 'fingerprint', b'').hex()[:16]}"


def _checked(secret: bytes, where: str) -> bytes:
    secret = secret.strip()
    if not _LEAST_BYTES <= len(secret) <= _MOST_BYTES:
        raise LaunchError(
            f"{where}: a secret of {len(secret)} bytes: expected {_LEAST_BYTES} to {_MOST_BYTES} that nobody can guess, "
            "such as openssl rand -hex 32 prints"
        )
    return secret


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            about = os.fstat(file.fileno())
            others = stat.S_IMODE(about.st_mode) & 0o077
            if others or about.st_uid not in (os.geteuid(), 0):
                raise LaunchError(
                    f"{FILE_VARIABLE}={path}: mode {stat.S_IMODE(about.st_mode):04o}, owner {about.st_uid}: expected a "
                    f"file that only its owner may read (chmod 600), owned by user {os.geteuid()}"
                )
            return file.read(_MOST_BYTES + 2)
    except OSError as error:
        raise LaunchError(f"{FILE_VARIABLE}={path}: {error.strerror}: expected a file that holds the secret") from error
