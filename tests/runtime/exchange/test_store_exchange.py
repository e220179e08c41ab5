"""Texts that ranks exchange through the store."""

from __future__ import annotations

from hub_ranks import on_all_ranks

from adaptra.runtime.exchange.store_exchange import exchange_data, gather


def test_gathering_brings_everything_to_the_first_rank() -> None:
    found = on_all_ranks(lambda transport: gather(transport, "ranks", {"rank": transport.rank}, 5))
    assert found == [[{"rank": 0}, {"rank": 1}, {"rank": 2}], None, None]


def test_ranks_read_only_the_texts_that_they_want() -> None:
    wanted = ([1, 2], [], [0])
    found = on_all_ranks(lambda transport: exchange_data(transport, "ranks", transport.rank * 10, wanted[transport.rank], 5))
    assert found == [[10, 20], [], [0]]
