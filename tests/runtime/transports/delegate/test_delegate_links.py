"""The delegate's engine between hosts whose link is long, or turns long or lossy while messages travel."""

import pytest
from delegate_link_bodies import until
from linked_hosts import SYSCTLS, LinkedHosts

CONGESTION_CONTROL = SYSCTLS / "tcp_congestion_control"


def run(linked_hosts: type[LinkedHosts], before: str, after: str, goal: str) -> tuple[bool, bool]:
    """See ``until``: whether the goal was there before the change and in the end. All messages arrive, each once."""
    with linked_hosts(2, before) as hosts:
        addresses = [hosts.address(rank) for rank in (0, 1)]
        (sent, was_there, is_there), (arrived,) = hosts.call(until, addresses, after, hosts.control, goal)
    assert arrived == sent
    return was_there, is_there


@pytest.mark.root
@pytest.mark.parametrize(
    ("before", "after"), [("all delay=30ms", ""), ("all rate=50MB", "all delay=40ms")], ids=["long", "turned long"]
)
def test_what_one_connection_cannot_carry_gets_more(linked_hosts: type[LinkedHosts], before: str, after: str) -> None:
    _, is_there = run(linked_hosts, before, after, "several")
    assert is_there


@pytest.mark.root
def test_connections_are_under_bbr_only_where_packets_are_lost(linked_hosts: type[LinkedHosts]) -> None:
    systems = CONGESTION_CONTROL.read_text().strip()
    if systems != "bbr":
        pytest.skip(f"this system's connections are under {systems} whatever they lose: set {CONGESTION_CONTROL} to bbr")
    assert run(linked_hosts, "all delay=2ms", "all loss=0.03", "bbr") == (False, True)
