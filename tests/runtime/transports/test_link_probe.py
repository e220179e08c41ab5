"""A link's latency and seconds of a byte follow from what messages of three sizes take on it."""

from __future__ import annotations

import pytest

from adaptra.runtime.transports.link_probe import BULK_BYTES, link_of

LEAST = 2e-4


@pytest.mark.parametrize("rate", [1e6, 25e6, 100e6])
@pytest.mark.parametrize("held", [0, 64 * 2**10])
def test_what_a_second_port_holds_back_is_latency(rate: float, held: int) -> None:
    half, whole = (LEAST + (size + held) / rate for size in (BULK_BYTES // 2, BULK_BYTES))
    link = link_of(LEAST, half, whole)
    assert (link.latency, 1 / link.per_byte) == pytest.approx((LEAST + held / rate, rate))


@pytest.mark.parametrize("half", [0.0, 0.004, 0.009, 0.02, 1.0])
def test_a_host_that_was_busy_meanwhile_gives_no_link_that_can_not_be(half: float) -> None:
    whole = 0.01
    link = link_of(LEAST, half, whole)
    assert LEAST <= link.latency < whole
    assert link.latency + link.per_byte * BULK_BYTES == pytest.approx(whole)
    assert (whole - LEAST) / 2 <= link.per_byte * BULK_BYTES * (1 + 1e-9) <= (whole - LEAST) * (1 + 2e-9)


def test_a_quick_link_shows_no_more_than_the_latency_of_a_byte() -> None:
    link = link_of(5e-5, 1.1e-4, 1.2e-4)
    assert link.latency == pytest.approx(5e-5) and link.per_byte * BULK_BYTES == pytest.approx(7e-5)
    assert link_of(5e-5, 4e-5, 4e-5).per_byte == 0  # of sizes that differ by less than a busy host adds
