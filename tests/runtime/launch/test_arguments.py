"""Arguments that all ranks must be given, and who is named where they differ or a rank does not come."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist
from counting_store import CountingStore
from errors_table import check_documented

from adaptra.errors import ControlError, LaunchError
from adaptra.runtime.exchange.store_exchange import exchange
from adaptra.runtime.launch.arguments import agree_on_arguments

SAME = {"stages": "2", "microbatches": "8"}
SECRET = "5b1f" * 16


def compared(
    ranks: int,
    others: Mapping[int, dict[str, str]] | None = None,
    but: tuple[int, ...] = (),
    timeout: float = 20.0,
    stores: Mapping[int, Any] | None = None,
) -> dict[int, Any]:
    """What each rank returns or raises: ``others`` are given other arguments, and those of ``but`` never come."""
    store = dist.HashStore()
    came = [rank for rank in range(ranks) if rank not in but]
    start = threading.Barrier(len(came))

    def run(rank: int) -> Any:
        start.wait()
        try:
            given = (others or {}).get(rank, SAME)
            return agree_on_arguments((stores or {}).get(rank, store), rank, ranks, given, timeout)
        except Exception as error:
            return error

    with ThreadPoolExecutor(ranks) as threads:
        return dict(zip(came, threads.map(run, came), strict=True))


@pytest.mark.parametrize("ranks", [1, 2, 9, 10, 30])
def test_ranks_with_the_same_arguments_share_a_digest_that_no_other_launch_has(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ADAPTRA_SECRET", SECRET)
    first, second = (set(compared(ranks).values()) for _ in range(2))
    assert len(first) == len(second) == 1 and first != second


@pytest.mark.parametrize(
    ("others", "named"),
    [
        ({29: {"stages": "3"}}, "rank 29 was given stages=3, rank 0 stages=2"),
        ({2: {"microbatches": "4"}}, "rank 2 was given microbatches=4, rank 0 microbatches=8"),
        # The lowest rank is named, and the first of its arguments that differ.
        ({11: {"stages": "4"}, 9: {"stages": "5", "microbatches": "9"}}, "rank 9 was given stages=5, rank 0 stages=2"),
        ({0: {"stages": "1"}}, "rank 1 was given stages=2, rank 0 stages=1"),
        ({5: {"seed": "1"}}, "rank 5 was given seed=1, rank 0 seed=None"),
    ],
)
def test_the_lowest_rank_with_other_arguments_is_named_on_all_ranks(others: dict[int, dict[str, str]], named: str) -> None:
    found = compared(30, {rank: {**SAME, **given} for rank, given in others.items()})
    for error in found.values():
        check_documented(
            type(error).__name__,
            str(error),
            "adaptra.compile: rank … was given …, rank 0 …: expected the same arguments on every rank",
        )
    assert {str(error) for error in found.values()} == {f"adaptra.compile: {named}: expected the same arguments on every rank"}


@pytest.mark.parametrize("but", [(29,), (2,), (0,), (3, 17, 25)])
def test_ranks_that_do_not_come_are_named_by_all_others(but: tuple[int, ...]) -> None:
    found = compared(30, but=but, timeout=1.0)
    assert all(isinstance(error, LaunchError) for error in found.values())
    named = ", ".join(map(str, but))
    assert {str(error) for error in found.values()} == {f"arguments: rank {named} did not answer within 1 s"}


@pytest.mark.parametrize("rank", [1, 12])
def test_a_rank_that_comes_and_then_stops_is_named(rank: int) -> None:
    """Its text is there, its digest is not: it died between the two."""
    store = dist.HashStore()
    store.set(f"arguments/{rank}", json.dumps({"arguments": SAME, "nonce": ""}))
    found = compared(20, but=(rank,), timeout=1.0, stores=dict.fromkeys(range(20), store))
    assert {str(error) for error in found.values()} == {f"arguments: rank {rank} did not answer within 1 s"}


class LostStore:
    """A store whose connection is broken."""

    def __getattr__(self, name: str) -> Any:
        raise dist.DistNetworkError("connection closed")


def test_a_rank_that_loses_the_store_says_so() -> None:
    error = compared(4, timeout=0.3, stores={3: LostStore()})[3]
    assert isinstance(error, ControlError)
    assert str(error) == "arguments: rank 3 lost the control store: connection closed"


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("arguments up/1", "{", "not JSON"),
        ("arguments up/1", json.dumps({"digest": "xyz", "compared": []}), "expected a digest, got 'xyz'"),
        (
            "arguments up/1",
            json.dumps({"digest": "0" * 64, "compared": [[2, "0" * 64]]}),
            "expected pairs of a rank and a digest",
        ),
        ("arguments down/0", json.dumps({"levels": [], "differs": None}), "expected [1] digests"),
        (
            "arguments down/0",
            json.dumps({"levels": [{"text": "0" * 64, "children": ["0" * 64]}], "differs": 7}),
            "field 'differs': expected a rank or null, got 7",
        ),
    ],
)
def test_what_is_no_record_of_a_rank_is_refused(key: str, value: str, message: str) -> None:
    store = dist.HashStore()
    store.set(key, value)
    rank = 0 if "up" in key else 1
    with pytest.raises(ControlError) as caught:
        agree_on_arguments(store, rank, 2, SAME, 0.3)
    assert message in str(caught.value)


def test_no_rank_leaves_before_those_below_it_have_read_the_result() -> None:
    """Rank 0 may host the store, which ends with it. Rank 1 is played by what it writes."""
    store, ended = dist.HashStore(), threading.Event()
    store.set("arguments up/1", json.dumps({"digest": "0" * 64, "compared": [[1, "0" * 64]]}))
    store.set("arguments/1", json.dumps({"arguments": {"stages": "3"}, "nonce": ""}))

    def first() -> None:
        with pytest.raises(LaunchError, match="rank 1 was given stages=3"):
            agree_on_arguments(store, 0, 2, SAME, 20.0)
        ended.set()

    thread = threading.Thread(target=first)
    thread.start()
    store.wait(["arguments down/0"])
    assert not ended.wait(0.3)
    store.set("arguments read/1", "")
    thread.join()
    assert ended.is_set()


def test_a_rank_asks_as_much_of_the_store_among_a_hundred_as_among_twenty() -> None:
    most: dict[int, tuple[int, int]] = {}
    for ranks in (20, 100):
        store = CountingStore()
        stores = {rank: store.of(rank) for rank in range(ranks)}
        assert len(set(compared(ranks, stores=stores).values())) == 1
        most[ranks] = store.most_requests(), max(store.bytes.values())
    assert most[20][0] == most[100][0] == 9
    assert most[100][1] < 2 * most[20][1]


def test_an_exchange_reads_all_texts_at_once() -> None:
    store = CountingStore()
    with ThreadPoolExecutor(20) as threads:
        found = list(threads.map(lambda rank: exchange(store.of(rank), "x", rank, str(rank), range(20), 20.0), range(20)))
    assert found == [[str(rank) for rank in range(20)]] * 20
    assert store.most_requests() == 3
