"""Control records in the store are signed where a secret was given, and a stranger's are refused by name."""

from __future__ import annotations

import hashlib
import json
import os
import time
from typing import Any

import pytest
import torch.distributed as dist
from errors_table import check_documented
from processes import run_processes
from training import MIXED

import adaptra
from adaptra.errors import ControlError
from adaptra.runtime.control.mail.mail import Term
from adaptra.runtime.control.mail.mailbox import Mailbox
from adaptra.runtime.control.plans.plan_log import Entry, Log
from adaptra.runtime.control_store.signed_store import SignedStore, signed, under
from adaptra.runtime.control_store.stores import Connection
from adaptra.runtime.membership.membership import Membership
from adaptra.runtime.transports.delegate.endpoints import Endpoint, share_endpoints

SECRET = "5b1f" * 16
ROW = (
    "the control store's record …: no rank of this job has signed it: expected that only the job's hosts reach the store's "
    "port, and the same ADAPTRA_SECRET or ADAPTRA_SECRET_FILE on all ranks"
)


@pytest.fixture
def plain() -> dist.HashStore:
    """What a stranger writes to."""
    return dist.HashStore()


@pytest.fixture
def store(plain: dist.HashStore, monkeypatch: pytest.MonkeyPatch) -> dist.Store:
    """What the ranks write to, in the same place."""
    monkeypatch.setenv("ADAPTRA_SECRET", SECRET)
    return signed(plain, "job", ["rank 0's number", "rank 1's number"])


def check_refused(error: BaseException, key: str) -> None:
    assert f"record {key}: " in str(error)
    check_documented("ControlError", str(error), ROW)


def test_without_a_secret_nothing_is_signed(plain: dist.HashStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ADAPTRA_SECRET", raising=False)
    assert signed(plain, "job", ["", ""]) is plain
    under("a", plain).set("b", "c")
    assert plain.get("a/b") == b"c"


def test_signed_records_are_read_as_they_were_written(store: Any, plain: dist.HashStore) -> None:
    below: Any = under("below", store)
    below.set("a", "1")
    assert (below.get("a"), below.clone().multi_get(["a"])) == (b"1", [b"1"])
    assert below.compare_set("b", "", "2") == b"2" == below.compare_set("b", "", "3") == below.compare_set("b", "4", "4")
    assert below.compare_set("b", "2", "5") == b"5"
    store.queue_push("mail", "text")
    assert store.queue_pop("mail") == b"text"
    assert plain.get("below/a") != b"1" and plain.get("below/a").endswith(b"1")


def test_a_record_is_good_for_its_key_job_and_value_alone(store: dist.Store, plain: dist.HashStore) -> None:
    store.set("a", "1")
    record = plain.get("a")
    for key, value in (("b", record), ("a", record[:-1] + b"2"), ("a", b"1"), ("a", b"")):
        plain.set(key, value.decode())
        with pytest.raises(ControlError) as caught:
            store.get(key)
        check_refused(caught.value, f"job/{key}")
    plain.set("a", record.decode())
    assert store.get("a") == b"1"
    other = signed(plain, "job", ["rank 0's number", "another number"])
    with pytest.raises(ControlError, match="no rank of this job has signed it"):
        other.get("a")


def test_a_strangers_plan_log_entry_mail_and_endpoint_are_refused(store: dist.Store, plain: dist.HashStore) -> None:
    plain.set("log/0", json.dumps({"until": 1000, "version": 7}))
    with pytest.raises(ControlError) as caught:
        list(Log(Connection(store), 4).read())
    check_refused(caught.value, "job/log/0")
    with pytest.raises(ControlError) as caught:
        Log(Connection(store), 4).append(Entry(2, 0))
    check_refused(caught.value, "job/log/0")

    mailbox, other = Mailbox(store, 0), Mailbox(store, 1)
    other.send(0, Term(3))
    assert mailbox.receive() == Term(3)
    plain.queue_push("mail/0", json.dumps({"mail": "term", "term": 4}))
    plain.set("mail/bell", "")
    with pytest.raises(ControlError) as caught:
        mailbox.receive()
    check_refused(caught.value, "job/mail/0")
    other.close(5.0)

    plain.set("endpoints/1", json.dumps({"paths": [{"wire": "tcp", "host": "203.0.113.9", "port": 99}]}))
    with pytest.raises(ControlError) as caught:
        share_endpoints(store, 0, 2, [Endpoint("tcp", "127.0.0.1", 5)])
    check_refused(caught.value, "job/endpoints/1")


def test_a_strangers_heartbeat_ends_the_job_and_an_old_one_is_no_sign_of_life(store: dist.Store, plain: dist.HashStore) -> None:
    lost = []
    members = [Membership(Connection(store), rank, 2, lost.append, interval=0.05, lost_after=1.0) for rank in range(2)]
    deadline = time.monotonic() + 20
    while not plain.check(["rank 1"]) and time.monotonic() < deadline:
        time.sleep(0.01)
    members[1].close()
    while not lost and time.monotonic() < deadline:
        plain.set("rank 1", json.dumps({"beat": 10**6, "state": "running"}))
        time.sleep(0.02)
    members[0].close()
    assert lost and "no rank of this job has signed it" in str(lost[0])


def test_an_old_bulletin_of_the_leader_is_no_sign_of_life(store: dist.Store, plain: dist.HashStore) -> None:
    lost = []
    member = Membership(Connection(store), 1, 2, lost.append, interval=0.05, lost_after=1.0)
    told = []
    for beat in range(1, 20):  # as the leader does
        store.set("bulletin", str(beat))
        told.append(plain.get("bulletin").decode())
        time.sleep(0.1)
    assert not lost
    deadline = time.monotonic() + 30
    while not lost and time.monotonic() < deadline:
        for old in told[-2:]:
            plain.set("bulletin", old)
            time.sleep(0.1)
    was_found = bool(lost)
    member.close()
    assert was_found and "rank 0" in str(lost[0])


def trained(rank: int, secret: str | None) -> tuple[list[float], str, dict[str, bytes]]:
    """Losses, state, and what stands in the store, of a rank with or without a secret."""
    if secret:
        os.environ["ADAPTRA_SECRET"] = secret
    dist.init_process_group("gloo")
    inputs, _, targets = MIXED.rows(12, seed=0)
    with adaptra.compile(
        MIXED.make(), stages=2, microbatches=4, example_inputs=(inputs, targets), loss=MIXED.loss, split=["middle.1"],
        options=adaptra.Options(delegate=True, addresses=["127.0.0.1"]),
    ) as pipe:  # fmt: skip
        losses = [pipe.step(inputs[0], targets).item() for _ in range(3)]
        values = [value.grad for value in pipe.parameters() if value.grad is not None]
        store = dist.distributed_c10d._get_default_store()
        told = {key: store.get(key) for key in store.list_keys() if key.endswith(("membership/rank 0", "delegate/endpoints/0"))}
    return losses, hashlib.sha256(b"".join(one.numpy().tobytes() for one in values)).hexdigest(), told


@pytest.mark.processes
def test_training_with_a_secret_is_bitwise_the_same_and_its_records_are_signed() -> None:
    ours, theirs = (run_processes(trained, 2, secret) for secret in (SECRET, None))
    assert [one[:2] for one in ours] == [one[:2] for one in theirs]
    assert len(ours[0][2]) == len(theirs[0][2]) == 2
    assert all(not value.startswith(b"{") and value[64:].startswith(b"{") for value in ours[0][2].values())
    assert all(value.startswith(b"{") for value in theirs[0][2].values())


def test_stores_of_one_key_differ_by_their_names() -> None:
    plain = dist.HashStore()
    SignedStore(plain, b"k" * 32, "a").set("b/c", "1")
    with pytest.raises(ControlError):
        SignedStore(plain, b"k" * 32, "other").get("b/c")
