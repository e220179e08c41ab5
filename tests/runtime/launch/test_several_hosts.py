"""A host that would give others its loopback address is refused; a job that may restart with old keys is warned of."""

from __future__ import annotations

import logging
import socket

import pytest
from errors_table import check_documented

from adaptra.errors import LaunchError
from adaptra.runtime.launch.several_hosts import check_launcher

LOOPBACK = (
    "rank …: gloo would give other hosts the address … of …, and rank 0 is on another host, …: expected GLOO_SOCKET_IFNAME to "
    "name the network interface that reaches the other hosts, on each host its own: …"
)
UNKNOWN = "rank …: GLOO_SOCKET_IFNAME=… names …: expected a network interface of this host, …: …"
ELSEWHERE = "192.0.2.1"  # an address for documentation, which no host has
TWO_HOSTS = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": ELSEWHERE}


@pytest.mark.parametrize("interface", ["", "lo"])
@pytest.mark.parametrize("host", ["localhost", "a name that leads nowhere"])
def test_a_loopback_address_for_other_hosts_is_refused(host: str, interface: str) -> None:
    with pytest.raises(LaunchError) as error:
        check_launcher(TWO_HOSTS | {"GLOO_SOCKET_IFNAME": interface}, host)
    check_documented("LaunchError", str(error.value), LOOPBACK)


@pytest.mark.parametrize("launched", [{}, TWO_HOSTS], ids=["one host", "two hosts"])
def test_an_interface_that_is_not_there_is_refused(launched: dict[str, str]) -> None:
    with pytest.raises(LaunchError, match=r"'no-such-one'.*: lo") as error:
        check_launcher(launched | {"GLOO_SOCKET_IFNAME": "no-such-one"}, "localhost")
    check_documented("LaunchError", str(error.value), UNKNOWN)


@pytest.mark.parametrize(
    "change",
    [{"GLOO_SOCKET_IFNAME": "card"}, {"WORLD_SIZE": "1"}, {"LOCAL_WORLD_SIZE": "2"}, {"MASTER_ADDR": "localhost"}],
    ids=["interface", "one rank", "one host", "rank 0 is here"],
)
def test_what_may_be_right_is_let_through(change: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without any network has the interface lo alone, so the one named here is added to what it has."""
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "card")])
    check_launcher(TWO_HOSTS | change, "localhost")


def test_a_name_with_an_address_of_this_host_is_let_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the addresses of a name, gloo takes the first that this host has: here one on a network, which any host can bind."""
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in (ELSEWHERE, "0.0.0.0", "127.0.0.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda name, *_, **__: found if name == "host" else found[:1])
    check_launcher(TWO_HOSTS, "host")


def test_restarts_that_share_a_store_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    shared = {"TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for quiet in ({"RANK": "1"}, {"TORCHELASTIC_MAX_RESTARTS": "0"}, {"TORCHELASTIC_USE_AGENT_STORE": "False"}):
        check_launcher({"RANK": "0"} | shared | quiet, "localhost")
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        check_launcher({"RANK": "0"} | shared, "localhost")
    (record,) = caplog.records
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in record.getMessage()
