"""Membership: who learns what of whose end, over a store in one process."""

import collections
import ctypes
import json
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist
from errors_table import check_documented
from transport_bodies import backward

from adaptra.errors import ControlError, PeerLostError, TransportError
from adaptra.runtime.membership.membership import Membership

DOCUMENTED = {
    "store": "the control store is lost: the process that hosts it died or can't be reached: …",
    "silent": "rank … gave no sign of life for … s…",
}


class Job:
    """Ranks in one process that beat fast; ``lost[rank].wait()`` until a rank was told of a loss."""

    def __init__(
        self, world_size: int, store: dist.Store | None = None, lost_after: float = 5.0, waiting_for: Any = None
    ) -> None:
        self.store = store or dist.HashStore()
        self.told = [threading.Event() for _ in range(world_size)]
        self.errors = [[] for _ in range(world_size)]
        self.threads_before = set(threading.enumerate())
        self.members = [
            Membership(
                self.store,
                rank,
                world_size,
                lambda error, rank=rank: self.tell(rank, error),
                waiting_for=waiting_for,
                interval=0.05,
                lost_after=lost_after,
            )
            for rank in range(world_size)
        ]

    def tell(self, rank: int, error: Exception) -> None:
        self.errors[rank].append(error)
        self.told[rank].set()

    def wait(self, rank: int) -> PeerLostError:
        assert self.told[rank].wait(100), f"rank {rank} was told nothing"
        (error,) = self.errors[rank]
        assert isinstance(error, PeerLostError)
        assert self.members[rank].lost is error
        return error

    def wait_until_seen(self, rank: int, by: Sequence[int] = (0,)) -> None:
        """Until others have read that a rank failed."""
        deadline = time.monotonic() + 100
        while not all(rank in json.loads(self.store.get(f"rank {other}"))["seen"] for other in by):
            assert time.monotonic() < deadline, f"rank {rank}: nobody noticed"

    def wait_until_beaten(self, times: int) -> None:
        """Until every rank has beaten so many times more."""
        ranks = [f"rank {rank}" for rank in range(len(self.members))]
        until = {rank: times + (json.loads(self.store.get(rank))["beat"] if self.store.check([rank]) else 0) for rank in ranks}
        deadline = time.monotonic() + 100
        while any(not self.store.check([rank]) or json.loads(self.store.get(rank))["beat"] < until[rank] for rank in ranks):
            assert time.monotonic() < deadline, "a rank does not beat"

    def close(self) -> None:
        with ThreadPoolExecutor(len(self.members)) as pool:
            list(pool.map(Membership.close, self.members))
        assert not [thread.name for thread in set(threading.enumerate()) - self.threads_before if "membership" in thread.name]


def test_a_failure_reaches_all_others_once() -> None:
    job = Job(3)
    error = ZeroDivisionError("by zero")
    assert job.members[1].fail(error, edge=(0, 1), op="1F3") is error
    for rank in (0, 2):
        lost = job.wait(rank)
        assert str(lost) == "rank 1 failed at 1F3 on edge 0→1: ZeroDivisionError: by zero"
        assert (lost.rank, lost.edge, lost.op) == (1, (0, 1), "1F3")
        # Its own failure is only a consequence.
        assert job.members[rank].fail(TransportError("connection closed")) is lost
    job.close()
    assert not job.errors[1]


def test_who_reports_a_loss_gives_way_to_the_lost_ranks_own_report() -> None:
    """Rank 2 notices first that rank 1 is gone; rank 1's own report, though later, is the cause for everyone."""
    job = Job(4)
    report = PeerLostError("connection closed", rank=1, edge=(1, 2), op="1SEND_F0")
    cause = MemoryError("no memory")
    with ThreadPoolExecutor(1) as pool:
        reported = pool.submit(job.members[2].fail, report)
        job.wait_until_seen(2)
        assert job.members[1].fail(cause) is cause
    assert str(reported.result()) == "rank 1 failed: MemoryError: no memory, noticed at 1SEND_F0 on edge 1→2"
    for rank in (0, 3):
        assert str(job.wait(rank)) == "rank 1 failed: MemoryError: no memory"
    late = Membership(job.store, 0, 4, job.errors[0].append, interval=0.05)
    try:
        found = late.fail(TransportError("connection closed"))
    finally:
        late.close()
    assert str(found) == "rank 1 failed: MemoryError: no memory"
    job.close()


def test_a_neighbour_that_ends_its_connections_is_not_blamed_for_the_rank_that_died() -> None:
    """Rank 1 dies; rank 2 closes what it has, which rank 3 notices and reports before rank 2 says why."""
    job = Job(4)
    consequence = PeerLostError("connection closed", rank=2, edge=(2, 3), op="2SEND_F5")
    cause = PeerLostError("connection closed", rank=1, edge=(1, 2), op="1SEND_F5")
    job.members[1].close()
    with ThreadPoolExecutor(2) as pool:
        later = pool.submit(job.members[3].fail, consequence)
        job.wait_until_seen(3, by=(0, 2))
        first = pool.submit(job.members[2].fail, cause)
    told = [job.wait(0), later.result(), first.result()]
    assert [(error.rank, error.edge, error.op) for error in told if isinstance(error, PeerLostError)] == [
        (1, (1, 2), "1SEND_F5")
    ] * 3
    assert first.result() is cause
    job.close()


def test_who_is_reported_lost_and_says_nothing_himself_is_lost_though_he_beats() -> None:
    """Rank 1 sits in a long call, say: its heart beats, and it notices nothing."""
    job = Job(3, lost_after=1.0)
    report = PeerLostError("no message", rank=1, edge=(1, 2), op="1SEND_F0")
    assert job.members[2].fail(report) is report
    for rank in (0, 1):
        assert (job.wait(rank).rank, job.wait(rank).edge) == ({0: 1, 1: 2}[rank], (1, 2))
    job.close()


def test_the_rank_with_the_store_stays_until_all_have_found_the_cause() -> None:
    """Rank 0 knows the cause at once; the report that rank 2 waits for may come last."""
    job = Job(3)
    job.members[1].close()
    with ThreadPoolExecutor(2) as pool:
        consequence = PeerLostError("connection closed", rank=0, edge=(0, 2), op="0SEND_F5")
        later = pool.submit(job.members[2].fail, consequence)
        job.wait_until_seen(2, by=(0,))
        cause = PeerLostError("connection closed", rank=1, edge=(1, 0), op="1SEND_B5")
        assert job.members[0].fail(cause) is cause
        record = json.loads(job.store.get("rank 2"))
    assert record["settled"] and 0 in record["seen"]
    followed = later.result()
    assert isinstance(followed, PeerLostError) and followed.rank == 1
    job.close()


def test_a_rank_that_stops_beating_is_lost_with_the_edge_that_waits() -> None:
    """Rank 1 never starts; rank 0 waits for a message from it."""
    store = dist.HashStore()
    told = threading.Event()
    member = Membership(store, 0, 2, lambda _: told.set(), waiting_for=lambda rank: backward(4), interval=0.05, lost_after=0.3)
    assert told.wait(100)
    lost = member.lost
    assert lost is not None
    check_documented("PeerLostError", str(lost), DOCUMENTED["silent"])
    assert str(lost).startswith("rank 1 gave no sign of life for 0.")
    assert str(lost).endswith("while edge 1→0 waits for 1SEND_B4 of step 0")
    assert (lost.rank, lost.edge, lost.op) == (1, (1, 0), "1SEND_B4")
    member.close()


def test_a_process_that_was_too_busy_to_look_blames_nobody_for_silence() -> None:
    """No thread of it runs for twice as long as makes a rank lost, whatever each was doing when that began."""
    job = Job(3, lost_after=0.5)
    for _ in range(4):
        job.wait_until_beaten(3)
        ctypes.PyDLL(None).usleep(1_000_000)  # with the interpreter's lock held
    job.wait_until_beaten(5)
    assert not any(job.errors)
    assert not any(event.is_set() for event in job.told)
    job.close()


class FarStore:
    """A store that counts what it is asked, and from which each answer takes a while."""

    def __init__(self, store: dist.Store, seconds: float = 0.0) -> None:
        self._store = store
        self._seconds = seconds
        self.asked = collections.Counter()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self.asked[name] += 1
            if name not in ("set", "multi_set"):  # which nobody answers
                time.sleep(self._seconds)
            return getattr(self._store, name)(*arguments)

        return call


def test_a_rank_far_from_the_store_loses_nobody_and_asks_once_a_beat() -> None:
    """With ten ranks and 0.1 s for an answer, asking for each rank in turn takes longer than makes a rank lost."""
    store, told = dist.HashStore(), []
    stores: list[Any] = [FarStore(store, 0.1 if rank in (0, 9) else 0.0) for rank in range(10)]
    members = [Membership(each, rank, 10, told.append, interval=0.05, lost_after=0.6) for rank, each in enumerate(stores)]

    def beats(rank: int) -> int:
        return json.loads(store.get(f"rank {rank}"))["beat"] if store.check([f"rank {rank}"]) else 0

    deadline = time.monotonic() + 100
    while min(map(beats, range(10))) < 12 and not told:
        assert time.monotonic() < deadline, "a rank does not beat"
        time.sleep(0.01)
    assert not told
    for rank, each in enumerate(stores):
        answered = sum(count for name, count in each.asked.items() if name not in ("set", "multi_set"))
        # While the ranks come, the leader asks twice a beat.
        assert answered <= beats(rank) + (each.asked["check"] if rank == 0 else 0), (rank, each.asked)
    with ThreadPoolExecutor(10) as pool:
        list(pool.map(Membership.close, members))


def test_a_rank_that_falls_silent_is_named_to_all_by_the_one_that_reads() -> None:
    """Its record stands still. So does the leader's bulletin in the second job, which everybody watches."""
    for silent in (2, 0):
        store, told = dist.HashStore(), [threading.Event() for _ in range(4)]
        store.set(f"rank {silent}", json.dumps(GOOD))
        members = [
            Membership(store, rank, 4, lambda _, one=told[rank]: one.set(), interval=0.05, lost_after=0.5)
            for rank in range(4)
            if rank != silent
        ]
        for rank in range(4):
            assert rank == silent or told[rank].wait(100)
        assert {member.lost and member.lost.rank for member in members} == {silent}
        assert any(f"rank {silent} gave no sign of life for 0." in str(member.lost) for member in members)
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(Membership.close, members))


def test_leaving_in_turn_is_no_loss() -> None:
    job = Job(3, lost_after=0.3)
    for member in job.members:
        member.close()
    job.close()
    assert job.errors == [[], [], []]


class Stuck:
    """A store whose host is gone without a word: calls don't return until the test ends."""

    def __init__(self) -> None:
        self.end = threading.Event()

    def set(self, key: str, value: str) -> None:
        self.end.wait(100)

    def multi_set(self, keys: list[str], values: list[str]) -> None:
        self.end.wait(100)

    def add(self, key: str, amount: int) -> int:
        self.end.wait(100)
        return amount

    def check(self, keys: list[str]) -> bool:
        return False

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return desired.encode()


def test_a_store_that_does_not_answer_is_lost() -> None:
    store: Any = Stuck()
    job = Job(2, store=store, lost_after=0.3)
    check_documented("PeerLostError", str(job.wait(0)), DOCUMENTED["store"])
    assert "the process that hosts it died or can't be reached: no answer for 0." in str(job.wait(0))
    store.end.set()
    job.close()


def test_an_error_of_a_request_to_the_store_is_the_loss_of_the_store() -> None:
    """Training asks the store too, and may be the first to be refused."""
    job = Job(2, lost_after=5.0)
    refused = dist.DistNetworkError("host:1 refuses connections")
    error = ControlError("rank 0 lost the store of the control plane: host:1 refuses connections")
    raised = job.members[0].fail(error, of_store=refused)
    check_documented("PeerLostError", str(raised), DOCUMENTED["store"])
    assert "died or can't be reached: host:1 refuses connections" in str(raised)
    job.close()


GOOD = {"version": 1, "beat": 1, "state": "running", "failure": None, "seen": [], "settled": True}
FAILURE = {"ordinal": 1, "message": "m", "lost": None, "edge": None, "op": None, "is_certain": False}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "expected a JSON object"),
        (json.dumps(GOOD | {"version": 2}), "field 'version': expected 1"),
        (json.dumps(GOOD | {"state": "asleep"}), "field 'state': expected running, failed or left, got 'asleep'"),
        (json.dumps(GOOD | {"beat": "1"}), "field 'beat'"),
        (json.dumps(GOOD | {"seen": [True]}), "field 'seen': expected whole numbers"),
        (json.dumps(GOOD | {"settled": 1}), "field 'settled': expected true or false"),
        (json.dumps(GOOD | {"mood": "good"}), "unknown field 'mood'"),
        (json.dumps(GOOD | {"failure": "x"}), "failure: expected a JSON object"),
        (json.dumps(GOOD | {"failure": FAILURE | {"edge": [1]}}), "field 'edge': expected two stages"),
        (json.dumps(GOOD | {"failure": FAILURE | {"op": 7}}), "field 'op': expected a short text"),
        (json.dumps(GOOD | {"failure": FAILURE | {"lost": -1}}), "field 'lost': expected whole numbers"),
        (json.dumps(GOOD | {"failure": FAILURE | {"is_certain": 1}}), "field 'is_certain': expected true or false"),
    ],
)
def test_a_record_that_is_none_ends_the_job_with_its_rank(text: str, message: str) -> None:
    """Whatever lies in the store is checked field by field before anything looks at it."""
    store = dist.HashStore()
    store.set("rank 1", text)
    told = threading.Event()
    member = Membership(store, 0, 2, lambda _: told.set(), interval=0.05)
    assert told.wait(100)
    assert "membership record of rank 1" in str(member.lost)
    assert message in str(member.lost)
    member.close()


class StoreThatGoes:
    """A store until it is told to go."""

    def __init__(self) -> None:
        self._store = dist.HashStore()
        self.is_gone = False

    def __getattr__(self, name: str) -> Any:
        if self.is_gone:
            raise RuntimeError("connection closed")
        return getattr(self._store, name)


def test_a_rank_that_was_reported_is_the_cause_also_if_the_store_goes_next() -> None:
    """As when its host learns of the loss by another way and leaves, while the lost rank's own report is waited for."""
    store: Any = StoreThatGoes()
    member = Membership(store, 0, 2, lambda _: None, interval=0.05)
    beats = threading.Event()

    def beat() -> None:
        beaten = 1
        while not beats.wait(0.01):
            beaten += 1
            store._store.set("rank 1", json.dumps(GOOD | {"beat": beaten}))

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    report = PeerLostError("rank 1 is lost: connection reset", rank=1, edge=(1, 0), op="0RECV_B3")
    with ThreadPoolExecutor(1) as pool:
        told = pool.submit(member.fail, report)
        deadline = time.monotonic() + 100
        while not store._store.check(["failures"]):
            assert time.monotonic() < deadline, "the failure was not told"
        store.is_gone = True
        assert told.result(100) is report
    beats.set()
    thread.join()
    member.close()


def test_limits_that_leave_no_time_for_a_heartbeat_are_refused() -> None:
    with pytest.raises(ValueError, match="expected 0 < interval <= lost_after / 3"):
        Membership(dist.HashStore(), 0, 1, print, interval=5, lost_after=10)
