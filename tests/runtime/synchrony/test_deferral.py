"""What is deferred to which step, as all replicas find it from what each of them tells."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from adaptra.errors import StateError
from adaptra.planning.synchrony.modes import Deadline
from adaptra.runtime.synchrony.deferral import Deferral

MICROBATCHES = 4


def replicas(count: int = 3, quorum: float = 0.75) -> list[Deferral]:
    return [Deferral(Deadline(quorum), replica, count, MICROBATCHES) for replica in range(count)]


def end_step(ranks: list[Deferral], own: tuple[int, ...], *, mean: bool = False) -> None:
    for one, count in zip(ranks, own, strict=True):
        one.take(count)
    told = torch.stack([one.told() for one in ranks]).sum(0)
    for one in ranks:
        one.meet(told / len(ranks) if mean else told, mean=mean)


@pytest.mark.parametrize("mean", [False, True])
def test_all_ranks_find_the_same_set(mean: bool) -> None:
    ranks = replicas()
    end_step(ranks, (4, 1, 3), mean=mean)
    end_step(ranks, (4, 2, 4), mean=mean)
    for one in ranks:
        assert one.counts == (4, 5, 5) and one.deferred == (0, 2, 0)
        assert one.mean_count == pytest.approx(14 / 3) and one.share == pytest.approx(14 / 12)
        assert one.log == ranks[0].log
    assert ranks[0].log == [
        {"number": 1, "parts": [{"first": 0, "count": 4}, {"first": 0, "count": 1}, {"first": 0, "count": 3}]},
        {"number": 2, "parts": [{"first": 4, "count": 4}, {"first": 1, "count": 5}, {"first": 3, "count": 5}]},
    ]


@pytest.mark.parametrize(
    ("quorum", "deferred", "free"),
    [
        (1.0, (0, 0, 0), 9),  # all but each replica's first
        (0.75, (0, 0, 0), 6),
        (0.75, (0, 3, 0), 6),  # 12 of 15, of which 3 are deferred and 3 first
        (0.1, (0, 0, 0), 0),
        (0.7, (0,), 2),  # 2.8 of 4 is 3, of which one is the first
    ],
)
def test_a_share_of_what_is_there_begins(quorum: float, deferred: tuple[int, ...], free: int) -> None:
    assert Deadline(quorum).free(MICROBATCHES, deferred) == free


def test_shares_of_whole_numbers_are_not_rounded_up() -> None:
    for replicas_count in range(1, 9):
        for tenths in range(1, 11):
            whole = tenths * replicas_count  # of 10 microbatches
            assert Deadline(tenths / 10).free(10, (0,) * replicas_count) == whole - replicas_count


def test_a_log_says_what_is_computed() -> None:
    ranks = replicas()
    end_step(ranks, (4, 1, 3))
    end_step(ranks, (4, 4, 4))
    again = replicas()
    for one in again:
        one.replay(ranks[0].log)
    assert [one.replayed for one in again] == [4, 1, 3]
    end_step(again, (4, 1, 3))
    assert [one.replayed for one in again] == [4, 4, 4]
    end_step(again, (4, 4, 4))
    assert [one.replayed for one in again] == [None] * 3 and again[0].log == ranks[0].log


@pytest.mark.parametrize(
    "parts",
    [
        [(0, 4), (0, 4)],
        [(0, 4), (4, 4), (0, 4)],
        [(0, 4), (0, 5), (0, 4)],
        [(0, 4), (0, 0), (0, 4)],
    ],
    ids=["replicas", "first", "too many", "none"],
)
def test_what_is_no_log_of_this_job_is_refused(parts: list[tuple[int, int]]) -> None:
    (one, *_) = replicas()
    entry: dict[str, Any] = {"number": 1, "parts": [{"first": first, "count": count} for first, count in parts]}
    with pytest.raises(StateError, match="log of a deadline"):
        one.replay([entry])
    assert one.replayed is None
