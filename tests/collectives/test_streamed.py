"""Rounds in which late ranks own nothing: each sum is whole, ports carry one message, and the number of rounds is known."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

import pytest

from adaptra.collectives.algorithms import sum_schedule
from adaptra.collectives.streamed import streamed
from adaptra.collectives.verify import verify_sum


@pytest.mark.parametrize("replicas", [3, 4, 5, 6])
def test_every_late_set_gives_all_the_whole_sum(replicas: int) -> None:
    for count in range(1, replicas - 1):
        for late in combinations(range(replicas), count):
            for turns in (1, 3):
                owners = replicas - count
                schedule = sum_schedule("streamed", replicas, turns * owners, late)
                verify_sum(schedule)
                messages = schedule.messages
                assert messages[-1].round + 1 == turns * (owners - 1) + (turns + 1) * (replicas - 1)
                assert len(messages) == 2 * (replicas - 1) * turns * owners, "each part moves as often as in any sum"


def test_a_late_rank_sends_only_its_own_terms_and_owners_wait_for_none_before_they_exchange() -> None:
    messages = [*streamed(8, 24, (2, 5))]
    sent = Counter(message.source for message in messages if message.source in (2, 5))
    assert sent == {2: 24, 5: 24}
    first = min(message.round for message in messages if {message.source, message.destination} & {2, 5})
    assert first == 4 * 5, "four parts for each of six owners"
