"""The delegate's engine between hosts whose link is long, or turns long while messages travel."""

import pytest
from delegate_link_bodies import until_several_connections


@pytest.mark.root
@pytest.mark.parametrize(
    ("before", "after"), [("all delay=30ms", ""), ("all rate=50MB", "all delay=40ms")], ids=["long", "turned long"]
)
def test_what_one_connection_cannot_carry_gets_more(linked_hosts, before, after):
    with linked_hosts(2, before) as hosts:
        addresses = [hosts.address(rank) for rank in (0, 1)]
        (sent, used), (arrived, _) = hosts.call(until_several_connections, addresses, after, hosts.control)
    assert arrived == sent
    assert used > 1
