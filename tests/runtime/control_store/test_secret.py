"""The job's secret: where it comes from, what of it is told, and what a stranger with the store can make of that."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from errors_table import check_documented

from adaptra.errors import ControlError, LaunchError
from adaptra.runtime.control_store.secret import derive, fingerprint, given_secret
from adaptra.runtime.launch.launch import launch
from adaptra.runtime.transports.delegate.endpoints import share_secret
from adaptra.runtime.transports.process_groups import keys_of

SECRET = "5b1f" * 16
DOCUMENTED = {
    "both": "ADAPTRA_SECRET and ADAPTRA_SECRET_FILE are both set: expected one of them",
    "size": "…: a secret of … bytes: expected 32 to 4096 that nobody can guess, such as openssl rand -hex 32 prints",
    "mode": "ADAPTRA_SECRET_FILE=…: mode …, owner …: expected a file that only its owner may read (chmod 600), owned by user …",
    "file": "ADAPTRA_SECRET_FILE=…: …: expected a file that holds the secret",
    "some": "rank … was given a secret (ADAPTRA_SECRET), rank … was not: expected the same one on all ranks, or none",
}


def check_refused(error: BaseException, row: str) -> None:
    check_documented(type(error).__name__, str(error), DOCUMENTED[row])


def test_the_secret_comes_from_the_environment_or_a_file_of_this_user(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text(SECRET + "\n")
    file.chmod(0o600)
    assert given_secret({}) is None
    assert given_secret({"ADAPTRA_SECRET": SECRET}) == given_secret({"ADAPTRA_SECRET_FILE": str(file)}) == SECRET.encode()


@pytest.mark.parametrize(
    ("content", "mode", "message", "row"),
    [
        (SECRET, 0o640, "mode 0640", "mode"),
        (SECRET, 0o604, "mode 0604", "mode"),
        ("short", 0o600, "a secret of 5 bytes", "size"),
        ("", 0o600, "a secret of 0 bytes", "size"),
    ],
)
def test_a_file_that_others_may_read_or_that_can_be_guessed_is_refused(
    tmp_path: Path, content: str, mode: int, message: str, row: str
) -> None:
    file = tmp_path / "secret"
    file.write_text(content)
    file.chmod(mode)
    with pytest.raises(LaunchError, match=message) as caught:
        given_secret({"ADAPTRA_SECRET_FILE": str(file)})
    check_refused(caught.value, row)


def test_what_is_no_secret_is_refused() -> None:
    with pytest.raises(LaunchError, match="ADAPTRA_SECRET: a secret of 0 bytes"):
        given_secret({"ADAPTRA_SECRET": ""})
    with pytest.raises(LaunchError) as caught:
        given_secret({"ADAPTRA_SECRET": SECRET, "ADAPTRA_SECRET_FILE": "x"})
    check_refused(caught.value, "both")
    with pytest.raises(LaunchError, match="No such file") as caught:
        given_secret({"ADAPTRA_SECRET_FILE": "/nowhere/secret"})
    check_refused(caught.value, "file")


def test_no_two_purposes_or_salts_share_a_key() -> None:
    keys = {derive(SECRET.encode(), purpose, salt) for purpose in ("a", "ab") for salt in (b"", b"b", b"c")}
    assert len(keys) == 6
    assert fingerprint(SECRET.encode()) != fingerprint(SECRET[::-1].encode()) != fingerprint(None) == "none"


def test_the_store_does_not_hold_the_key_of_the_data_links(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ADAPTRA_SECRET", SECRET)
    store = dist.HashStore()
    with ThreadPoolExecutor(3) as pool:
        keys = set(pool.map(lambda rank: share_secret(store, rank), range(3)))
    (key,) = keys
    lies = store.get("secret").decode()
    assert key.hex() not in lies and SECRET not in lies
    assert share_secret(dist.HashStore(), 0) != key, "another engine has another key"


def test_a_stranger_who_writes_a_key_of_his_own_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither as if there were no secret, nor as a salt: the key is not what he wrote."""
    monkeypatch.setenv("ADAPTRA_SECRET", SECRET)
    store = dist.HashStore()
    store.set("secret", json.dumps({"given": False, "value": "00" * 32}))
    with pytest.raises(LaunchError, match=r"rank 1 was given a secret \(ADAPTRA_SECRET\), rank 0 was not") as caught:
        share_secret(store, 1)
    check_refused(caught.value, "some")
    store.set("secret", json.dumps({"given": True, "value": "00" * 32}))
    assert share_secret(store, 1) == derive(SECRET.encode(), "data links", bytes(32))
    store.set("secret", json.dumps({"given": True, "value": "00"}))
    with pytest.raises(ControlError, match="expected 32 bytes, got 1"):
        share_secret(store, 1)


def test_ranks_with_and_without_a_secret_refuse_each_other_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=5))
    monkeypatch.setenv("ADAPTRA_SECRET", SECRET)
    store.set("secret", json.dumps({"given": True, "value": "00" * 32}))
    monkeypatch.delenv("ADAPTRA_SECRET")
    with pytest.raises(LaunchError, match=r"rank 0 was given a secret .*, rank 2 was not"):
        share_secret(store, 2)


def test_compile_compares_the_secrets_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything else is told; the other rank is played by what it would write."""
    monkeypatch.setenv("ADAPTRA_SECRET", SECRET)
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        launch(1, None, {"stages": "1"}, 5).transports[0].close()
        told = keys_of("adaptra launch 1").get("arguments/0").decode()
    finally:
        dist.destroy_process_group()
    assert json.loads(told)["arguments"]["ADAPTRA_SECRET"] == fingerprint(SECRET.encode())
    assert SECRET not in told
