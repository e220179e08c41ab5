"""The delegate over real verbs: soft-RoCE devices of the lab, see tests/rxe."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable
from typing import Any

import inside
import pytest
import rdma_bodies as bodies
import rdma_failures
import rdma_peer
from errors_table import check_documented

pytestmark = pytest.mark.rdma

REMOTE_ACCESS_ERROR = 10
"""``IBV_WC_REM_ACCESS_ERR``."""
CUT_OFF = "rank … is lost: edge … failed at … of step …: no path to rank … is left: verbs … (…), verbs … (…)"
"""In docs/errors.md."""


def call_on_hosts(name: str, hosts: int, *arguments: Any) -> list[Any]:
    """Call a body of rdma_bodies on every host of the lab."""
    with inside.on_hosts(hosts, getattr(bodies, name), hosts, *arguments) as processes:
        return [process.result(90) for process in processes]


def test_every_transport_test_holds_over_verbs(in_lab: Callable[..., Any]) -> None:
    assert in_lab(call_on_hosts, "run_matrix", 2) == [{}, {}]


def check_training(found: dict[str, Any], failures: int) -> None:
    """As many failures of each kind, and yet every message came once and every number is the same."""
    assert found["failed"] == dict.fromkeys(rdma_failures.KINDS, failures // len(rdma_failures.KINDS))
    hosts = found["hosts"]
    assert [host["differences"] for host in hosts] == [[]] * len(hosts)
    for rank, host in enumerate(hosts):
        for channel, sent in host["sent"].items():
            peer, direction = channel.split()
            received = hosts[int(peer)]["received"][f"{rank} {direction}"]
            assert sent["posted"] == sent["sent"] == sent["acknowledged"] == received["acknowledged"], (rank, channel)
            assert sent["bytes"] == received["bytes"], (rank, channel)
    assert sum(channel["path_failures"] for host in hosts for channel in host["sent"].values()) >= failures
    received = [channel for host in hosts for channel in host["received"].values()]
    assert sum(channel["corrupted"] for channel in received) >= found["failed"]["corruption"]
    # What the devices told is there for whoever looks: the pipeline's events and the monitor.
    assert any("IBV_EVENT_PORT_ERR; now port 1 is down" in text for host in hosts for text in host["links"])
    assert all(host["monitored"] == len(host["links"]) for host in hosts)


def test_two_ranks_train_bitwise_as_over_c10d_through_two_hundred_failures(in_lab: Callable[..., Any]) -> None:
    found = in_lab(rdma_failures.train_through, 2, 200, "c10d", rails=rdma_failures.RAILS, timeout=560.0)
    check_training(found, 200)


def test_four_ranks_train_bitwise_as_in_one_process_through_failures(in_lab: Callable[..., Any]) -> None:
    found = in_lab(rdma_failures.train_through, 4, 10, "one process", hosts=4, rails=rdma_failures.RAILS)
    check_training(found, 10)


def attack() -> Any:
    """The engine on host 0, and pyverbs as its peer on host 1."""
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.closing(inside.Process(0, rdma_peer.receive_from_stranger_code, (0, f"{folder}/listening"))) as engine,
        contextlib.closing(inside.Process(1, rdma_peer.send_and_attack, (1, f"{folder}/listening"))) as peer,
    ):
        return [engine.result(100), peer.result(100)]


def test_pyverbs_writes_messages_and_opens_nothing_with_a_key_that_is_not_its_own_or_no_longer_valid(
    in_lab: Callable[..., Any],
) -> None:
    engine, peer = in_lab(attack)
    assert peer == {"foreign": REMOTE_ACCESS_ERROR, "revoked": REMOTE_ACCESS_ERROR}
    # Nothing was written by either attempt.
    assert engine["held"] == [True, True, True]
    assert engine["counters"]["acknowledged"] == 3 and engine["counters"]["bytes"] == 3 * rdma_peer.SIZE


def test_ranks_that_no_port_joins_any_more_are_told_each_port_and_its_reason(in_lab: Callable[..., Any]) -> None:
    errors = in_lab(rdma_failures.cut_off)
    for host, (kind, message) in enumerate(errors):
        check_documented(kind, message, CUT_OFF)
        assert f"verbs rxe{host}_0 port 1 (" in message and f"verbs rxe{host}_1 port 1 (" in message
