"""Texts that ranks exchange through the store."""

from __future__ import annotations

from hub_ranks import on_all_ranks

from adaptra.errors import LaunchError
from adaptra.runtime.exchange.store_exchange import exchange_data, gather
from adaptra.runtime.transports.base import Transport
from adaptra.runtime.world.world import Attempt


def test_gathering_brings_everything_to_the_first_rank() -> None:
    found = on_all_ranks(lambda transport: gather(transport, "ranks", {"rank": transport.rank}, 5))
    assert found == [[{"rank": 0}, {"rank": 1}, {"rank": 2}], None, None]


def test_a_text_of_an_earlier_attempt_is_never_read() -> None:
    """Rank 0 tells nothing in the second attempt, and nobody takes what it told under that name in the first one."""

    def told(transport: Transport) -> list[object] | str:
        first = exchange_data(transport, "call 1", f"first of {transport.rank}", [0], 5)
        transport.begin(Attempt(0, 1))
        if transport.rank == 0:
            return first
        try:
            return exchange_data(transport, "call 1", "again", [0], 0.05)
        except LaunchError as error:
            return str(error)

    late = "tell/call 1: rank 0 did not answer within 0.05 s"
    assert on_all_ranks(told) == [["first of 0"], late, late]


def test_ranks_read_only_the_texts_that_they_want() -> None:
    wanted = ([1, 2], [], [0])
    found = on_all_ranks(lambda transport: exchange_data(transport, "ranks", transport.rank * 10, wanted[transport.rank], 5))
    assert found == [[10, 20], [], [0]]
