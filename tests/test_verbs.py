"""The delegate over real verbs: soft-RoCE devices of the lab, see tests/rxe."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import inside
import pytest
import rdma_bodies as bodies
import rdma_failures
import rdma_peer
from errors_table import check_documented

pytestmark = [pytest.mark.rdma, pytest.mark.timeout(120)]

REMOTE_ACCESS_ERROR = 10
"""``IBV_WC_REM_ACCESS_ERR``."""
CUT_OFF = "rank … is lost: edge … failed at … of step …: no path to rank … is left: verbs … (…), verbs … (…)"
"""In docs/errors.md."""


def call_on_hosts(name: str, hosts: int, *arguments: Any) -> list[Any]:
    """Call a body of rdma_bodies on every host of the lab."""
    with inside.on_hosts(hosts, getattr(bodies, name), hosts, *arguments) as processes:
        return [process.result(90) for process in processes]


def test_every_transport_test_holds_over_verbs(in_lab: Callable[..., Any]) -> None:
    assert in_lab(call_on_hosts, "run_matrix", 2, timeout=110.0) == [{}, {}]


def test_training_over_verbs_is_bitwise_training_in_one_process(in_lab: Callable[..., Any]) -> None:
    cases = [["mixed", "float32", 8, None, None]]
    assert in_lab(call_on_hosts, "train", 4, cases, hosts=4, timeout=110.0) == [[[]]] * 4


WAYS = (
    ("ip -n n0 link set rail{} down", "ip -n n0 link set rail{} up"),
    ("tc qdisc add dev p0_{} root netem loss 100%", "tc qdisc del dev p0_{} root"),
    ("ip link set p1_{} down", "ip link set p1_{} up"),
    ("ip -n n1 link set rail{} down", "ip -n n1 link set rail{} up"),
    ("ip link set p0_{} down", "ip link set p0_{} up"),
)
"""How to break a rail, and how to mend it: a host's own port, all packets lost, the cable at either end."""


def break_paths(rails: int, failures: int, outage: float) -> Any:
    """Break one rail after the other while two hosts stream, and mend each before its turn comes again."""
    paths = [f"rdma:rxe{{host}}_{rail}" for rail in range(rails)] + ["10.8.0.{address}"]
    with inside.on_hosts(2, bodies.stream, 2, paths, bodies.QUICK, failures) as processes:
        for process in processes:
            process.wait_for("streaming", 40)
        # A rail that is broken again before its connections came back does not count as another failure.
        for number in range(2 * failures):
            if bodies.STOP.exists():
                break
            spoil, mend = WAYS[number % len(WAYS)]
            inside.shell(spoil.format(number % rails))
            # How long the rail stays broken; nothing is waited for.
            time.sleep(outage)
            inside.shell(mend.format(number % rails))
        return [process.result(60) for process in processes]


@pytest.mark.timeout(240)
def test_no_message_is_lost_or_repeated_through_two_hundred_failures(in_lab: Callable[..., Any]) -> None:
    """Every message is the next one and holds what it should, whatever breaks under it; rails are used again once mended."""
    results = in_lab(break_paths, 4, 200, 0.3, rails=4, timeout=200.0)
    assert [found["wrong"] for found in results] == [0, 0]
    assert results[0]["count"] == results[1]["count"] > 1000
    for found in results:
        (counters,) = found["counters"]
        assert counters["acknowledged"] == counters["posted"] == counters["sent"]
        assert counters["corrupted"] == 0
    assert results[0]["counters"][0]["path_failures"] >= 200, results
    assert all(found["counters"][0]["path_changes"] > 100 for found in results), results


def train_while_paths_break(steps: int, every: int) -> Any:
    """Two hosts train; every few steps one of two rails breaks in another way, and the one that broke before is mended."""
    with inside.on_hosts(2, bodies.train_on, 2, steps) as processes:
        mend = None
        for number in range(every, steps, every):
            processes[0].wait_for(f"step {number - 1}", 60)
            if mend is not None:
                inside.shell(mend)
            spoil, mend = (line.format(number // every % 2) for line in WAYS[number // every % len(WAYS)])
            inside.shell(spoil)
        return [process.result(60) for process in processes]


def test_training_is_bitwise_the_same_while_a_path_fails_every_few_steps(in_lab: Callable[..., Any]) -> None:
    results = in_lab(train_while_paths_break, 80, 8, timeout=110.0)
    assert [found["differences"] for found in results] == [[], []]
    assert all(found["failures"] >= 5 for found in results), results
    # What the devices told is there for whoever looks: the pipeline's events and the monitor.
    assert "RDMA device rxe0_0: IBV_EVENT_PORT_ERR; now port 1 is down" in results[0]["links"], results
    assert results[0]["seen"] == len(results[0]["links"])


def attack() -> Any:
    """The engine on host 0, and pyverbs as its peer on host 1."""
    with (
        contextlib.closing(inside.Process(0, rdma_peer.receive_from_stranger_code, (0,))) as engine,
        contextlib.closing(inside.Process(1, rdma_peer.send_and_attack, (1,))) as peer,
    ):
        return [engine.result(40), peer.result(40)]


def test_pyverbs_writes_messages_and_opens_nothing_with_a_key_that_is_not_its_own_or_no_longer_valid(
    in_lab: Callable[..., Any],
) -> None:
    engine, peer = in_lab(attack, timeout=60.0)
    assert peer == {"foreign": REMOTE_ACCESS_ERROR, "revoked": REMOTE_ACCESS_ERROR}
    # Nothing was written by either attempt.
    assert engine["held"] == [True, True, True]
    assert engine["counters"]["acknowledged"] == 3 and engine["counters"]["bytes"] == 3 * rdma_peer.SIZE


def test_ranks_that_no_port_joins_any_more_are_told_each_port_and_its_reason(in_lab: Callable[..., Any]) -> None:
    errors = in_lab(rdma_failures.cut_off, timeout=110.0)
    for host, (kind, message) in enumerate(errors):
        check_documented(kind, message, CUT_OFF)
        assert f"verbs rxe{host}_0 port 1 (" in message and f"verbs rxe{host}_1 port 1 (" in message
