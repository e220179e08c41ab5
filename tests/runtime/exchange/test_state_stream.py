"""A stream of a state in an attempt after another one."""

from __future__ import annotations

import torch

from adaptra.runtime.exchange.state_stream import MESSAGE_BYTES, SPEC, UNDER_WAY, StateStream
from adaptra.runtime.transports.local import LocalHub
from adaptra.runtime.world.world import Attempt


def test_a_stream_of_an_earlier_attempt_is_dropped_though_it_has_the_same_step() -> None:
    """It has arrived whole. The next attempt's, of the same names and sizes, has other values."""
    hub = LocalHub(2)
    sender, receiver = hub.transport(1), hub.transport(0)
    size = MESSAGE_BYTES // 4 + 5
    StateStream(sender, 3, 5.0).send(0, {"weight": torch.zeros(size)}, 5.0)
    for transport in (receiver, sender):
        transport.begin(Attempt(0, 1))
    StateStream(sender, 3, 5.0).send(0, {"weight": torch.ones(size)}, 5.0)
    receiver.reserve({(1, SPEC): UNDER_WAY})
    assert torch.equal(StateStream(receiver, 3, 5.0).receive(1)["weight"], torch.ones(size))
    assert receiver.dropped == 2
